"""The files of a deployment: blueprint, deployment file, shell scripts that make and remove the
cluster, and the ssh configuration by which its login node is reached."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

from drillyard.hardware.cluster_toolkit import toolkit_release
from drillyard.provision.cluster_plan import CLUSTER_LABEL
from drillyard.provision.toolkit.blueprint_document import as_yaml
from drillyard.provision.toolkit.settings import SlurmCluster

if TYPE_CHECKING:
    from drillyard.provision.toolkit.blueprint import Blueprint

_MADE_BY = "Made by `drillyard cluster plan --output`."


def deployment_files(
    slurm: SlurmCluster, made: Blueprint, services: Sequence[str]
) -> dict[str, tuple[str, int]]:
    """The files by name: text and mode."""
    release = toolkit_release()
    about = f"{_MADE_BY}\nFor Cluster Toolkit {release.version}."
    return {
        "blueprint.yaml": (as_yaml(made.blueprint, about), 0o644),
        "deployment.yaml": (as_yaml(made.deployment, about), 0o644),
        "ssh_config": (_ssh_config(slurm), 0o644),
        "apply.sh": (_apply(slurm, services), 0o755),
        "destroy.sh": (_destroy(slurm), 0o755),
    }


def _apply(slurm: SlurmCluster, services: Sequence[str]) -> str:
    release, settings = toolkit_release(), slurm.settings
    bucket, project = f"gs://{slurm.state_bucket}", f"--project={settings.project}"
    describe = _shell("gcloud", "storage", "buckets", "describe", bucket, project)
    create = _shell(
        *("gcloud", "storage", "buckets", "create", bucket, project),
        *(f"--location={settings.region}", "--uniform-bucket-level-access"),
        "--public-access-prevention",
    )
    labels = ",".join(f"{key}={value}" for key, value in settings.labels.items())
    update = ("gcloud", "storage", "buckets", "update", bucket, "--versioning")
    return f"""\
#!/bin/sh
# Makes the Slurm cluster {settings.name}. {_MADE_BY}
# Needs gcluster {release.version}, terraform {release.terraform} or later, packer and gcloud
# (gcloud auth login; gcloud auth application-default login).
# It can be run again after an error, and after the files have changed.
set -eu
cd "$(dirname -- "$0")"

# The APIs of the project.
{_shell("gcloud", "services", "enable", *services, project)}

# The bucket of Terraform's state, with versions.
{describe} >/dev/null 2>&1 || {create}
{_shell(*update, f"--update-labels={labels}")}

# Network, image and cluster, one after the other; the toolkit shows each and asks.
gcluster deploy --overwrite-deployment -d deployment.yaml blueprint.yaml
"""


def _destroy(slurm: SlurmCluster) -> str:
    settings = slurm.settings
    where = (f"--project={settings.project}", f"--zones={slurm.pool.zone}")
    groups = _shell(
        *("gcloud", "compute", "instance-groups", "managed", "list", *where),
        *(f"--filter=name ~ ^{settings.name}-nodes-", "--format=value(name)"),
    )
    delete = _shell(
        *("gcloud", "compute", "instance-groups", "managed", "delete"),
        *(f"--project={settings.project}", f"--zone={slurm.pool.zone}"),
    )
    images = _shell(
        *("gcloud", "compute", "images", "list", f"--project={settings.project}"),
        *("--no-standard-images", f"--filter=labels.{CLUSTER_LABEL} = {settings.name}"),
        "--format=value(name)",
    )
    delete_image = _shell("gcloud", "compute", "images", "delete", f"--project={settings.project}")
    return f"""\
#!/bin/sh
# Removes the Slurm cluster {settings.name} with all data on /home. {_MADE_BY}
# It can be run again after an error. The bucket of the state, gs://{slurm.state_bucket}, remains.
set -eu
cd "$(dirname -- "$0")"
gcluster destroy {shlex.quote(settings.name)}

# Groups of flex-start nodes, which the toolkit leaves behind empty. Each command asks.
for group in $({groups}); do
  {delete} "$group"
done

# Images of the nodes.
for image in $({images}); do
  {delete_image} "$image"
done
"""


def _ssh_config(slurm: SlurmCluster) -> str:
    settings, host = slurm.settings, slurm.login_node
    tunnel = _shell(
        *("gcloud", "compute", "start-iap-tunnel", host, "%p", "--listen-on-stdin"),
        *(f"--project={settings.project}", f"--zone={slurm.pool.zone}", "--verbosity=warning"),
    )
    lines = [f"# {_MADE_BY}", f"Host {host}"]
    if settings.creation.private_nodes:
        # No address: by it ssh tells its shared connections apart, also those of a host of the
        # same name in another project.
        lines += [f"    HostName {host}.{settings.project}", f"    ProxyCommand {tunnel}"]
    else:
        lines += ["    # HostName ADDRESS: the login node's public address"]
    lines += [f"    HostKeyAlias {settings.project}.{host}", "    CheckHostIP no"]
    lines += ["    StrictHostKeyChecking accept-new"]
    return "\n".join(lines) + "\n"


def _shell(*words: str) -> str:
    return shlex.join(words)
