"""Cluster configs of Nebius for the tests, and their plans."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.unit.provision import clusters
from tests.unit.provision.vm_clusters import KEY

from drillyard.hardware import catalog
from drillyard.provision.cluster_plan import ClusterPlan

MACHINES = [each for each in catalog().machines.values() if each.cloud == "nebius"]
OFFERS = [(each.name, mode) for each in MACHINES for mode in each.consumption]
REGIONS = {"h100": "eu-north1", "h200": "eu-north1", "b200": "us-central1"}
ACCESS = {"private_nodes": False, "authorized_networks": ["203.0.113.0/24"]}
RESERVED = "capacityblockgroup-e00abc"


def config(
    machine: str = "gpu-h100-sxm", consumption: str = "on-demand", **settings: Any
) -> dict[str, Any]:
    """The content of a cluster.yaml; `settings` replace whole keys."""
    known = catalog().find_machine(machine)
    region = REGIONS.get(known.accelerator if known else "", "eu-north1")
    reserved = {"reservation": RESERVED} if consumption == "reservation" else {}
    return {
        "name": "team",
        "platform": "nebius",
        "location": {"project": "project-e00abc", "region": region},
        "machine": machine,
        "nodes": 2,
        "consumption": consumption,
        "storage": {"directory": "/mnt/shared"},
        "nebius": {"identity_file": "key", "filesystem_gib": 2048},
        "cluster": ACCESS,
        **reserved,
        **settings,
    }


def kubernetes_config(
    machine: str = "gpu-h100-sxm", consumption: str = "on-demand", **settings: Any
) -> dict[str, Any]:
    """The content of a cluster.yaml of Managed Kubernetes; `settings` replace whole keys."""
    own = {
        "nebius": {"orchestrator": "kubernetes", "filesystem_gib": 2048},
        "cluster": {"authorized_networks": ACCESS["authorized_networks"]},
    }
    return config(machine, consumption, **{**own, **settings})


def plan(directory: Path, content: dict[str, Any]) -> ClusterPlan:
    """The plan of a cluster.yaml with this content, beside which there is a key."""
    (directory / "key.pub").write_text(f"{KEY}\n", "utf-8")
    return clusters.plan(directory, content)
