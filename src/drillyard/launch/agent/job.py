"""job.json: the work of every node's agent for a run. Planners write it, agents read it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .state_file import read_file

FORMAT = 1
LAUNCHED_FROM = "launched-from.json"
"""File of a launch directory: where the launch was given that wrote it."""

SECONDS_AFTER_FAILURE = 5.0
"""From SIGTERM to SIGKILL once an attempt has failed: its state is on disk already."""


class UsageError(Exception):
    """A mistake of the caller: shown as `error: ...`, exit code 2."""


def run_token(launch_directory: str) -> str:
    """The value of RUN_MARK (reaper.py) for a run: the same for all its agents."""
    return hashlib.sha256(os.path.abspath(launch_directory).encode()).hexdigest()[:20]


@dataclass(frozen=True)
class Job:
    """Run as described to its agents. Paths are those of the nodes.

    `command` is started once per node and attempt. In it and in `environment`, `{node_rank}`,
    `{nodes}`, `{processes_per_node}`, `{master_addr}`, `{master_port}`, `{round}`,
    `{run_directory}` and `{launch_directory}` are replaced (no other braces are touched). Every
    command also gets NODE_RANK, NNODES, NPROC_PER_NODE, MASTER_ADDR, MASTER_PORT,
    DRILLYARD_LAUNCH_ROUND (the attempt, as `{round}`), DRILLYARD_SUBMISSION (which submission of
    the run this is), DRILLYARD_STOP_SECONDS (`stop_seconds`) and DRILLYARD_EXIT_RECORD, the path of
    a JSON file to which it may write how it ended (`rank`, `exit_code`, `reason`, `lines`,
    `lost_peer`, `final`, `step`). If a command is stopped because another node failed, a file of
    this name with `.stop` at its end says so before the signal (`reason`, `rank`, `exit_code`).
    """

    run: str
    cluster: str
    platform: str
    nodes: int
    processes_per_node: int
    run_directory: str
    launch_directory: str
    command: list[str]
    working_directory: str | None = None
    environment: dict[str, str] = field(default_factory=dict)
    profile_script: str | None = None
    """A shell script that sets the network stack's variables: sourced in the shell that becomes the
    command."""
    checkpoints: str | None = None
    """Glob whose matches change only with a newer checkpoint (manifests); None: progress cannot be
    seen."""
    max_failures: int = 3
    stop_seconds: float = 120.0
    """From a request to stop until the rest of the command is killed."""
    join_seconds: float = 600.0
    """Longest wait of the leader for other nodes at the start, and for a lost one to return. 0: a
    lost node does not return, and the others have `start_seconds` each to join after the one
    before."""
    start_seconds: float = 600.0
    lease_seconds: float = 20.0
    """No start of the run begins before every lease of an earlier one was silent for so long. A
    node that cannot renew its lease, or cannot be reached by the others, for half of it ends its
    command and is lost."""
    port: int = 0
    """First of 16 ports on which the leader may listen for the other nodes."""
    log_parts: bool = False
    """The launch directory is a mounted bucket: node logs are written in segments
    (output_pump.py)."""
    format: int = FORMAT

    def as_json(self) -> str:
        """The text of job.json."""
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"


_TYPES: dict[str, tuple[type, ...]] = {
    **{"str": (str,), "str | None": (str, type(None)), "int": (int,), "float": (int, float)},
    **{"bool": (bool,), "list[str]": (list,), "dict[str, str]": (dict,)},
}
"""By the annotations of a job's fields."""


def read_job(path: Path) -> Job:
    """Read a job from a file. Raises OSError, and ValueError as `job_of`."""
    return job_of(read_file(path, 16 << 20))


def job_of(text: str | bytes) -> Job:
    """The job that is `text`. Raises ValueError where it is of another format or not a job."""
    try:
        content: Any = json.loads(text)
    except RecursionError:
        content = None
    if not isinstance(content, dict):
        raise ValueError("not a job")
    if (found := content.get("format")) != FORMAT:
        raise ValueError(f"written for another version of the agent (format {found}, not {FORMAT})")
    if unknown := sorted(content.keys() - {each.name for each in dataclasses.fields(Job)}):
        raise ValueError(f"unknown fields: {', '.join(unknown)}")
    for each in dataclasses.fields(Job):
        value = content.get(each.name)
        if each.name in content and not isinstance(value, _TYPES[str(each.type)]):
            raise ValueError(f"{each.name} cannot be {type(value).__name__}")
    try:
        return Job(**content)
    except TypeError as error:
        raise ValueError(str(error)) from None


def load_job(path: str) -> Job:
    """Read the job in a file. Raises UsageError."""
    try:
        job = read_job(Path(path))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: {error}") from None
    if job.nodes > 1 and job.port <= 0:
        raise UsageError(
            f"{path}: `port` must be the first of 16 ports for the agents of {job.nodes} nodes"
        )
    return job
