"""The directory of a plan for Nebius: how its script makes the cluster, and what its README says.

Terraform's state is in Nebius' object storage, by Terraform's backend for S3; an object beside it
is the lock (https://developer.hashicorp.com/terraform/language/backend/s3#state-locking).
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from typing import Any

from drillyard.provision.cluster_plan import ClusterPlan
from drillyard.provision.kubeconfig_context import context_name
from drillyard.provision.made_hosts import TAKE_NEW_FILE
from drillyard.provision.nebius.instances import FILESYSTEM_KIND
from drillyard.provision.nebius.kubernetes_plan import CLUSTER_OUTPUT
from drillyard.provision.nebius.nebius_plan import LAUNCH_OUTPUT
from drillyard.provision.plan_text import plan_text
from drillyard.provision.prices import UsePrice
from drillyard.provision.state_bucket import STATE

_SCRIPT = """\
#!/bin/sh
# Cluster {name}, in order. {made_by}
# Needs nebius (nebius profile create), {programs}. It can be run again after an error.
set -eu
cd "$(dirname -- "$0")"

# The key of Terraform's state: of a service account that may write objects of the project.
: "${{AWS_ACCESS_KEY_ID:?is not set: see README.md}}" "${{AWS_SECRET_ACCESS_KEY:?is not set: see README.md}}"
NEBIUS_IAM_TOKEN=$(nebius iam get-access-token)
export NEBIUS_IAM_TOKEN

# The bucket of Terraform's state, with versions.
{find} >/dev/null 2>&1 || {create}

# Everything in the cloud; Terraform shows it and asks.
terraform init -input=false
terraform apply
"""  # noqa: E501
_OF_HOSTS = """\

# The config for `drillyard launch`, with the addresses of the hosts.
terraform output -raw {output} >{file}.new
"""
_OF_KUBERNETES = """\

# Access to the cluster.
nebius mk8s cluster get-credentials --id "$(terraform output -raw {output})" --external --context-name {context} --force
{installs}
echo 'drillyard launch RUN.YAML --cluster {file}'
"""  # noqa: E501
_README = """\
# Cluster {name}

{made_by}

`sh apply.sh` makes the cluster in project {project} of Nebius. `drillyard launch` takes {file}{how}. It
asks before Terraform makes anything, and can be run again after an error, or after a new plan was written here with
`--overwrite`.

Terraform's state is in the bucket {bucket}. Its key is one of a service account that is in a group with the role
`editor` of the project:

    nebius iam service-account create --parent-id {project} --name terraform
    nebius iam v2 access-key create --parent-id {project} --account-service-account-id ID
    export AWS_ACCESS_KEY_ID=... AWS_SECRET_ACCESS_KEY=...

The way back, from this directory, once no run is left; the bucket of the state remains:

{back}
{data}
## The plan

```
{text}```
"""  # noqa: E501
_DATA = """
The shared file system has the data of runs, so Terraform refuses to destroy it: the first line
takes it out of the state, and it stays, and is billed. A later cluster uses it with
`nebius: {filesystem: ID}` in place of `filesystem_gib`. With all its data:

    nebius compute filesystem delete --id ID
"""


def s3_backend(plan: ClusterPlan, endpoint: str) -> dict[str, Any]:
    """Terraform's backend. The service is not AWS, whose checks are left out. An `endpoint` of the
    user's own may have no name below it for each bucket."""
    own = {} if endpoint == plan.state_endpoint else {"use_path_style": True}
    skipped = ("region_validation", "credentials_validation", "requesting_account_id")
    return {
        "s3": {
            "bucket": plan.state_bucket,
            "key": f"{plan.name}/{STATE}",
            "region": plan.region,
            "endpoints": {"s3": endpoint},
            "use_lockfile": True,
            **own,
            **{f"skip_{each}": True for each in (*skipped, "metadata_api_check", "s3_checksum")},
        }
    }


def launch_file(plan: ClusterPlan) -> str:
    """The file of the directory that `launch` takes."""
    return f"{plan.name}-{(plan.launch_settings or {})['platform']}.yaml"


def script(plan: ClusterPlan, made_by: str, installs: Sequence[str]) -> str:
    """apply.sh. `installs`: the commands that install the charts of a cluster of Kubernetes."""
    place = ("--parent-id", plan.project, "--name", plan.state_bucket)
    labels = ",".join(f"{key}={value}" for key, value in (plan.labels or {}).items())
    kept = ("--versioning-policy", "enabled", "--labels", labels)
    terraform = f"terraform {plan.terraform['terraform']['required_version']}"
    text = _SCRIPT.format(
        name=plan.name,
        made_by=made_by,
        programs=f"helm and {terraform}" if plan.has_kubernetes else terraform,
        find=shlex.join(["nebius", "storage", "bucket", "get-by-name", *place]),
        create=shlex.join(["nebius", "storage", "bucket", "create", *place, *kept]),
    )
    if not plan.has_kubernetes:
        return text + (_OF_HOSTS + TAKE_NEW_FILE).format(
            output=LAUNCH_OUTPUT, file=launch_file(plan)
        )
    return text + _OF_KUBERNETES.format(
        output=CLUSTER_OUTPUT,
        context=context_name(plan),
        installs="\n".join(installs),
        file=launch_file(plan),
    )


def readme(
    plan: ClusterPlan, of_use: Sequence[UsePrice], made_by: str, removals: Sequence[str]
) -> str:
    """README.md. `removals`: the commands that remove the charts of a cluster of Kubernetes."""
    return _README.format(
        name=plan.name,
        made_by=made_by,
        project=plan.project,
        file=launch_file(plan),
        how="" if plan.has_kubernetes else ", which it writes",
        bucket=plan.state_bucket,
        back="\n".join(f"    {line}" for line in (*removals, *_back(plan))),
        data=_DATA if _filesystem(plan) else "",
        text=plan_text(plan, of_use, "CLUSTER.yaml"),
    )


def _back(plan: ClusterPlan) -> Iterator[str]:
    if (made := _filesystem(plan)) is not None:
        yield f"terraform state rm {made}"
    yield "NEBIUS_IAM_TOKEN=$(nebius iam get-access-token) terraform destroy"


def _filesystem(plan: ClusterPlan) -> str | None:
    return next((each.address for each in plan.resources if each.kind == FILESYSTEM_KIND), None)
