"""`drillyard accept` on a launcher that a test plays: what becomes of the job, and what is said of
one that wrote no evidence."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from drillyard.acceptance import accept_command
from drillyard.acceptance.accept_command import Acceptance, acceptance_of, run_acceptance
from drillyard.acceptance.check import Level
from drillyard.acceptance.drain import drain_culprits, rounded_up
from drillyard.acceptance.judgement import Outcome
from drillyard.acceptance.results import Status
from drillyard.errors import UserError
from drillyard.launch import run_wait
from drillyard.launch.request import LaunchRequest, LogSelection
from drillyard.launch.run_changes import ActiveRunError
from drillyard.launch.run_status import Handle, RunFailure, RunStatus, State

CLUSTER = "name: c\nplatform: slurm\nnodes: 2\nprocesses_per_node: 1\n"
HANDLE = Handle("slurm", "c", "accept-c")


class PlayedLauncher:
    """A launcher whose job is in these states, one per look, the last one for ever."""

    keeps_record = True

    def __init__(self) -> None:
        self.statuses: list[RunStatus] = []
        self.evidence = b""
        self.done: list[str] = []
        self.idle: list[str] | None = None
        self.short: dict[str, str] = {}
        self.looks: Callable[[], None] = lambda: None
        self.problems: dict[str, str] = {}
        self.requests: list[LaunchRequest] = []

    def is_in(self, *states: State, **fields: Any) -> None:
        self.statuses = [RunStatus(HANDLE, state, 2, **fields) for state in states]

    def _do(self, what: str) -> None:
        self.done.append(what)
        if what in self.problems:
            raise UserError(self.problems[what])

    def status(self, run: str) -> RunStatus:
        self.looks()
        return self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]

    def node_names(self, status: RunStatus) -> tuple[str, ...]:
        return status.hosts

    def idle_nodes(self, request: LaunchRequest) -> list[str] | None:
        return self.idle

    def nodes_short_of_gpus(self, request: LaunchRequest) -> dict[str, str]:
        return self.short

    def read(self, run: str, path: str, offset: int) -> bytes:
        return self.evidence[offset : offset + 1000]

    def logs(self, run: str, selection: LogSelection) -> Iterator[bytes]:
        yield b"h0: sh: python3: not found\n"

    def change(self, what: str) -> Callable[[PlayedLauncher, str], None]:
        """In the place of a function of run_changes.py."""
        return lambda launcher, run: launcher._do(what)

    def drain(self, node: str, reason: str) -> str | None:
        self._do(f"drain {node}")
        assert reason.startswith("drillyard accept: ")
        return f"undo {node}"


@pytest.fixture
def launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PlayedLauncher:
    played = PlayedLauncher()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run_wait, "PAUSES", (0.001, 0.001))
    monkeypatch.setattr(accept_command, "launcher_for", lambda cluster: played)

    def submitted(cluster: object, plans: object) -> list[Handle]:
        played._do("submit")
        return [HANDLE]

    monkeypatch.setattr(accept_command, "submit_plans", submitted)
    for what in ("cancel", "forget"):
        monkeypatch.setattr(accept_command, what, played.change(what))
    Path("cluster.yaml").write_text(CLUSTER)
    return played


def acceptance(**options: Any) -> Acceptance:
    return acceptance_of(Path("cluster.yaml"), Level.quick, **options)


def evidence_of(submission: str, **changes: Any) -> bytes:
    nodes = [{"rank": rank, "name": f"pod-{rank}"} for rank in range(2)]
    document = {
        **{"level": "quick", "submission": submission, "expected_nodes": 2},
        **{"processes_per_node": 1, "nodes": nodes, "observations": []},
    }
    return json.dumps({**document, **changes}).encode()


def test_the_job_s_evidence_is_judged_under_the_scheduler_s_names_and_its_record_removed(
    launcher: PlayedLauncher,
) -> None:
    asked = acceptance()
    launcher.evidence = evidence_of(asked.submission, missing=[1], nodes=[])
    launcher.is_in(State.queued, State.running, State.succeeded, hosts=("n7", "n8"))
    outcome = run_acceptance(asked)
    assert outcome.evidence.hosts == ("n7", "n8")
    assert outcome.results[0].reason.startswith("n8 did not join")
    assert launcher.done == ["submit", "forget"]


def test_evidence_of_an_earlier_job_is_not_this_job_s(launcher: PlayedLauncher) -> None:
    launcher.evidence = evidence_of("an earlier one")
    launcher.is_in(State.failed, reason="exit code 127", hosts=("n7", "n8"))
    outcome = run_acceptance(acceptance())
    (result,) = outcome.results
    assert outcome.verdict is Status.incomplete and "exit code 127" in result.reason
    assert result.evidence == ("h0: sh: python3: not found",)
    assert outcome.culprits == ()


@pytest.mark.parametrize(
    "evidence", [b"", b"{", b'{"level": "quick"}', b"[]", b"\xff\xfe", b"[" * 100_000]
)
def test_what_is_not_evidence_is_incomplete_with_the_reason(
    launcher: PlayedLauncher, evidence: bytes
) -> None:
    launcher.evidence = evidence
    failure = RunFailure("exit code 1", node="n8", lines=("last words",))
    launcher.is_in(State.failed, failure=failure)
    outcome = run_acceptance(acceptance())
    (result,) = outcome.results
    assert outcome.verdict is Status.incomplete
    assert "n8" in result.reason and result.evidence == ("last words",)


def test_a_job_that_would_be_started_again_is_ended(launcher: PlayedLauncher) -> None:
    launcher.is_in(State.running, State.restarting, reason="lost n8", hosts=("n7", "n8"))
    outcome = run_acceptance(acceptance())
    assert outcome.verdict is Status.incomplete and "lost n8" in outcome.results[0].reason
    assert launcher.done == ["submit", "cancel", "forget"]


def test_a_job_that_waits_too_long_is_ended(launcher: PlayedLauncher) -> None:
    launcher.is_in(State.queued, reason="waits for nodes")
    outcome = run_acceptance(acceptance(wait_seconds=0.01))
    assert outcome.verdict is Status.incomplete
    assert "waits for nodes" in outcome.results[0].reason
    assert launcher.done == ["submit", "cancel", "forget"]


def test_ctrl_c_cancels_the_job_and_removes_its_record(launcher: PlayedLauncher) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    launcher.is_in(State.running)
    launcher.looks = interrupt
    with pytest.raises(KeyboardInterrupt):
        run_acceptance(acceptance())
    assert launcher.done == ["submit", "cancel", "forget"]


def test_what_cannot_be_cancelled_or_removed_is_said_with_the_command(
    launcher: PlayedLauncher, capsys: pytest.CaptureFixture[str]
) -> None:
    launcher.is_in(State.restarting)
    launcher.problems = {"cancel": "no answer", "forget": "no right\nmore"}
    run_acceptance(acceptance())
    said = capsys.readouterr().err
    assert "drillyard runs cancel slurm://c/accept-c" in said
    assert "drillyard runs forget slurm://c/accept-c" in said and "no right" in said


def test_a_second_job_is_refused_with_the_commands_that_help(
    launcher: PlayedLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    def active(cluster: object, plans: object) -> list[Handle]:
        raise ActiveRunError(f"{HANDLE}: is running already\ngive it another name (--set name=N)")

    monkeypatch.setattr(accept_command, "submit_plans", active)
    with pytest.raises(UserError, match="is running already") as caught:
        run_acceptance(acceptance())
    assert "--set" not in str(caught.value) and f"runs wait {HANDLE}" in str(caught.value)
    assert launcher.done == []


def test_nodes_with_fewer_gpus_fail_before_anything_is_submitted(launcher: PlayedLauncher) -> None:
    launcher.short = {"n3": "offers 7 of 8 GPUs"}
    outcome = run_acceptance(acceptance())
    assert outcome.verdict is Status.fail and launcher.done == []
    assert outcome.results[0].reason.startswith("n3 offers 7 of 8 GPUs")
    assert [outcome.evidence.name_of(rank) for rank in outcome.culprits] == ["n3"]


@pytest.mark.parametrize(
    ("idle", "given", "nodes"),
    [(None, None, 2), ([], None, 2), (["a", "b", "c"], None, 3), (["a", "b", "c"], 5, 5)],
)
def test_idle_nodes_are_checked_where_no_number_is_given(
    launcher: PlayedLauncher, idle: list[str] | None, given: int | None, nodes: int
) -> None:
    launcher.idle = idle
    assert acceptance(nodes=given).request.cluster.nodes == nodes
    assert acceptance(nodes=given, dry_run=True).request.cluster.nodes == (given or 2)


def test_a_dry_run_s_plan_repeats_and_another_submission_is_another(
    launcher: PlayedLauncher,
) -> None:
    assert acceptance(dry_run=True).request == acceptance(dry_run=True).request
    assert acceptance().submission != acceptance().submission


def outcome_with(culprits: tuple[int, ...], nodes: int, launcher: PlayedLauncher) -> Outcome:
    launcher.short = {f"n{rank}": "offers 7 of 8 GPUs" for rank in culprits}
    found = run_acceptance(acceptance())
    return replace(found, evidence=found.evidence.model_copy(update={"expected_nodes": nodes}))


@pytest.mark.parametrize(
    ("culprits", "nodes", "share", "drained"),
    [
        (1, 10, 0.1, 1),
        (1, 9, 0.1, 0),
        (2, 10, 0.1, 0),
        (2, 10, 0.2, 2),
        (1, 3, 0.34, 1),
        (0, 3, 1, 0),
    ],
)
def test_a_share_of_nodes_is_drained_or_none(
    launcher: PlayedLauncher, culprits: int, nodes: int, share: float, drained: int
) -> None:
    outcome = outcome_with(tuple(range(max(culprits, 1))), nodes, launcher)
    if not culprits:
        outcome = replace(outcome, culprits=())
    lines = list(drain_culprits(launcher, outcome, share))  # type: ignore[arg-type]
    assert [each for each in launcher.done if each.startswith("drain")] == [
        f"drain n{rank}" for rank in range(drained)
    ]
    assert all(f"undo n{rank}" in lines[rank] for rank in range(drained))
    if culprits and not drained:
        # The share that the line names is enough.
        given = float(lines[0].rpartition("--max-share ")[2].split()[0])
        assert given == float(rounded_up(culprits / nodes)) and culprits <= given * nodes


def test_a_platform_that_cannot_drain_says_so_for_each_node(launcher: PlayedLauncher) -> None:
    outcome = outcome_with((0, 1), 2, launcher)
    launcher.problems = {"drain n0": "n0: platform x cannot keep jobs off a node; do this"}
    lines = list(drain_culprits(launcher, outcome, 1.0))  # type: ignore[arg-type]
    assert "do this" in lines[0] and "undo n1" in lines[1]
