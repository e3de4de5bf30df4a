"""Cluster configs of Vertex AI for the tests, and their plans."""

from __future__ import annotations

from typing import Any

from tests.unit.provision import clusters
from tests.unit.provision.clusters import GOOGLE_MACHINES

MODES = ("on-demand", "reservation", "spot", "flex-start")
NUMBER = "123456789012"
NETWORK = f"projects/{NUMBER}/global/networks/team"
OFFERS = [
    (each.name, mode)
    for each in GOOGLE_MACHINES
    for mode in each.consumption
    if mode in MODES and each.vertex_accelerator_type is not None
]
REFUSED = [
    (each.name, mode)
    for each in GOOGLE_MACHINES
    for mode in (*MODES, "flex-start-queued", "calendar")
    if (each.name, mode) not in OFFERS
]


def config(machine: str = "a3-megagpu-8g", consumption: str = "spot", **settings: Any) -> Any:
    """The content of a cluster.yaml without an image; `settings` replace whole keys."""
    content = clusters.config(machine, consumption, platform="vertex", **settings)
    if "image" not in settings:
        del content["image"]
    return content
