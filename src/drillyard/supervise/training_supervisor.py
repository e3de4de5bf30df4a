"""`drillyard train` on one host: a run config's ranks under the supervisor, with events in the run's own log."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from drillyard.supervise import launch_contract
from drillyard.supervise.attempt import GracePeriods
from drillyard.supervise.console_output import print_error
from drillyard.supervise.launch_contract import record_exit
from drillyard.supervise.rank_process import ONE_NODE, NodePlacement
from drillyard.supervise.supervisor import supervise
from drillyard.telemetry.events import append_event, read_events
from drillyard.telemetry.summary import required_failure

if TYPE_CHECKING:
    from drillyard.config.run import RunConfig


CORES_FOR_STANDBY = 4
"""With so many cores per rank of a host, a process that imports meanwhile does not slow a rank down."""


def supervise_training(
    command: Sequence[str],
    run: RunConfig,
    *,
    num_ranks: int,
    max_restarts: int,
    before_start: Callable[[], bool] | None = None,
    standby: bool | None = None,
    node: NodePlacement = ONE_NODE,
) -> int:
    """Train `run` with `num_ranks` processes of `command` on this host; returns the exit code: that of
    `supervise`, or 1 where the run is done and a required metric could not be measured.

    `before_start`, `node`: see `supervise`. `standby`: keep ranks ready for a restart; None: where the host is the only
    one and has `CORES_FOR_STANDBY` cores per rank. Raises UserError.
    """
    from drillyard.console import SafeConsole

    directory = Path(run.output) / run.name
    if standby is None:
        standby = node.count == 1 and (os.cpu_count() or 1) >= CORES_FOR_STANDBY * num_ranks
    code = supervise(
        command,
        num_ranks=num_ranks,
        run_directory=directory,
        max_restarts=max_restarts,
        environment={"OMP_NUM_THREADS": str(threads_per_rank(run, num_ranks))},
        on_event=functools.partial(append_event, directory),
        console=SafeConsole(),
        total_steps=run.training.steps,
        grace=GracePeriods(watchdog=run.timeouts.watchdog_seconds or None),
        before_start=before_start,
        standby=standby,
        node=node,
    )
    if code == 0 and run.evaluation.required and (failure := required_failure(directory)) is not None:
        print_error(f"error: {failure}")
        # The model is complete: no restart measures it.
        lines = failure.splitlines()
        record_exit(rank=None, exit_code=1, reason=lines[0], lines=lines, final=True)
        return 1
    return code


def is_started(run_directory: Path) -> bool:
    """Whether the submission that started this process has begun the run in a directory: attempts and requeues of one
    submission are one run, as a supervisor's own attempts are."""
    submission = launch_contract.submission()
    return submission is not None and any(
        event["event"] == "run_start" and event.get("launch") == submission for event in read_events(run_directory)
    )


def threads_per_rank(run: RunConfig, num_ranks: int) -> int:
    """CPU threads of each rank: as configured, or the host's cores shared among its ranks."""
    return run.training.threads_per_rank or max(1, (os.cpu_count() or 1) // num_ranks)
