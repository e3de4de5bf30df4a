"""Failed installations, and releases that another launch has made meanwhile: whose is removed."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from tests.unit.launch.requests import WORKLOAD, cluster, request

from drillyard.errors import UserError
from drillyard.launch import run_changes
from drillyard.launch.kubernetes.found_runs import KubernetesRun
from drillyard.launch.kubernetes.launcher import KubernetesLauncher
from drillyard.launch.run_status import Handle, RunStatus, State
from drillyard.programs import Programs, Result

RUN = "nccl"
HANDLE = Handle("kubernetes", "c", RUN)
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

    def __init__(self, error: str, owner: str | None, cluster: str | None = None) -> None:
        self.error, self.owner, self.cluster, self.uninstalled = error, owner, cluster, 0
        self.jobsets: list[dict[str, Any]] = []
        self.values: dict[str, Any] = {}

    def run(self, argv: Sequence[str], directory: Path | None = None, **_: Any) -> Result:
        if argv[1] == "uninstall":
            self.uninstalled += 1
            self.jobsets.clear()
            return Result(tuple(argv), 0, "", "")
        if directory is not None and (directory / "values.json").exists():
            self.values = json.loads((directory / "values.json").read_text())
        self.own = re.findall("drillyard/submission=([0-9a-f]+)", " ".join(argv))
        return Result(tuple(argv), 1, "", f"Error: INSTALLATION FAILED: {self.error}")

    def listed(self, _group: str, kind: str, _selector: str = "", **_: Any) -> list[Any]:
        if kind == "jobsets":
            return self.jobsets
        if kind != "secrets" or self.owner is None:
            return []
        labels = {"drillyard/submission": self.own[0] if self.owner == "own" else self.owner}
        labels |= {"drillyard/cluster": self.cluster} if self.cluster else {}
        return [{"metadata": {"uid": "new", "labels": labels}}]


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
        made._releases.install(Handle("kubernetes", "c", RUN), argv, ())
    assert server.uninstalled == uninstalled


@pytest.mark.parametrize("state", [State.succeeded, State.running])
def test_a_run_that_was_replaced_since_it_was_read_is_not_removed(state: State) -> None:
    server = Server("", "other")
    found = KubernetesRun(RunStatus(HANDLE, state, 1), (), "old")
    made = launcher(server)
    with pytest.raises(UserError):
        (made.remove if state.over else made.stop)(found)
    assert server.uninstalled == 0


@pytest.mark.parametrize("owner", ["c", "other", None])
def test_a_name_that_is_taken_is_refused_with_a_run_or_release_that_exists(
    owner: str | None,
) -> None:
    made = launcher(Server("cannot re-use a name that is still in use", "other", owner))
    with pytest.raises(UserError) as refused:
        made._releases.install(HANDLE, ("helm", "install", RUN, "chart", "--labels", "l=c"), ())
    said = str(refused.value)
    # Only a run of this cluster config has a handle here.
    assert ("drillyard runs" in said) is (owner == "c")
    assert (f"helm status {RUN} --namespace team" in said) is (owner != "c")
    assert f"release {RUN} of namespace team" in said and "--replace" not in said


def jobset(annotation: str) -> dict[str, Any]:
    """A run that waits."""
    labels = {"drillyard/cluster": "c", "drillyard/run": RUN}
    metadata = {"name": RUN, "uid": "1", "labels": labels, "creationTimestamp": None}
    metadata["annotations"] = {"drillyard/launched-from": annotation} if annotation else {}
    return {"kind": "JobSet", "metadata": metadata, "spec": {"suspend": True}}


def test_a_run_is_of_the_directory_in_its_annotation_and_no_other_ends_it_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from drillyard.launch.launched_from import NameGiven, recorded, this_directory

    here, elsewhere = tmp_path / "a", tmp_path / "b"
    for directory in (here, elsewhere):
        directory.mkdir()
    monkeypatch.chdir(here)
    server = Server("Kubernetes cluster unreachable", None)
    made = launcher(server)
    # What the cluster is asked before, and its lock, are not the subject.
    monkeypatch.setattr(made, "check", lambda plan: None)
    monkeypatch.setattr(made, "submit_lock", lambda handle, seen: nullcontext())
    plan = made.plan(request(cluster("kubernetes", None, **SETTINGS), WORKLOAD))
    with pytest.raises(UserError):
        run_changes.submit(made, plan)
    annotations = server.values["annotations"]
    planned = json.loads(plan.file("values.json").content)["annotations"]
    assert annotations == planned | {"drillyard/launched-from": this_directory().as_json()}
    # What the chart makes of it is on the JobSet.
    server.jobsets = [jobset(annotations["drillyard/launched-from"])]
    monkeypatch.chdir(elsewhere)
    for replaces in (False, True):
        with pytest.raises(UserError) as refused:
            run_changes.submit(made, plan, replace=replaces)
        assert f"launched from {here}" in str(refused.value)
        assert "--replace" not in str(refused.value)
    done = {"status": {"conditions": [{"type": "Completed", "status": "True"}]}}
    for change, state in (
        (run_changes.cancel, {}),
        (run_changes.resume, done),
        (run_changes.forget, done),
    ):
        server.jobsets[0] |= state
        with pytest.raises(UserError, match=re.escape(str(here))):
            change(made, RUN, given=NameGiven(this_directory()))
    assert server.uninstalled == 0
    assert recorded(annotations["drillyard/launched-from"]) == made.launched_from(
        made.find_one(RUN)
    )
