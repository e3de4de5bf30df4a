"""The plan of a Slurm cluster of Nebius by Soperator, which Nebius' own Terraform recipe makes: the
recipe's settings for the cluster of the config, the script of its commands, and the config of
platform `slurm` for `launch`. `up` does not carry it out: the recipe logs in, keeps its state and
names its things by itself, so `down` and `leaks` could not prove anything of it.

Names of settings: https://github.com/nebius/nebius-solutions-library, soperator/installations/
example/terraform.tfvars, of the version below. A file *.auto.tfvars.json is read after that one.
"""

from __future__ import annotations

import json
import shlex
from typing import Any

from drillyard.config.load import yaml_text
from drillyard.hardware.capacity import quota_needed
from drillyard.hardware.catalog import Catalog
from drillyard.hardware.machines import Machine
from drillyard.provision.cluster_plan import MADE_BY, ClusterPlan, ForeignRecipe, PriceLine
from drillyard.provision.made_hosts import TAKE_NEW_FILE
from drillyard.provision.nebius.instances import fabric_of
from drillyard.provision.nebius.nebius_settings import NebiusSettings
from drillyard.provision.nebius.soperator_rules import VERSION
from drillyard.provision.node_login import public_key
from drillyard.provision.prices import stored_price
from drillyard.provision.ssh_launch import launch_basis

RECIPE = "https://github.com/nebius/nebius-solutions-library"
JAIL_GIB = 2048
PARTITION = "main"
VARIABLES, TEMPLATE = "drillyard.auto.tfvars.json", "launch.yaml"
_ADDRESS = "LOGIN_ADDRESS"
_SSD, _BLOCK_KIB = "NETWORK_SSD", 4
_PARTITION = "PriorityTier=10 PreemptMode=OFF MaxTime=INFINITE State=UP OverSubscribe=YES"
_SCRIPT = """\
#!/usr/bin/env bash
# Slurm cluster {name} by Soperator {version}, in order. {made_by}
# Needs git, nebius (nebius profile create), terraform, kubectl and jq. It can be run again after an error.
set -eu
cd "$(dirname -- "$0")"
: "${{NEBIUS_TENANT_ID:?is not set: nebius iam tenant list}}"
export NEBIUS_TENANT_ID NEBIUS_PROJECT_ID={project} NEBIUS_REGION={region}

# Nebius' recipe, and an installation of it with the settings of this cluster.
[ -d recipe ] || git clone --depth 1 --branch soperator-{version} {recipe} recipe
installation=recipe/soperator/installations/{name}
if [ ! -d "$installation" ]; then
    rm -rf "$installation.new" # of a copy that was interrupted
    cp -r recipe/soperator/installations/example "$installation.new"
    mv "$installation.new" "$installation"
fi
cp {variables} "$installation"

# Everything in the cloud; Terraform shows it and asks. Login, key and bucket of its state: .envrc.
here=$PWD
cd "$installation"
set +eu
. ./.envrc
set -eu
terraform init
terraform apply
address=$(terraform state show module.login_script.terraform_data.lb_service_ip |
    grep input | grep -oE '[0-9]+\\.[0-9]+\\.[0-9]+\\.[0-9]+' | head -n 1)
if [ -z "$address" ]; then
    echo "error: the login node has no address yet: run this again when it has one" >&2
    exit 1
fi

# The config for `drillyard launch`.
cd "$here"
sed "s/{address}/$address/" {template} >{file}.new
"""  # noqa: E501
_README = """\
# Slurm cluster {name}

{made_by}

`NEBIUS_TENANT_ID=tenant-... bash apply.sh` makes the cluster in project {project} of Nebius by the recipe of
Soperator {version}, {recipe}, which takes about 40 minutes, and writes {file}, which
`drillyard launch` takes. The settings are in {variables}; every other one is the recipe's.

Nodes have the GPUs as `{gres}`, in partition `{partition}`. The root of all nodes is one shared file system, the
jail; runs and data are on another, at {directory}.

The way back, once no run is left; both file systems are protected from deletion, and stay until the recipe's own steps
(`soperator/README.md`, "Destroy the Cluster") release them:

    cd recipe/soperator/installations/{name} && . ./.envrc && terraform destroy
"""  # noqa: E501


def soperator_plan(settings: NebiusSettings, prices: tuple[PriceLine, ...]) -> ClusterPlan:
    """The plan of a config that the rules allow. `prices`: of the GPU nodes and the file system for
    runs."""
    cluster, facts, pool = settings.cluster, settings.facts, settings.pool
    jail = settings.section.jail_gib or JAIL_GIB
    launch = launch_config(settings)
    return ClusterPlan(
        name=cluster.name,
        platform=cluster.platform,
        project=settings.project,
        region=settings.region,
        zone=settings.region,
        pools=(pool,),
        terraform={},
        state_bucket="",
        resources=(),
        prices=(*prices, stored_price("jail", jail, "nebius-filesystem", facts, pool.region)),
        quotas=tuple(quota_needed(cluster, facts)),
        warnings=(
            f"`up` does not make it: the recipe of Soperator {VERSION} does, by apply.sh of"
            " `drillyard cluster plan --output DIR`",
            "prices and quotas are of the GPU nodes and the file systems alone: Soperator's own"
            " nodes (system, controller, login, accounting, NFS) come beside them",
        ),
        launch_settings=launch,
        recipe=ForeignRecipe(f"Soperator {VERSION}", _files(settings, launch)),
    )


def variables(settings: NebiusSettings) -> dict[str, Any]:
    """The settings of the recipe that the config decides."""
    section, pool = settings.section, settings.pool
    identity, directory = section.identity_file, settings.cluster.storage.directory
    assert identity is not None and directory is not None, "refused by the rules"
    jail = _spec(section.jail_gib or JAIL_GIB)
    data: dict[str, Any] = {"name": "data", "mount_path": directory}
    if section.filesystem is not None:
        data["existing"] = {"id": section.filesystem}
    else:
        assert section.filesystem_gib is not None, "refused by the rules"
        data["spec"] = _spec(section.filesystem_gib)
    topology = "flat" if fabric_of(settings) is None else "tree-ib"
    return {
        "company_name": settings.name,
        # A production cluster needs a request that Nebius has granted.
        "production": False,
        # By default the recipe sends the cluster's logs to Nebius, by a profile of its own.
        "public_o11y_enabled": False,
        "filesystem_jail": {"spec": jail},
        "filesystem_jail_submounts": [data],
        "slurm_nodeset_workers": [_workers(settings)],
        "slurm_nodesets_partitions": [
            {
                "name": PARTITION,
                "is_all": True,
                "topology": topology,
                "config": f"Default=YES {_PARTITION}",
            },
            # Of the recipe's own checks.
            {
                "name": "hidden",
                "is_all": True,
                "topology": "flat",
                "config": f"Default=NO Hidden=YES {_PARTITION}",
            },
        ],
        "slurm_login_ssh_root_public_keys": [public_key(identity)],
        "slurm_login_public_ip": True,
        "use_preinstalled_gpu_drivers": True,
        # The recipe's example asks for 1 TiB, which nodes with one GPU do not have.
        **({} if pool.machine.data_nics.count else {"slurm_shared_memory_size_gibibytes": 64}),
    }


def gres_of(machine: Machine, facts: Catalog) -> str:
    """The GPUs of a node as Slurm names them: by the driver's name of the GPU, in lower case
    (https://slurm.schedmd.com/gres.conf.html, Type)."""
    reported = facts.accelerator_of(machine).reported_as[0]
    return f"gpu:{reported.lower().replace(' ', '_')}:{machine.num_accelerators}"


def launch_config(settings: NebiusSettings) -> dict[str, Any]:
    """The config of platform slurm for runs on the cluster; its login node has an address once it
    is made."""
    return {
        **launch_basis(settings.cluster, "slurm"),
        "slurm": {
            "login_host": f"root@{_ADDRESS}",
            "partition": PARTITION,
            "gres": gres_of(settings.pool.machine, settings.facts),
            "directory": f"{settings.cluster.storage.directory}/{settings.name}",
        },
    }


def _spec(gib: int) -> dict[str, Any]:
    size = {"size_gibibytes": gib, "block_size_kibibytes": _BLOCK_KIB}
    return {"type": _SSD, **size, "forbid_deletion": True}


def _workers(settings: NebiusSettings) -> dict[str, Any]:
    pool, fabric = settings.pool, fabric_of(settings)
    held = {"policy": "STRICT", "reservation_ids": list(pool.reservations)}
    return {
        "name": "worker",
        "size": pool.nodes,
        "resource": {
            "platform": pool.machine.name.partition("_")[0],
            "preset": pool.machine.preset,
        },
        "boot_disk": {
            "type": _SSD,
            "size_gibibytes": settings.creation.disk_gib,
            "block_size_kibibytes": _BLOCK_KIB,
        },
        "gpu_cluster": None if fabric is None else {"infiniband_fabric": fabric},
        "preemptible": {} if pool.consumption == "spot" else None,
        "reservation_policy": held if pool.reservations else None,
        # All nodes are there from the beginning.
        "autoscaling": {"enabled": False},
        "ephemeral_nodes": False,
        "node_local_jail_submounts": [],
        "node_local_image_disk": {"enabled": False},
    }


def _files(settings: NebiusSettings, launch: dict[str, Any]) -> dict[str, tuple[str, int]]:
    words = {
        "name": settings.name,
        "version": VERSION,
        "made_by": MADE_BY,
        "project": shlex.quote(settings.project),
        "region": settings.region,
        "recipe": RECIPE,
        "variables": VARIABLES,
        "template": TEMPLATE,
        "address": _ADDRESS,
        "file": f"{settings.name}-slurm.yaml",
        "gres": launch["slurm"]["gres"],
        "partition": PARTITION,
        "directory": settings.cluster.storage.directory,
    }
    return {
        VARIABLES: (json.dumps(variables(settings), indent=2) + "\n", 0o644),
        TEMPLATE: (yaml_text(launch, width=100), 0o644),
        "README.md": (_README.format(**words), 0o644),
        "apply.sh": ((_SCRIPT + TAKE_NEW_FILE).format(**words), 0o755),
    }
