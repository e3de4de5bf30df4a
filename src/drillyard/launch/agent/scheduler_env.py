"""Reports of a scheduler to an agent: which node this is, where node 0 is, and which agents have
ended already.

Slurm: SLURM_NODEID (`man sbatch`); the job script passes the rest as options. Vertex AI:
CLUSTER_SPEC (https://cloud.google.com/vertex-ai/docs/training/distributed-training): workerpool0 is
node 0, replica i of workerpool1 is node 1 + i.

In the log of a Slurm job script srun writes `srun: error: n3: task 2: Exited with exit code 2`, or
`n[1-2]: tasks 1-2: Killed` where several end at once; each agent is one task, numbered as its node.
With --label each line of a task begins with its number, as in `2: error: ...`. So a node whose
agent has ended is known before it joins.
"""

from __future__ import annotations

import json
import os
import re
from argparse import Namespace
from collections.abc import Mapping

from drillyard.supervise import cause
from drillyard.supervise.launch_contract import EXIT_CANCELLED
from drillyard.supervise.restart_policy import LeaderEnd

from .job import Job, UsageError

_ENDED = re.compile(r"^srun: error: \S+: tasks? ([\d,-]+): (.+)$", re.MULTILINE)
_NOT_STARTED = re.compile(r"^srun: error: .* failed on node ([^ :]+): ", re.MULTILINE)
_EXITED = re.compile(r"Exited with exit code (\d+)")


def node_place(environment: Mapping[str, str]) -> tuple[int | None, str | None]:
    """The rank of this node and the host of node 0, None where the environment does not say. Raises
    ValueError for a bad CLUSTER_SPEC."""
    if not environment.get("CLUSTER_SPEC"):
        rank = environment.get("SLURM_NODEID", "")
        return (int(rank) if rank.isdigit() else None), None
    try:
        spec = json.loads(environment["CLUSTER_SPEC"])
        task, chief = spec["task"], str(spec["cluster"]["workerpool0"][0])
        first_of_pool = 0 if task["type"] == "workerpool0" else 1
        return first_of_pool + int(task["index"]), chief.rsplit(":", 1)[0]
    except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise ValueError(f"CLUSTER_SPEC is not one of Vertex AI: {error!r}") from None


class Allocation:
    """Reports of Slurm on the nodes of this job; empty where another scheduler, or none, starts
    agents.

    `hosts`: their names by rank. `log` and `offset`: the file that srun writes to, and where this
    start begins in it.
    """

    def __init__(self, hosts: str | None = None, log: tuple[str, int] | None = None) -> None:
        self.hosts = dict(enumerate(hosts.split(","))) if hosts else {}
        self._log = log

    def ended(self) -> dict[int, str]:
        """Reasons of agents' ends, by node rank: their last lines and srun's. Without those that
        exited with 0."""
        if self._log is None:
            return {}
        path, offset = self._log
        try:
            with open(path, "rb") as file:
                file.seek(offset)
                text = file.read().decode(errors="replace")
        except OSError:
            return {}
        # Leave out a line that is still being written.
        text = text[: text.rfind("\n") + 1]
        ends = {node: found[2] for found in _ENDED.finditer(text) for node in _numbers(found[1])}
        return {node: _with_last_words(text, node, how) for node, how in ends.items()}


def leader_end(printed: str, srun_code: int, host: str) -> LeaderEnd:
    """How the agent of node 0, on `host`, ended: by what srun `printed`, with the tasks' lines, and
    its exit code (negative: by a signal)."""
    unstarted = sorted(set(_NOT_STARTED.findall(printed)))
    words = re.findall(r"^ *0+: (.*)$", printed, re.MULTILINE)
    ends = {node: found[2] for found in _ENDED.finditer(printed) for node in _numbers(found[1])}
    code = None
    if not unstarted and 0 not in ends and 0 <= srun_code <= EXIT_CANCELLED:
        code = srun_code
    elif not unstarted and (found := _EXITED.fullmatch(ends.get(0, ""))):
        code = int(found[1])
    return LeaderEnd(host, code, unstarted, words[-1] if words else "")


def _numbers(listed: str) -> list[int]:
    """Expand `0-2,5` to 0, 1, 2, 5."""
    bounds = [each.partition("-") for each in listed.split(",") if each]
    return [node for first, _, last in bounds for node in range(int(first), int(last or first) + 1)]


def _with_last_words(text: str, node: int, how: str) -> str:
    printed = re.findall(rf"^ *0*{node}: (.*)$", text, re.MULTILINE)
    line = cause.error_line(cause.last_words("\n".join(printed)))
    return f"{line} ({how})" if line else how


def locate_node(job: Job, options: Namespace) -> tuple[int, str, dict[str, str]]:
    """Rank of this node, host of node 0, and which start of the run this is. Raises UsageError."""
    node, address = options.node_rank, options.leader
    if node is None or not address:
        try:
            known_node, known_address = node_place(os.environ)
        except ValueError as error:
            raise UsageError(str(error)) from None
        node, address = known_node if node is None else node, address or known_address
    if job.nodes == 1:
        node, address = node or 0, address or "127.0.0.1"
    if node is None or address is None:
        raise UsageError(
            "neither the scheduler nor --node-rank and --leader say which node this is and where"
            " node 0 is"
        )
    if not 0 <= node < job.nodes:
        raise UsageError(f"there is no node {node} in a job of {job.nodes} nodes")
    submission = (
        options.submission
        if options.submission is not None
        else os.environ.get("CLOUD_ML_JOB_ID", "")
    )
    return node, address, {"submission": submission, "attempt": options.attempt}
