"""A growing log of any framework, measured again after each change: `metrics --follow`, and `runs
watch` of a workload.

The merged log of a launched run is mirrored into a temporary file for that. Accelerator and number
of GPUs come from where the run was launched.
"""

from __future__ import annotations

import json
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.live import Live

from drillyard.errors import UserError
from drillyard.hardware import Catalog
from drillyard.launch.launcher import Launcher
from drillyard.launch.request import LogSelection
from drillyard.measurement.parsed_log import ParsedLog
from drillyard.measurement.read_logs import Tail
from drillyard.measurement.result_text import render_result
from drillyard.measurement.run_result import measure
from drillyard.measurement.user_facts import UserFacts

POLL_SECONDS = 1.0


def follow_log(
    tail: Tail,
    facts: UserFacts,
    catalog: Catalog,
    console: Console,
    *,
    as_json: bool = False,
    is_complete: Callable[[], bool] = lambda: False,
    wait: Callable[[], None] = lambda: time.sleep(POLL_SECONDS),
    no_steps: str | None = None,
) -> None:
    """Show the measured run after each change, in place on a terminal, else one after the other (as
    JSON: one a line).

    Returns when the tail has ended or `is_complete`; `no_steps` is shown for a complete log without
    a step.
    """
    live = Live("waiting for the first lines", console=console, auto_refresh=False)
    has_steps = False

    def show(log: ParsedLog | None, complete: bool) -> None:
        nonlocal has_steps
        has_steps = has_steps if log is None else bool(log.steps)
        shown: RenderableType | None = no_steps if complete and not has_steps else None
        if log is not None and shown is None:
            result = measure(log, facts, catalog)
            if as_json:
                print(json.dumps(result.as_json(), ensure_ascii=False, allow_nan=False), flush=True)
                return
            shown = render_result(result)
        if shown is None:
            return
        if live.is_started:
            live.update(shown, refresh=True)
        else:
            console.print(shown)

    if console.is_terminal and not as_json:
        live.start(refresh=True)
    try:
        while True:
            complete = is_complete()
            # No reference to the log may survive until the next poll: its growing columns would be
            # copied.
            show(tail.poll(), complete)
            if complete or tail.ended:
                return
            if not tail.behind:
                wait()
    finally:
        live.stop()


def watch_log(
    launcher: Launcher[Any],
    run: str,
    console: Console,
    facts: UserFacts,
    catalog: Catalog,
    interval_seconds: float,
    words: str | None = None,
) -> None:
    """Follow the merged log of a launched run until it is over. `words`: how commands name it, by
    default its name. Raises UserError where the log cannot be read."""
    pieces, stopped, problems = (
        launcher.logs(run, LogSelection(follow=True)),
        threading.Event(),
        list[UserError](),
    )

    def mirror(path: Path) -> None:
        try:
            with path.open("ab") as file:
                for piece in pieces:
                    if stopped.is_set():
                        break
                    file.write(piece)
                    file.flush()
        except UserError as error:
            problems.append(error)

    with tempfile.TemporaryDirectory(
        prefix="drillyard-watch-", ignore_cleanup_errors=True
    ) as directory:
        path = Path(directory, f"{run}.log")
        path.touch()
        thread = threading.Thread(target=mirror, args=(path,), daemon=True)
        thread.start()
        try:
            follow_log(
                Tail([path]),
                facts,
                catalog,
                console,
                is_complete=lambda: not thread.is_alive(),
                wait=lambda: thread.join(interval_seconds),
                no_steps=f"{run} is over, and its log has no step that drillyard metrics knows:"
                f" drillyard runs logs {words or run}",
            )
        finally:
            stopped.set()
    if problems:
        raise problems[0]
