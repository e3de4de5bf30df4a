"""Cluster configs of GKE for the tests, and their plans."""

from __future__ import annotations

from typing import Any

import yaml

from drillyard.config.load import load_cluster_config
from drillyard.hardware import catalog
from drillyard.provision.cluster_plan import ClusterPlan
from drillyard.provision.provisioner import plan_cluster

RESERVED = ("reservation", "calendar")
GOOGLE_MACHINES = [each for each in catalog().machines.values() if each.cloud == "gcp"]
OFFERS = [(each.name, mode) for each in GOOGLE_MACHINES for mode in each.consumption]


def config(
    machine: str = "a4-highgpu-8g", consumption: str = "spot", **settings: Any
) -> dict[str, Any]:
    """The content of a cluster.yaml; `settings` replace whole keys."""
    reserved = {"reservation": "mine"} if consumption in RESERVED else {}
    return {
        "name": "team",
        "platform": "gke",
        "location": {"project": "my-project", "region": "us-central1", "zone": "us-central1-b"},
        "machine": machine,
        "nodes": 2,
        "consumption": consumption,
        "storage": {"bucket": "team-runs"},
        "image": "us-docker.pkg.dev/my-project/team/train:1",
        **reserved,
        **settings,
    }


def plan(directory: Any, content: dict[str, Any]) -> ClusterPlan:
    """The plan of a cluster.yaml with this content, as the command line makes it."""
    path = directory / "cluster.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False), "utf-8")
    return plan_cluster(load_cluster_config(path, resolve_environment=False))


def bodies(found: ClusterPlan, kind: str) -> dict[str, dict[str, Any]]:
    """The resources of one kind by their names in the document."""
    resources: dict[str, dict[str, Any]] = found.terraform["resource"].get(kind, {})
    return resources


def gpu_pools(found: ClusterPlan) -> dict[str, dict[str, Any]]:
    """The node pools of GPU nodes by name."""
    pools = bodies(found, "google_container_node_pool").values()
    return {each["name"]: each for each in pools if each["name"] != "cpu"}
