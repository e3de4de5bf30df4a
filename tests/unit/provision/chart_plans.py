"""Plans of clusters on GKE for the tests of charts, from the config as a user writes it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.unit.launch.requests import request

from drillyard.config.cluster import ClusterConfig
from drillyard.config.platforms import platforms
from drillyard.hardware import catalog
from drillyard.provision.cluster_plan import ClusterPlan
from drillyard.provision.helm_releases import own_release
from drillyard.provision.provisioner import plan_cluster

GKE = """
name: c
platform: gke
location: {{project: p, region: us-central1, zone: us-central1-b}}
machine: {machine}
nodes: 2
consumption: {consumption}
storage: {{bucket: my-bucket}}
"""


def gke(machine: str, consumption: str, more: str = "") -> ClusterConfig:
    """A cluster of two nodes; `more` are further lines of the file."""
    text = GKE.format(machine=machine, consumption=consumption)
    if consumption in ("reservation", "calendar"):
        text += "reservation: r\n"
    return request(text + more).cluster


def plan(machine: str, consumption: str, more: str = "") -> ClusterPlan:
    return plan_cluster(gke(machine, consumption, more))


def chart_values(found: ClusterPlan) -> dict[str, Any]:
    """The values of the chart `drillyard-cluster`."""
    return dict(own_release(found.releases).values)


def sold() -> Iterator[tuple[str, str]]:
    """Each machine of Google Cloud with each way in which GKE sells it."""
    for machine in catalog().machines.values():
        if machine.cloud == "gcp":
            for consumption in platforms()["gke"].consumption:
                if consumption in machine.consumption:
                    yield machine.name, consumption
