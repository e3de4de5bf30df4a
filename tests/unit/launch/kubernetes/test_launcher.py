"""Failed installations, and releases that another launch has made meanwhile: whose is removed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest
from tests.unit.launch.requests import cluster, request

from drillyard.errors import UserError
from drillyard.launch.kubernetes.launcher import KubernetesLauncher, KubernetesRun
from drillyard.launch.programs import Programs, Result
from drillyard.launch.run_status import Handle, RunStatus, State

RUN = "nccl"
SETTINGS: dict[str, Any] = {
    "kubernetes": "{namespace: team, volume_claim: shared}",
    "image": "registry.example.com/train:1",
    "storage": "{directory: /data}",
    "network_stack": "ethernet",
    "processes_per_node": "1",
}


class Server:
    """Helm and the API server of a namespace: what `helm install` answers, and whose record is
    there then. It is a stand-in for both programs, at the edge of this process."""

    def __init__(self, error: str, owner: str | None) -> None:
        self.error, self.owner, self.uninstalled = error, owner, 0

    def run(self, argv: Sequence[str], **_: Any) -> Result:
        if argv[1] == "uninstall":
            self.uninstalled += 1
            return Result(tuple(argv), 0, "", "")
        self.own = re.findall("drillyard/submission=([0-9a-f]+)", " ".join(argv))
        return Result(tuple(argv), 1, "", f"Error: INSTALLATION FAILED: {self.error}")

    def listed(self, _group: str, kind: str, _selector: str = "", **_: Any) -> list[Any]:
        if kind != "secrets" or self.owner is None:
            return []
        owner = self.own[0] if self.owner == "own" else self.owner
        return [{"metadata": {"uid": "new", "labels": {"drillyard/submission": owner}}}]


def launcher(server: Server) -> KubernetesLauncher:
    asked = request(cluster("kubernetes", None, **SETTINGS))
    programs = Programs()
    programs.run = server.run  # type: ignore[method-assign,assignment]
    made = KubernetesLauncher(asked.cluster, programs)
    made.__dict__["_api"] = server
    return made


@pytest.mark.parametrize(
    ("error", "owner", "uninstalled"),
    [
        ("cannot re-use a name that is still in use", "other", 0),
        ('secrets "sh.helm.release.v1.nccl.v1" already exists', "other", 0),
        ('jobsets.jobset.x-k8s.io "nccl" already exists', "other", 0),
        ("Kubernetes cluster unreachable", None, 0),
        ("admission webhook denied the request", "own", 1),
    ],
)
def test_only_the_release_of_this_submission_is_removed_after_a_failure(
    error: str, owner: str | None, uninstalled: int
) -> None:
    server = Server(error, owner)
    made = launcher(server)
    argv = ("helm", "install", RUN, "chart", "--labels", "drillyard/cluster=c")
    with pytest.raises(UserError):
        made._install(Handle("kubernetes", "c", RUN), argv, ())
    assert server.uninstalled == uninstalled


def test_a_run_that_was_replaced_since_it_was_read_is_not_removed() -> None:
    server = Server("", "other")
    over = RunStatus(Handle("kubernetes", "c", RUN), State.succeeded, 1)
    with pytest.raises(UserError):
        launcher(server)._remove(KubernetesRun(over, (), "old"))
    assert server.uninstalled == 0
