"""Two launches of one run name at once, step by step: one submits, the other is refused, and no run
is removed but the one that both saw."""

from __future__ import annotations

import itertools
import json
import re
import socket
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import yaml
from tests.unit.launch.kubernetes.test_launcher import SETTINGS
from tests.unit.launch.requests import WORKLOAD, cluster, request

from drillyard.errors import UnreachableError, UserError
from drillyard.launch import run_changes
from drillyard.launch.kubernetes import submission_checks
from drillyard.launch.kubernetes.launcher import KubernetesLauncher
from drillyard.programs import Programs, Result
from drillyard.supervise.process_identity import running_process, this_process

RUN, HANDLE, LOCK = "nccl", "kubernetes://c/nccl", "nccl.submit-lock"
ASKED = request(cluster("kubernetes", None, **SETTINGS), WORKLOAD)


class Namespace:
    """A namespace with Helm, as far as launches of one name use them: a stand-in at the edge of
    this process. `before`: what else happens just before a command of Helm, by its first words."""

    namespace = "team"

    def __init__(self, *, earlier: bool = True) -> None:
        self.release: dict[str, Any] | None = None
        self.locks: dict[str, dict[str, Any]] = {}
        self.before: dict[str, Callable[[], object]] = {}
        self.reachable = True
        self._uids = map(str, itertools.count())
        if earlier:
            self._install("drillyard/cluster=c,drillyard/run=nccl")
            self.end()

    def end(self) -> None:
        """The run of the release is over."""
        assert self.release is not None
        self.release["labels"]["status"] = "uninstalled"

    def launcher(self) -> KubernetesLauncher:
        """The launcher of one more `drillyard`."""
        programs = Programs()
        programs.run = self.run  # type: ignore[method-assign,assignment]
        made = KubernetesLauncher(ASKED.cluster, programs)
        made.__dict__["_api"] = self
        return made

    def run(self, argv: Sequence[str], **_: Any) -> Result:
        words = " ".join(argv[1:3] if argv[1] == "get" else argv[1:2])
        if (meanwhile := self.before.pop(words, None)) is not None:
            meanwhile()
        if words == "install":
            if self.release is not None:
                return Result(tuple(argv), 1, "", "Error: cannot re-use a name that is in use")
            self._install(argv[argv.index("--labels") + 1])
        elif words == "uninstall" and self.release is None:
            return Result(tuple(argv), 1, "", "Error: Failed to purge the release: not found")
        elif words == "uninstall" and "--keep-history" in argv:
            assert self.release is not None
            if self.release["labels"]["status"] == "uninstalled":
                return Result(tuple(argv), 1, "", f'Error: the release "{RUN}" is already deleted')
            self.end()
        elif words == "uninstall":
            self.release = None
        elif words.startswith("get") and self.release is None:
            return Result(tuple(argv), 1, "", "Error: release: not found")
        elif words == "get manifest":
            return Result(tuple(argv), 0, yaml.safe_dump({"kind": "JobSet", "metadata": {}}), "")
        elif words == "get values":
            return Result(tuple(argv), 0, "{}", "")
        return Result(tuple(argv), 0, "", "")

    def _install(self, labels: str) -> None:
        made = dict(re.findall("([^=,]+)=([^,]+)", labels))
        self.release = {"uid": next(self._uids), "labels": {**made, "status": "deployed"}}

    def listed(self, _group: str, kind: str, _selector: str = "", **_: Any) -> list[Any]:
        if self.release is None or kind not in ("secrets", "jobsets"):
            return []
        if kind == "jobsets" and self.release["labels"]["status"] == "uninstalled":
            return []
        jobset = {"spec": {"replicatedJobs": []}, "status": {}}
        return [{"metadata": {"name": RUN, **self.release}, **jobset}]

    def place(self, kind: str) -> str:
        return kind

    def created(self, _kind: str, body: dict[str, Any]) -> dict[str, Any] | None:
        name = body["metadata"]["name"]
        if name in self.locks:
            return None
        self.lock(body["data"]["client"])
        return self.locks[name]

    def lock(self, client: str, age: float = 0.0) -> None:
        made_at = datetime.now(UTC) - timedelta(seconds=age)
        metadata = {"uid": next(self._uids), "creationTimestamp": made_at.isoformat()}
        self.locks[LOCK] = {"metadata": metadata, "data": {"client": client}}

    def one(self, path: str) -> dict[str, Any] | None:
        return self.locks.get(path.rpartition("/")[2])

    def delete(self, _kind: str, name: str, uid: str) -> None:
        if not self.reachable:
            raise UnreachableError("the cluster cannot be reached")
        if self.locks.get(name, {}).get("metadata", {}).get("uid") == uid:
            del self.locks[name]


@pytest.fixture(autouse=True)
def accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the cluster is asked before a run is submitted is not the subject."""
    monkeypatch.setattr(submission_checks, "require_cluster", lambda *_: [])
    monkeypatch.setattr(submission_checks, "require_accepted", lambda *_: None)


def launch(namespace: Namespace, *, replace: bool = False) -> str:
    """The error of one more launch, or its handle."""
    made = namespace.launcher()
    try:
        return str(run_changes.submit(made, made.plan(ASKED), replace=replace))
    except UserError as error:
        return str(error)


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize(
    ("earlier", "moment"),
    [
        (True, "template"),
        (True, "get manifest"),
        (True, "uninstall"),
        (True, "install"),
        (False, "template"),
        (False, "install"),
    ],
)
def test_of_two_launches_at_once_one_has_the_handle_and_the_other_is_refused_in_plain_words(
    earlier: bool, moment: str, replace: bool
) -> None:
    """The second one does all of its work just before a command of the first one's."""
    namespace = Namespace(earlier=earlier)
    second: list[str] = []
    namespace.before[moment] = lambda: second.append(launch(namespace, replace=replace))
    said = [launch(namespace, replace=replace), *second]
    refusals = [text for text in said if text != HANDLE]
    assert len(said) == 2 and len(refusals) == 1
    assert refusals[0].startswith(f"{HANDLE}: is ")
    assert f"drillyard runs status {HANDLE}" in refusals[0] and "helm" not in refusals[0]
    assert namespace.release is not None and namespace.release["labels"]["status"] == "deployed"
    assert not namespace.locks


def test_a_launch_that_has_seen_the_earlier_run_does_not_replace_a_quick_one_of_the_other() -> None:
    """Both saw the earlier run; the other's is over, too, before this one gets the lock."""
    namespace = Namespace()

    def other() -> None:
        assert launch(namespace) == HANDLE
        namespace.end()

    namespace.before["template"] = other
    assert launch(namespace).startswith(f"{HANDLE}: is being launched")
    assert launch(namespace) == HANDLE, "and a later launch does"


@pytest.mark.parametrize("command", ["resume", "forget"])
@pytest.mark.parametrize("moment", ["get manifest", "uninstall"])
def test_a_launch_during_another_commands_removal_leaves_one_run(command: str, moment: str) -> None:
    namespace = Namespace()
    said: list[str] = []
    namespace.before[moment] = lambda: said.append(launch(namespace))
    try:
        said.append(str(getattr(run_changes, command)(namespace.launcher(), RUN)))
    except UserError as error:
        said.append(str(error))
    assert sorted(text == HANDLE for text in said) == [False, True]
    assert (namespace.release is None) == (command == "forget" and moment == "uninstall")


def test_a_run_that_was_launched_again_since_it_was_read_is_not_cancelled() -> None:
    namespace = Namespace()
    namespace.release["labels"]["status"] = "deployed"  # type: ignore[index]
    made = namespace.launcher()
    found = made.find_one(RUN)
    assert launch(namespace, replace=True) == HANDLE
    with pytest.raises(UserError, match="launched again"):
        made.stop(found)
    assert namespace.release["labels"]["status"] == "deployed"  # type: ignore[index]


def test_of_two_cancels_at_once_both_find_the_run_cancelled() -> None:
    namespace = Namespace(earlier=False)
    assert launch(namespace) == HANDLE
    states = []
    namespace.before["uninstall"] = lambda: states.append(
        run_changes.cancel(namespace.launcher(), RUN).status
    )
    states.append(run_changes.cancel(namespace.launcher(), RUN).status)
    assert [each.state.value for each in states] == ["cancelled", "cancelled"]


def test_a_command_that_reads_passes_over_a_release_that_was_removed_meanwhile() -> None:
    namespace = Namespace()
    namespace.before["get manifest"] = lambda: namespace.__setattr__("release", None)
    assert [each.run_directory for each in namespace.launcher().runs()] == [None]


ELSEWHERE = {"host": "desk", "machine": "boot/1", "pid": 7, "started": 1}


def test_a_lock_of_another_machine_is_named_with_what_ends_it() -> None:
    namespace = Namespace()
    namespace.lock(json.dumps(ELSEWHERE), 60)
    refusal = launch(namespace)
    assert "process 7 on desk, 60 s ago" in refusal and "ends after 1020 s" in refusal
    assert f"kubectl -n team delete configmap {LOCK}" in refusal
    assert namespace.locks


@pytest.mark.parametrize(
    ("client", "age"),
    [
        (json.dumps(ELSEWHERE), 1021.0),
        (json.dumps({**this_process().as_json(), "started": 1}), 0.0),
        ("[" * 100000, 1021.0),
    ],
)
def test_an_expired_lock_is_taken_over(client: str, age: float) -> None:
    namespace = Namespace()
    namespace.lock(client, age)
    assert launch(namespace) == HANDLE
    assert not namespace.locks


@pytest.mark.parametrize("client", ["", "{}", "[" * 100000, json.dumps({"pid": "x"})])
def test_a_lock_whose_owner_cannot_be_read_holds_until_its_time_is_over(client: str) -> None:
    namespace = Namespace()
    namespace.lock(client)
    assert "is being launched" in launch(namespace)


def test_a_live_process_of_this_machine_has_its_lock() -> None:
    namespace = Namespace()
    namespace.lock(json.dumps(running_process(1).as_json()))
    assert f"process 1 on {socket.gethostname()}" in launch(namespace)


def test_of_two_that_find_an_expired_lock_one_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one deletes by the uid of the lock that it has seen: not the new one."""
    namespace = Namespace()
    namespace.lock(json.dumps(ELSEWHERE), 1021.0)
    delete, taken = namespace.delete, []

    def taken_first(kind: str, name: str, uid: str) -> None:
        delete(kind, name, uid)
        if not taken:
            taken.append(name)
            namespace.lock(json.dumps(ELSEWHERE))
            delete(kind, name, uid)

    monkeypatch.setattr(namespace, "delete", taken_first)
    assert "is being launched" in launch(namespace)
    assert namespace.locks


def test_a_submitted_run_is_not_reported_as_failed_where_its_lock_stays(
    capsys: pytest.CaptureFixture[str],
) -> None:
    namespace = Namespace()
    namespace.before["install"] = lambda: namespace.__setattr__("reachable", False)
    assert launch(namespace) == HANDLE
    assert LOCK in capsys.readouterr().err
