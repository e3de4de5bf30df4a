"""The acceptance job of a cluster: a workload like any other, whose files are the node side and a
schedule.

The schedule is a file, as that of a thousand nodes is longer than a command line may be.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from importlib.resources import files
from typing import Any

from drillyard.acceptance import node
from drillyard.acceptance.check import Expected, Level
from drillyard.acceptance.schedule import schedule
from drillyard.config.cluster import ClusterConfig
from drillyard.config.run import WorkloadConfig, WorkloadRunConfig
from drillyard.hardware.capacity import machine_of
from drillyard.hardware.catalog import Catalog
from drillyard.launch.plan import Plan
from drillyard.launch.prepared_run import as_siblings
from drillyard.launch.request import LaunchRequest
from drillyard.plan_files import PlanFile

_SHARED = ("host_tools.py", "supervise/sockets.py", "launch/agent/__main__.py")
DIRECTORY, SCHEDULE = "acceptance", "schedule.json"
"""Of the node side, below the job's files; and its file there."""


def expected_of(cluster: ClusterConfig, facts: Catalog, **more: Any) -> Expected:
    """What the cluster config says that its nodes are."""
    machine = None if cluster.machine is None else machine_of(cluster, facts)
    accelerator = None if machine is None else facts.accelerators[machine.accelerator]
    stack = cluster.network_stack or (machine.network_stack if machine else None)
    return Expected(
        catalog=facts,
        machine=machine,
        accelerator=accelerator,
        stack=None if stack is None else facts.network_stacks.get(stack),
        **more,
    )


def as_planned(expected: Expected, plan: Plan) -> Expected:
    """The same with the NCCL_* variables that the job's plan sets."""
    variables = plan.job.environment.items()
    return replace(
        expected, environment={name: text for name, text in variables if name.startswith("NCCL_")}
    )


def acceptance_request(
    cluster: ClusterConfig,
    level: Level,
    expected: Expected,
    *,
    submission: str = "",
    exclude: tuple[str, ...] = (),
) -> LaunchRequest:
    """The launch request of the job. `submission`: what tells its evidence from that of an earlier
    job in the same run directory."""
    steps = schedule(level, expected, cluster.nodes)
    return LaunchRequest(
        acceptance_run(cluster),
        cluster,
        expected.catalog,
        os.getcwd(),
        sys.executable,
        max_failures=0,
        files=(*node_files(), schedule_file(steps, submission)),
        exclude=exclude,
    )


def acceptance_run(cluster: ClusterConfig) -> WorkloadRunConfig:
    """The run config of the job."""
    here = f"{{launch_directory}}/files/{DIRECTORY}"
    command = ["python3", here, "run", "--schedule", f"{here}/{SCHEDULE}"]
    command += ["--run-directory", "{run_directory}"]
    if cluster.python is not None:
        command += ["--python", cluster.python]
    return WorkloadRunConfig(
        name=f"accept-{cluster.name}", workload=WorkloadConfig(command=command)
    )


def node_files() -> list[PlanFile]:
    """The source of the node side and of what it shares with the agent, `__main__.py` among it, in
    order of names, as resources: a zipped wheel has them too."""
    sources = [each for each in files(node).iterdir() if each.name.endswith(".py")]
    sources += [files("drillyard").joinpath(name) for name in _SHARED]
    return [
        PlanFile(f"{DIRECTORY}/{each.name}", as_siblings(each.read_text(encoding="utf-8")))
        for each in sorted(sources, key=lambda each: each.name)
    ]


def schedule_file(steps: dict[str, Any], submission: str) -> PlanFile:
    """The schedule as node 0 reads it."""
    content = json.dumps({"submission": submission, **steps}, separators=(",", ":")) + "\n"
    return PlanFile(f"{DIRECTORY}/{SCHEDULE}", content)
