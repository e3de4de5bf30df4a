"""A run's status as text and as JSON. Ages are relative to `now`.

status_text(status)     one run on one screen
runs_table(statuses)    many runs, a line each, in so many columns
runs_text(statuses)     the same, whole lines for other programs
status_json(status)     the fields that `--json` prints
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any, Final

from rich.table import Table
from rich.text import Text

from drillyard.control_characters import clean
from drillyard.formatting import first_few
from drillyard.launch.run_status import RunFailure, RunStatus, State, beyond_failure
from drillyard.redaction import redact
from drillyard.supervise.restart_policy import FINAL_EXIT_CODES

STATE_STYLES: Final = {
    State.queued: "yellow",
    State.starting: "cyan",
    State.running: "green",
    State.restarting: "yellow",
    State.succeeded: "bold green",
    State.failed: "bold red",
    State.cancelled: "dim",
}
_LABEL: Final = 15
_MOST_HOSTS: Final = 8
_SHOWN_ELSEWHERE: Final = ("agent", "launch_directory")
_TITLES: Final = ("STATE", "FOR", "NODES")
_HEADER: Final = ("RUN", *_TITLES, "WHY")
_NUMBERS: Final = ("FOR", "NODES")


def status_text(
    status: RunStatus,
    *,
    progress: str | None = None,
    where: str = "",
    words: str | None = None,
    now: float | None = None,
) -> str:
    """A run on one screen: its state, since when and why, where it runs, what went wrong, and what
    to do next.

    `progress` is a line about its steps, `where` the host of its run directory, for people;
    `words`: how commands name it, by default its handle.
    """
    now = time.time() if now is None else now
    rows = [("", f"{status.handle}  {headline(status, now)}")]
    # Without the failure that the headline of a failed run has already.
    reason = beyond_failure(
        _reason(status), status.failure if status.state is State.failed else None
    )
    if reason and status.state is not State.queued:
        rows.append(("reason", reason))
    times = (
        ("submitted", status.submitted_at),
        ("started", status.started_at),
        ("ended", status.ended_at),
    )
    rows += [
        (label, f"{moment(at)}  ({age(now - at)} ago)") for label, at in times if at is not None
    ]
    hosts = f": {first_few(status.hosts, _MOST_HOSTS)}" if status.hosts else ""
    rows.append(("nodes", f"{status.nodes}{hosts}"))
    if status.attempt:
        rows.append(
            (
                "restarts",
                f"{status.attempt}, {status.failures or 'none'} of them counted as failures",
            )
        )
    if progress:
        rows.append(("progress", progress))
    if status.failure is not None:
        if status.state is not State.failed:
            rows.append(("failure", failure_line(status.failure)))
        lines = status.failure.lines
        rows += [
            ("last lines" if not index else "", f"| {line}") for index, line in enumerate(lines)
        ]
    if status.run_directory:
        rows.append(("run directory", status.run_directory + (f"  (on {where})" if where else "")))
    if (agent := status.native.get("agent")) and not status.state.over:
        rows.append(("agent", agent))
    native = [
        f"{name} {value}" for name, value in status.native.items() if name not in _SHOWN_ELSEWHERE
    ]
    if native:
        rows.append(("scheduler", ", ".join(native)))
    rows += [
        ("next" if not index else "", line) for index, line in enumerate(next_steps(status, words))
    ]
    (_, title), *others = rows
    return (
        "\n".join([title, *(f"  {label:<{_LABEL}}{_one_line(text)}" for label, text in others)])
        + "\n"
    )


def _one_line(text: str) -> str:
    """A reason may have several lines, which must not look like ours."""
    return " ".join(text.splitlines())


def headline(status: RunStatus, now: float) -> str:
    """State and age in words: `queued for 5 min (Priority)`, `running for 2 h`, `failed 3 h ago:
    time limit`."""
    since = None if status.since is None else age(now - status.since)
    if not status.state.over:
        reason = f" ({status.reason})" if status.reason and status.state is State.queued else ""
        return _one_line(f"{status.state}{f' for {since}' if since else ''}{reason}")
    # A cancelled run may have had a failed attempt before: that is not why it is over.
    why = (
        f": {failure_line(status.failure)}"
        if status.failure is not None and status.state is State.failed
        else ""
    )
    return _one_line(f"{status.state}{f' {since} ago' if since else ''}{why}")


def failure_line(failure: RunFailure) -> str:
    """`rank 3 on n2: exit code 1`: as much of it as is known."""
    parts = [f"rank {failure.rank}"] if failure.rank is not None else []
    parts += [f"on {failure.node}" if parts else failure.node] if failure.node else []
    code = failure.exit_code
    reason = failure.reason.removeprefix(f"rank {failure.rank}: ")
    text = reason if code is None or str(code) in reason else f"{reason} (exit code {code})"
    return f"{' '.join(parts)}: {text}" if parts else text


def next_steps(status: RunStatus, words: str | None = None) -> list[str]:
    """List the commands that a person may use for a run in this state. `words` name it there."""
    handle = words or status.handle
    if status.state is State.succeeded:
        return [f"drillyard runs artifacts {handle} --fetch DIR"]
    if (
        status.state is State.failed
        and status.failure is not None
        and status.failure.exit_code in FINAL_EXIT_CODES
    ):
        return [
            f"drillyard runs logs {handle} --tail 20",
            (
                "fix the cause first: the same start would fail again; then launch again, or with"
                " the same config:"
            ),
            f"drillyard runs resume {handle}",
        ]
    if status.state.over:
        logs = [f"drillyard runs logs {handle} --tail 100"] if status.state is State.failed else []
        return [*logs, f"drillyard runs resume {handle}   (from its last checkpoint)"]
    if status.state is State.queued:
        return [
            f"drillyard runs logs -f {handle}   (waits for its first line)",
            f"drillyard runs cancel {handle}",
        ]
    return [f"drillyard runs watch {handle}", f"drillyard runs logs -f {handle}"]


def runs_text(statuses: Sequence[RunStatus], *, now: float | None = None) -> str:
    """A whole line for each run that begins with its handle, in columns below a title: for other
    programs.

    rich would take half a second for 500 of them.
    """
    now = time.time() if now is None else now
    rows = [_HEADER, *((str(status.handle), *_row(status, now)) for status in statuses)]
    cells = [[clean(redact(cell)) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    aligned = (
        "  ".join(
            cell.rjust(width) if title in _NUMBERS else cell.ljust(width)
            for cell, width, title in zip(row, widths, _HEADER, strict=True)
        )
        for row in cells
    )
    return "".join(f"{line.rstrip()}\n" for line in aligned)


def runs_table(statuses: Sequence[RunStatus], *, width: int, now: float | None = None) -> Table:
    """A line for each run in `width` columns: runs under their cluster, long names and reasons
    cut."""
    now = time.time() if now is None else now
    names = [status.handle.run for status in statuses]
    rows = [_row(status, now) for status in statuses]
    clusters = list(dict.fromkeys(_cluster(status) for status in statuses))
    name_width, why_width = _widths([*names, *clusters], rows, width)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for title in _HEADER:
        table.add_column(title, no_wrap=True, justify="right" if title in _NUMBERS else "left")
    for cluster in clusters:
        table.add_row(Text(cut_middle(cluster, name_width), style="dim"))
        for status, name, (state, since, nodes, why) in zip(statuses, names, rows, strict=True):
            if cluster == _cluster(status):
                shown = why if len(why) <= why_width else why[: why_width - 1] + "…"
                styled = Text(state, style=STATE_STYLES[status.state])
                table.add_row(Text(cut_middle(name, name_width)), styled, since, nodes, Text(shown))
    return table


def _row(status: RunStatus, now: float) -> tuple[str, str, str, str]:
    since = "-" if status.since is None else age(now - status.since)
    failed = status.failure if status.state in (State.failed, State.restarting) else None
    why = _reason(status) if failed is None else failure_line(failed)
    return str(status.state), since, str(status.nodes), _one_line(why or "")


def _widths(
    names: Sequence[str], rows: Sequence[tuple[str, str, str, str]], width: int
) -> tuple[int, int]:
    """The columns of names and reasons: reasons are cut first, down to 20 columns, then names, down
    to 20."""
    longest = max(map(len, names), default=0)
    reason = max((len(row[3]) for row in rows), default=0)
    between = (
        sum(
            max([len(title), *(len(row[column]) for row in rows)])
            for column, title in enumerate(_TITLES)
        )
        + 8
    )
    left = width - between
    name = min(longest, max(left - min(reason, 20), 20))
    return name, max(left - name, 4)


def _cluster(status: RunStatus) -> str:
    return f"{status.handle.platform}://{status.handle.cluster}"


def cut_middle(text: str, width: int) -> str:
    """`text` in at most `width` columns, cut in the middle: names of a sweep differ at their
    ends."""
    if len(text) <= width:
        return text
    tail = (width - 1) // 2
    return f"{text[: width - 1 - tail]}…{text[len(text) - tail :]}"


def _reason(status: RunStatus) -> str | None:
    """The reason, where it says more than the state."""
    return None if status.reason == status.state else status.reason


def status_json(status: RunStatus) -> dict[str, Any]:
    """A run for programs: the fields of `RunStatus` (`attempt` as `round`; Unix seconds), the
    handle also in parts."""
    fields = asdict(status)
    parts = {"handle": str(status.handle), **fields.pop("handle"), "round": fields.pop("attempt")}
    return {**parts, **fields, "over": status.state.over}


def moment(seconds: float) -> str:
    """`2026-11-21 22:55:10 UTC`."""
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S} UTC"


def age(seconds: float) -> str:
    """A duration in the largest unit that gives at least 2: 45 s, 12 min, 5 h, 3 d. Not below
    zero."""
    whole = max(0, int(seconds))
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if whole >= 2 * size:
            return f"{whole // size} {unit}"
    return f"{whole} s"
