"""What an agent is told: the job of a run, the same for every node. Planners write it as job.json, agents read it.

Standard library only, and nothing newer than Python 3.9: the agent runs wherever the nodes' own Python is.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FORMAT = 1

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_REFUSED = 2
EXIT_NODE_LOST = 75
"""A node is gone for good: the scheduler may start the run again on others. sysexits.h: EX_TEMPFAIL."""
EXIT_CHECKPOINTED = 85
EXIT_CANCELLED = 130


@dataclass(frozen=True)
class Job:
    """A run as its agents see it. Paths are those of the nodes.

    `command` is started once per node and round. In it and in `environment`, `{node_rank}`, `{nodes}`,
    `{processes_per_node}`, `{master_addr}`, `{master_port}`, `{round}`, `{run_directory}` and `{launch_directory}` are
    replaced (no other braces are touched). Every command also gets NODE_RANK, NNODES, NPROC_PER_NODE, MASTER_ADDR,
    MASTER_PORT, DRILLYARD_LAUNCH_ROUND (as `{round}`), DRILLYARD_SUBMISSION (which submission of the run this is) and
    DRILLYARD_EXIT_RECORD, the path of a JSON file in which it may tell how it ended (`rank`, `exit_code`, `reason`,
    `lines`, `lost_peer`, `final`). Where another node's failure is why a command is stopped, that is in a file of this
    name with `.stop` at its end before the signal (`reason`, `rank`, `exit_code`).
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
    """A shell script that sets the network stack's variables: sourced in the shell that becomes the command."""
    checkpoints: str | None = None
    """Glob of what only a newer checkpoint adds to (manifests); None: progress cannot be seen."""
    max_failures: int = 3
    stop_seconds: float = 120.0
    """From a request to stop until what is left of the command is killed."""
    join_seconds: float = 600.0
    """How long the leader waits for the other nodes at the start, and for a lost one to come back. 0: a lost node does
    not come back, and the others have `start_seconds` each to join after the one before."""
    start_seconds: float = 600.0
    lease_seconds: float = 20.0
    """No start of the run begins before every lease of an earlier one was silent for so long. A node that cannot renew
    its lease, or is not heard by the others, for half of it ends its command and is lost."""
    port: int = 0
    """First of 16 ports on which the leader may listen for the other nodes."""
    log_parts: bool = False
    """The launch directory is a mounted bucket: node logs are written as parts (parts.py)."""
    format: int = FORMAT

    def as_json(self) -> str:
        """The text of job.json."""
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"


def read_job(path: Path) -> Job:
    """The job in a file. Raises ValueError where it is of another format or not a job."""
    told: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if told.get("format") != FORMAT:
        raise ValueError(
            f"{path}: written for another version of the agent (format {told.get('format')}, not {FORMAT})"
        )
    known = {each.name for each in dataclasses.fields(Job)}
    unknown = sorted(set(told) - known)
    if unknown:
        raise ValueError(f"{path}: unknown fields: {', '.join(unknown)}")
    return Job(**told)
