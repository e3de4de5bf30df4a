"""The plan of a cluster as a directory that needs no Drillyard: `plan --output DIR`.

main.tf.json     what Terraform makes; backend.tf.json: where its state is kept
values/*.json    values of the charts; charts/NAME/: the charts that come with Drillyard
apply.sh         the steps of `up` in order, as a shell script that asks before Terraform makes anything
README.md        the same steps for a reader, with prices and the way back
"""  # noqa: E501

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml

from drillyard.config.load import yaml_text
from drillyard.plan_files import packaged_chart, write_plan_files
from drillyard.provision.cluster_plan import CLUSTER_LABEL, MADE_BY, ChartRelease, ClusterPlan
from drillyard.provision.kubeconfig_context import context_name
from drillyard.provision.nebius import apply_script
from drillyard.provision.plan_text import plan_text
from drillyard.provision.prices import UsePrice

_HEADER = """\
#!/bin/sh
# Cluster {name}: what `drillyard cluster up` does, in order. Made by `drillyard cluster plan --output`.
# Needs gcloud (gcloud auth login; gcloud auth application-default login), {programs}. It can be run again after an error.
set -eu
cd "$(dirname -- "$0")"
"""  # noqa: E501
_README = """\
# Cluster {name}

{made_by}

`sh apply.sh` makes the cluster in project {project}. It asks before Terraform makes anything, and
can be run again after an error. `drillyard cluster up` of the same config continues where it ended:
both keep the state in gs://{bucket}.

The way back, from this directory, once no run is left; the bucket of the state remains:

{back}
{data}
## The plan

```
{text}```
"""
_TOOLKIT_README = """\
# Slurm cluster {name}

{made_by}

`sh apply.sh` makes the cluster in project {project} with Google's Cluster Toolkit, which shows each
of its three groups and asks. It can be run again after an error, or after `drillyard cluster plan
--output DIR --overwrite` has written other files; the state is in gs://{bucket}.

For `drillyard launch` the cluster config then needs the following, with your login on the nodes
(`gcloud compute os-login describe-profile`) in place of USER, and ssh_config of this directory:

{section}
`sh destroy.sh` removes it with all data on /home, once no run is left.

## The plan

```
{text}```
"""


def plan_directory(plan: ClusterPlan, of_use: Sequence[UsePrice]) -> dict[str, tuple[str, int]]:
    """The files of the directory by their paths in it: text and mode."""
    if plan.toolkit is not None:
        return {"README.md": (_toolkit_readme(plan, of_use), 0o644), **plan.toolkit.files}
    if plan.recipe is not None:
        return dict(plan.recipe.files)
    if plan.state_endpoint:
        return _of_nebius(plan, of_use)
    backend = {"gcs": {"bucket": plan.state_bucket, "prefix": plan.name}}
    files = {
        "main.tf.json": _json(plan.terraform),
        "backend.tf.json": _json({"terraform": {"backend": backend}}),
    }
    files |= _charts(plan)
    files["README.md"] = _readme(plan, of_use)
    script = "\n".join(_steps(plan))
    return {**{path: (text, 0o644) for path, text in files.items()}, "apply.sh": (script, 0o755)}


def _of_nebius(plan: ClusterPlan, of_use: Sequence[UsePrice]) -> dict[str, tuple[str, int]]:
    files = {
        "main.tf.json": _json(plan.terraform),
        "backend.tf.json": _json(
            {"terraform": {"backend": apply_script.s3_backend(plan, plan.state_endpoint)}}
        ),
        "README.md": apply_script.readme(plan, of_use, MADE_BY, _removals(plan)),
        **_charts(plan),
    }
    if plan.has_kubernetes:
        text = yaml_text(dict(plan.launch_settings or {}), width=100)
        files[apply_script.launch_file(plan)] = f"# {MADE_BY}\n{text}"
    script = apply_script.script(plan, MADE_BY, list(_installs(plan)))
    return {**{path: (text, 0o644) for path, text in files.items()}, "apply.sh": (script, 0o755)}


def _charts(plan: ClusterPlan) -> dict[str, str]:
    """The values of the releases, and the charts that come with Drillyard, by their paths."""
    files: dict[str, str] = {}
    for release in plan.releases:
        files[_values(release)] = _json(release.values)
        if _is_ours(release):
            for path, content in packaged_chart(release.chart).items():
                files[f"charts/{release.chart}/{path}"] = content
    return files


def write_cluster_plan(
    plan: ClusterPlan, of_use: Sequence[UsePrice], directory: Path, *, overwrite: bool = False
) -> list[Path]:
    """Write the directory; returns the paths of its files. UserError, with nothing written, where
    it contains anything but a plan, or, unless `overwrite`, a file with other content."""
    return write_plan_files(
        directory,
        plan_directory(plan, of_use),
        script="apply.sh",
        made_by=MADE_BY,
        overwrite=overwrite,
    )


def _steps(plan: ClusterPlan) -> Iterator[str]:
    project, bucket = f"--project={plan.project}", f"gs://{plan.state_bucket}"
    yield _HEADER.format(name=plan.name, programs=_programs(plan))
    if plan.services:
        yield "# The APIs of the project."
        yield f"{_shell('gcloud', 'services', 'enable', *plan.services, project)}\n"
    yield "# The bucket of Terraform's state, with versions."
    describe = _shell("gcloud", "storage", "buckets", "describe", bucket, project)
    create = _shell(
        "gcloud",
        "storage",
        "buckets",
        "create",
        bucket,
        project,
        f"--location={plan.region}",
        "--uniform-bucket-level-access",
        "--public-access-prevention",
    )
    yield f"{describe} >/dev/null 2>&1 || {create}"
    labels = ",".join(f"{key}={value}" for key, value in (plan.labels or {}).items())
    update = ("gcloud", "storage", "buckets", "update", bucket, "--versioning")
    yield f"{_shell(*update, f'--update-labels={labels}')}\n"
    yield "# Everything in the cloud; Terraform shows it and asks."
    yield "terraform init -input=false"
    yield "terraform apply\n"
    if plan.login is not None:
        yield "# The hosts. `drillyard cluster up` of the same config makes the file for launch."
        own = f"--filter=labels.{CLUSTER_LABEL}={plan.name}"
        yield _shell("gcloud", "compute", "instances", "list", own, project)
        yield ""
        return
    if plan.job_service is not None:
        yield "# The jobs. `drillyard cluster up` of the same config completes it for launch."
        region = f"--region={plan.region}"
        own = f"--filter=labels.{CLUSTER_LABEL}={plan.name}"
        yield _shell("gcloud", "ai", "custom-jobs", "list", region, own, project)
        yield ""
        return
    yield "# Access to the cluster."
    location = f"--location={_cluster_location(plan)}"
    yield _shell("gcloud", "container", "clusters", "get-credentials", plan.name, location, project)
    yield from _installs(plan)
    yield ""


def _installs(plan: ClusterPlan) -> Iterator[str]:
    for release in plan.releases:
        yield f"\n# {release.name} {release.version}"
        yield _install(plan, release)


def _programs(plan: ClusterPlan) -> str:
    if not plan.has_kubernetes:
        return "terraform"
    return "terraform, helm and\n# gke-gcloud-auth-plugin"


def _install(plan: ClusterPlan, release: ChartRelease) -> str:
    chart = f"charts/{release.chart}" if _is_ours(release) else release.chart
    # A chart of a directory or an archive has the version that it has.
    version = ("--version", release.version) if chart.startswith("oci://") else ()
    where = ("--namespace", release.namespace, "--create-namespace")
    values = ("--values", _values(release), "--wait")
    context = ("--kube-context", _context(plan))
    return _shell(
        "helm", "upgrade", "--install", release.name, chart, *version, *where, *values, *context
    )


def _readme(plan: ClusterPlan, of_use: Sequence[UsePrice]) -> str:
    buckets = plan.terraform.get("resource", {}).get("google_storage_bucket", {}).values()
    return _README.format(
        name=plan.name,
        made_by=MADE_BY,
        project=plan.project,
        bucket=plan.state_bucket,
        back="\n".join(f"    {line}" for line in (*_removals(plan), "terraform destroy")),
        data="".join(
            f"\nIt does not delete gs://{each['name']} while objects or folders are in it. With all"
            f" its data:\n\n    gcloud storage rm --recursive gs://{each['name']}\n"
            for each in buckets
        ),
        text=plan_text(plan, of_use, "CLUSTER.yaml"),
    )


def _removals(plan: ClusterPlan) -> list[str]:
    """The commands that remove the charts."""
    context = ("--kube-context", _context(plan)) if plan.releases else ()
    return [
        _shell("helm", "uninstall", each.name, "--namespace", each.namespace, *context)
        for each in reversed(plan.releases)
    ]


def _toolkit_readme(plan: ClusterPlan, of_use: Sequence[UsePrice]) -> str:
    section = yaml.safe_dump(dict(plan.launch_settings or {}), sort_keys=False)
    return _TOOLKIT_README.format(
        name=plan.name,
        made_by=MADE_BY,
        project=plan.project,
        bucket=plan.state_bucket,
        section="".join(f"    {line}\n" for line in section.splitlines()),
        text=plan_text(plan, of_use, "CLUSTER.yaml"),
    )


def _cluster_location(plan: ClusterPlan) -> str:
    places = [each.location for each in plan.resources if each.kind == "google_container_cluster"]
    return places[0] or plan.region


def _context(plan: ClusterPlan) -> str:
    """The context that the cloud's own program writes."""
    if plan.cloud == "nebius":
        return str(context_name(plan))
    return f"gke_{plan.project}_{_cluster_location(plan)}_{plan.name}"


def _is_ours(release: ChartRelease) -> bool:
    return "://" not in release.chart


def _values(release: ChartRelease) -> str:
    return f"values/{release.name}.json"


def _json(value: object) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def _shell(*words: str) -> str:
    return shlex.join(words)
