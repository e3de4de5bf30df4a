"""Which node this is and where node 0 is, from what the scheduler tells in the environment.

Slurm: SLURM_NODEID and the first host of SLURM_JOB_NODELIST (`man sbatch`); `scontrol show hostnames` expands the list
where it is installed, and containers often lack it, so the first host is also read from the list itself.
Vertex AI: CLUSTER_SPEC (https://cloud.google.com/vertex-ai/docs/training/distributed-training): workerpool0 is node 0,
replica i of workerpool1 is node 1 + i.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Mapping
from typing import Any


def node_rank(environment: Mapping[str, str]) -> int | None:
    """The rank of this node; None where the environment does not tell. Raises ValueError for a bad CLUSTER_SPEC."""
    if environment.get("CLUSTER_SPEC"):
        task = _cluster_spec(environment)["task"]
        return int(task["index"]) if task["type"] == "workerpool0" else 1 + int(task["index"])
    if environment.get("SLURM_NODEID", "").isdigit():
        return int(environment["SLURM_NODEID"])
    return None


def leader_host(environment: Mapping[str, str]) -> str | None:
    """The host of node 0; None where the environment does not tell. Raises ValueError for a bad CLUSTER_SPEC."""
    if environment.get("CLUSTER_SPEC"):
        chief = str(_cluster_spec(environment)["cluster"]["workerpool0"][0])
        return chief.rsplit(":", 1)[0]
    hosts = environment.get("SLURM_JOB_NODELIST") or environment.get("SLURM_NODELIST")
    return _first_slurm_host(hosts) if hosts else None


def restart_count(environment: Mapping[str, str]) -> str:
    """Which start of one submission this is: a requeued Slurm job keeps its id and counts SLURM_RESTART_COUNT up."""
    return environment.get("SLURM_RESTART_COUNT") or "0"


def submission(environment: Mapping[str, str]) -> str:
    """The scheduler's name for this submission, or nothing."""
    return environment.get("SLURM_JOB_ID") or environment.get("CLOUD_ML_JOB_ID") or ""


def first_of_hostlist(hosts: str) -> str:
    """The first name of Slurm's hostlist expression: `n[01-04,7],m2` -> `n01`, `rack[1-2]n[05,9]` -> `rack1n05`."""
    found = re.match(r"(?:[^,\[]|\[[^\]]*\])+", hosts)
    first = found[0] if found else hosts
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first)


def _first_slurm_host(hosts: str) -> str:
    if shutil.which("scontrol"):
        asked = subprocess.run(
            ["scontrol", "show", "hostnames", hosts], capture_output=True, text=True, timeout=30, check=False
        )
        if asked.returncode == 0 and asked.stdout.split():
            return asked.stdout.split()[0]
    return first_of_hostlist(hosts)


def _cluster_spec(environment: Mapping[str, str]) -> dict[str, Any]:
    try:
        spec = json.loads(environment["CLUSTER_SPEC"])
        int(spec["task"]["index"]), spec["task"]["type"], spec["cluster"]["workerpool0"][0]
    except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise ValueError(f"CLUSTER_SPEC is not one of Vertex AI: {error!r}") from None
    return dict(spec)
