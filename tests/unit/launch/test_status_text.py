"""What people read about runs."""

from __future__ import annotations

import io
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from drillyard.launch.run_status import Handle, RunFailure, RunStatus, State
from drillyard.launch.status_text import (
    age,
    cut_middle,
    headline,
    runs_table,
    runs_text,
    status_json,
    status_text,
)

HANDLE = Handle("slurm", "h100", "llama-8b")
NOW = 1_800_000_000.0


def test_a_cancelled_run_did_not_end_because_of_an_earlier_failure() -> None:
    failure = RunFailure("exit code 7", rank=3, node="n2", exit_code=7, lines=("oops",))
    cancelled = status(State.cancelled, failure=failure, since=NOW - 60)
    assert headline(cancelled, NOW) == "cancelled 60 s ago"
    assert "  failure        rank 3 on n2: exit code 7\n" in status_text(cancelled, now=NOW)
    assert headline(status(State.failed, failure=failure, since=NOW - 60), NOW).endswith(
        "rank 3 on n2: exit code 7"
    )


def test_a_cluster_is_named_in_full_above_runs_of_short_names_and_no_state_is_its_own_reason() -> (
    None
):
    short = RunStatus(Handle("local", "workstation", "a"), State.cancelled, 1, reason="cancelled")
    console = Console(width=60, record=True, file=io.StringIO())
    console.print(runs_table([short], width=60))
    title, row = console.export_text().splitlines()[1:]
    assert title.strip() == "local://workstation" and row.split() == ["a", "cancelled", "-", "1"]
    assert "reason" not in status_text(short, now=NOW)


def test_a_rank_is_named_once() -> None:
    failure = RunFailure("rank 1: exit code 1; ValueError: boom", rank=1, node="n2", exit_code=1)
    failed = status(State.failed, failure=failure)
    assert headline(failed, NOW) == "failed: rank 1 on n2: exit code 1; ValueError: boom"


def test_what_was_the_agent_of_a_run_that_is_over_is_not_reported() -> None:
    native = {"job": 17, "agent": "gone", "launch_directory": "/r/launch"}
    assert "  scheduler      job 17\n" in status_text(
        status(State.succeeded, native=native), now=NOW
    )
    assert "  agent          gone\n  scheduler      job 17\n" in status_text(
        status(State.running, native=native), now=NOW
    )
    over = status_text(status(State.succeeded, native={"agent": "gone"}), now=NOW)
    assert "scheduler" not in over and "agent" not in over


def status(state: State, **fields: object) -> RunStatus:
    return RunStatus(**{"handle": HANDLE, "state": state, "nodes": 2, **fields})  # type: ignore[arg-type]


def test_headlines_say_state_and_age_in_words() -> None:
    killed = RunFailure("killed by SIGKILL", rank=3, node="n2", exit_code=137)

    assert (
        headline(status(State.queued, since=NOW - 300, reason="Priority"), NOW)
        == "queued for 5 min (Priority)"
    )
    assert headline(status(State.running, since=NOW - 9000), NOW) == "running for 2 h"
    assert headline(status(State.starting), NOW) == "starting"
    assert headline(status(State.cancelled, since=NOW - 5), NOW) == "cancelled 5 s ago"
    assert (
        headline(status(State.failed, since=NOW - 60, failure=killed), NOW)
        == "failed 60 s ago: rank 3 on n2: killed by SIGKILL (exit code 137)"
    )
    time_limit = headline(status(State.failed, failure=RunFailure("time limit", node="n1")), NOW)
    assert time_limit == "failed: n1: time limit"


def test_a_status_shows_where_a_run_is_and_what_to_do_next() -> None:
    running = status(
        State.restarting,
        since=NOW - 30,
        reason="node lost",
        hosts=tuple(f"n{number}" for number in range(10)),
        attempt=2,
        failures=1,
        failure=RunFailure("exit code 1", rank=0, lines=("a", "b")),
        run_directory="/shared/runs/llama-8b",
        submitted_at=NOW - 86400 * 3,
        native={"job": 17},
    )

    assert status_text(running, progress="step 4 of 10", where="login", now=NOW) == (
        "slurm://h100/llama-8b  restarting for 30 s\n"
        "  reason         node lost\n"
        "  submitted      2027-01-12 08:00:00 UTC  (3 d ago)\n"
        "  nodes          2: n0, n1, n2, n3, n4, n5, n6, n7 and 2 more\n"
        "  restarts       2, 1 of them counted as failures\n"
        "  progress       step 4 of 10\n"
        "  failure        rank 0: exit code 1\n"
        "  last lines     | a\n"
        "                 | b\n"
        "  run directory  /shared/runs/llama-8b  (on login)\n"
        "  scheduler      job 17\n"
        "  next           drillyard runs watch slurm://h100/llama-8b\n"
        "                 drillyard runs logs -f slurm://h100/llama-8b\n"
    )


def test_a_reason_says_only_what_the_headline_does_not() -> None:
    failure = RunFailure("rank 3: exit code 7", rank=3, node="n2", exit_code=7)

    def reasons(reason: str) -> list[str]:
        shown = status_text(status(State.failed, reason=reason, failure=failure), now=NOW)
        return [
            line.split(None, 1)[1] for line in shown.splitlines() if line.startswith("  reason ")
        ]

    assert reasons("rank 3: exit code 7") == []
    assert reasons("node 1 (n2): rank 3: exit code 7; all 3 restarts are used") == [
        "all 3 restarts are used"
    ]
    assert reasons("time limit; rank 3: exit code 7") == ["time limit"]
    assert reasons("lost capacity") == ["lost capacity"]


@pytest.mark.parametrize("exit_code", [126, 127])
def test_a_command_that_is_not_there_is_corrected_before_the_run_is_started_again(
    exit_code: int,
) -> None:
    shown = status_text(status(State.failed, failure=RunFailure("x", exit_code=exit_code)), now=NOW)
    assert "fix the cause first" in shown and "runs logs" in shown


def test_a_run_that_failed_can_be_resumed_and_one_that_was_refused_must_be_corrected() -> None:
    failed = status_text(status(State.failed, failure=RunFailure("time limit")), now=NOW)
    refused = status_text(status(State.failed, failure=RunFailure("refused", exit_code=2)), now=NOW)

    assert "drillyard runs resume slurm://h100/llama-8b" in failed
    assert "fix the cause first" in refused and "fix the cause first" not in failed


def rendered(statuses: list[RunStatus], width: int) -> list[str]:
    console = Console(width=width, color_system=None)
    with console.capture() as captured:
        console.print(runs_table(statuses, width=width, now=NOW))
    return [line.rstrip() for line in captured.get().splitlines()]


STATUSES = st.lists(
    st.builds(
        RunStatus,
        handle=st.builds(
            Handle,
            st.just("slurm"),
            st.sampled_from("ab"),
            st.text("abc-", min_size=1, max_size=63),
        ),
        state=st.sampled_from(State),
        nodes=st.integers(1, 4096),
        reason=st.none() | st.text("abc ()", max_size=120),
        since=st.none() | st.floats(NOW - 1e8, NOW),
    ),
    max_size=6,
)


@settings(max_examples=60)
@given(STATUSES, st.integers(70, 200))
def test_a_table_fits_the_terminal_with_a_line_for_each_run(
    statuses: list[RunStatus], width: int
) -> None:
    lines = rendered(statuses, width)

    assert all(len(line) <= width for line in lines)
    assert len(lines) == 1 + len(statuses) + len({one.handle.cluster for one in statuses})
    assert all(any(str(one.state) in line for line in lines) for one in statuses)


def test_elsewhere_every_line_is_whole_and_has_the_handle() -> None:
    waiting = status(State.queued, since=NOW - 300, reason="x" * 300)
    odd = status(State.failed, since=NOW - 60, reason="a\x1b[2Jb\nc")
    title, first, second = runs_text([waiting, odd], now=NOW).splitlines()
    assert title.split() == ["RUN", "STATE", "FOR", "NODES", "WHY"]
    assert first == f"slurm://h100/llama-8b  queued  5 min      2  {'x' * 300}"
    assert second == "slurm://h100/llama-8b  failed   60 s      2  ab c", (
        "without what moves the cursor"
    )


def test_names_keep_both_ends() -> None:
    assert cut_middle("llama-learning_rate-1e-5", 15) == "llama-l…te-1e-5"
    assert cut_middle("short", 5) == "short"


def test_ages_have_two_of_their_unit_at_least() -> None:
    assert [age(seconds) for seconds in (-5, 0, 119, 120, 7199, 7200, 172_799, 172_800)] == [
        "0 s",
        "0 s",
        "119 s",
        "2 min",
        "119 min",
        "2 h",
        "47 h",
        "2 d",
    ]


def test_json_has_the_handle_as_text_and_in_parts_and_every_field() -> None:
    message = json.loads(
        json.dumps(
            status_json(status(State.failed, attempt=3, failure=RunFailure("x", lines=("l",))))
        )
    )

    assert (
        message["handle"] == "slurm://h100/llama-8b"
        and message["run"] == "llama-8b"
        and message["over"] is True
    )
    assert message["failure"] == {
        "reason": "x",
        "rank": None,
        "node": None,
        "exit_code": None,
        "lines": ["l"],
    }
    assert (
        set(RunStatus.__dataclass_fields__) - {"attempt"} <= set(message) and message["round"] == 3
    )
