"""A user of Vertex AI: a cluster on a server that speaks the service's protocol, and plans for
it."""

from __future__ import annotations

from typing import Any

from tests.integration.gcs import BUCKET
from tests.integration.launch.vertex_server import PROJECT, REGION, Vertex
from tests.unit.launch.requests import cluster, request

from drillyard.launch.plan import Plan
from drillyard.launch.vertex.launcher import VertexLauncher
from drillyard.programs import Programs

WORKLOAD = "name: tiny\nworkload: {command: [sh, -c, 'echo hello']}\n"


class Place:
    """A cluster on the service, and the plans for it."""

    def __init__(self, service: Vertex, **settings: str) -> None:
        own = settings.pop("vertex", "")
        self.settings = {
            "name": "c",
            "location": f"{{project: {PROJECT}, region: {REGION}}}",
            "storage": f"{{bucket: {BUCKET}}}",
            "vertex": f"{{endpoint: '{service.endpoint}'{', ' if own else ''}{own}}}",
            **settings,
        }
        self.launcher = VertexLauncher(request(self._yaml(), WORKLOAD).cluster, Programs())

    def _yaml(self) -> str:
        return cluster("vertex", **self.settings)

    def plan(self, run: str = WORKLOAD, **options: Any) -> Plan:
        return self.launcher.plan(request(self._yaml(), run, **options))


def named(name: str) -> str:
    return WORKLOAD.replace("tiny", name)
