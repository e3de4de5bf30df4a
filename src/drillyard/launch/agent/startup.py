"""The verb `run`: an agent from its start to its exit code."""

from __future__ import annotations

import contextlib
import json
import os
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from drillyard.supervise.launch_contract import EXIT_CANCELLED
from drillyard.supervise.process_identity import Process, running_process, this_process

from .follower import Follower
from .job import Job, UsageError, load_job
from .leader import Leader
from .node_command import REFERENCE, NodeCommand
from .scheduler_env import Allocation, locate_node
from .state_file import (
    OVER,
    exit_code_of,
    is_cancelled,
    last_state,
    make_directory,
    read_file,
    read_json_object,
    read_secrets,
    replace_file,
)

_SECONDS_FOR_SECRET = 60.0
"""NFS clients may cache for this long that a file was not there (nfs(5), acdirmax)."""


def run(options: Namespace) -> int:
    """Run this node's part of a job in the foreground. Raises UsageError."""
    job = load_job(options.job)
    node, address, start = locate_node(job, options)
    directory = Path(job.launch_directory)
    if is_cancelled(directory, start["submission"]):
        return EXIT_CANCELLED
    if (over := recorded_exit_code(directory, start)) is not None:
        print(
            f"drillyard: this start of the run is over (exit code {over}): nothing is started",
            flush=True,
        )
        return over
    _require_secrets(job)
    # Only the user may write to the agents' files; the command gets the user's own umask.
    umask = os.umask(0o077)
    os.umask(umask | 0o022)
    me = this_process()
    with (
        _announced(directory, node, me, options.kept, start),
        contextlib.closing(
            NodeCommand(job, node, me, address, options.quiet, start["submission"], umask)
        ) as command,
    ):
        secret = _read_secret(directory) if job.nodes > 1 else b""
        log = (options.srun_log[0], int(options.srun_log[1])) if options.srun_log else None
        return (Leader if node == 0 else Follower)(
            command, me, secret, start, Allocation(options.hosts, log)
        ).run()


def _require_secrets(job: Job) -> None:
    known = read_secrets(Path(job.launch_directory))
    named = {name for text in job.environment.values() for name in REFERENCE.findall(text)}
    if missing := sorted(named - set(known)):
        path = Path(job.launch_directory) / "secrets.json"
        raise UsageError(
            f"{path} has no value of {', '.join(missing)}, which the environment of the run refers"
            f" to; `drillyard runs resume {job.run}` sends it again"
        )


def recorded_exit_code(directory: Path, start: dict[str, str]) -> int | None:
    """The code that a start of the run ended with for good; None for another one, or while it runs.

    A scheduler that starts every program again that exits with an error (Vertex AI: five times a
    replica, three times the job) must not restart a run that is over. A start without a name cannot
    be distinguished from the next one.
    """
    state = last_state(directory) if start["submission"] else {}
    return exit_code_of(state, start) if state.get("state") in OVER else None


@contextlib.contextmanager
def _announced(
    directory: Path, node: int, me: Process, is_kept: bool, start: dict[str, str]
) -> Iterator[None]:
    """Keep a file in LAUNCH_DIR/agents/ for as long as the agent runs, by which it is found and
    stopped."""
    path = directory / "agents" / f"{me.host}.node-{node}.json"
    agent, respawner = me.as_json(), running_process(os.getppid()).as_json() if is_kept else None
    make_directory(path.parent)
    content = {"node": node, **start, "agent": agent, "keeper": respawner, "at": time.time()}
    replace_file(path, json.dumps(content, indent=2) + "\n")
    try:
        yield
    finally:
        # Another start of the run may have announced itself on the same host meanwhile.
        with contextlib.suppress(OSError):
            if read_json_object(path).get("agent") == agent:
                path.unlink()


def _read_secret(directory: Path) -> bytes:
    """Read the run's secret, which submission put there. Raises UsageError."""
    path = directory / "secret"
    deadline = time.monotonic() + _SECONDS_FOR_SECRET
    while True:
        try:
            secret = read_file(path).strip()
        except FileNotFoundError:
            secret = b""
        except OSError as error:
            raise UsageError(
                f"{path}: {error.strerror}: the agents of a run must be one user's"
            ) from None
        if secret:
            return secret
        if time.monotonic() > deadline:
            raise UsageError(
                f"{path} is missing or empty: is {directory} the same directory on all nodes?"
            )
        time.sleep(0.5)
