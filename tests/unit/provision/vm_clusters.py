"""Cluster configs of virtual machines for the tests, and their plans."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.unit.provision import clusters
from tests.unit.provision.clusters import GOOGLE_MACHINES

from drillyard.provision.cluster_plan import ClusterPlan

KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIDrillyard me@desk"
MODES = ("on-demand", "reservation", "spot", "flex-start", "calendar")
NEEDS_DAEMON = ("a3-highgpu-8g", "a3-edgegpu-8g")
"""Machines whose network stack has a daemon beside each run."""
BARE_METAL = "a4x-maxgpu-4g-metal"
OFFERS = [
    (each.name, mode)
    for each in GOOGLE_MACHINES
    for mode in each.consumption
    if mode in MODES and each.name != BARE_METAL
]


def config(machine: str = "a4-highgpu-8g", consumption: str = "spot", **settings: Any) -> Any:
    """The content of a cluster.yaml; `settings` replace whole keys."""
    stack = {"network_stack": "ethernet"} if machine in NEEDS_DAEMON else {}
    login = {"gce": {"os_login": True, "user": "ann_example_com"}}
    return clusters.config(machine, consumption, platform="gce", **{**login, **stack, **settings})


def plan(directory: Path, content: dict[str, Any]) -> ClusterPlan:
    """The plan of a cluster.yaml with this content, beside which there is a key."""
    (directory / "key.pub").write_text(f"{KEY}\n", "utf-8")
    return clusters.plan(directory, content)
