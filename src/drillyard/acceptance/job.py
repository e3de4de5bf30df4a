"""The acceptance job of a cluster: a workload like any other, whose files are the node side."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

from drillyard.acceptance import node
from drillyard.acceptance.check import Expected, Level
from drillyard.acceptance.schedule import schedule
from drillyard.config.cluster import ClusterConfig
from drillyard.config.run import WorkloadConfig, WorkloadRunConfig
from drillyard.hardware.capacity import machine_of
from drillyard.hardware.catalog import Catalog

DIRECTORY = "acceptance"
"""Of the node side, below the job's files."""


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


def acceptance_run(
    cluster: ClusterConfig, level: Level, expected: Expected, *, name: str | None = None
) -> WorkloadRunConfig:
    """The run config of the job. Pure."""
    steps = json.dumps(schedule(level, expected, cluster.nodes), separators=(",", ":"))
    command = ["python3", f"{{launch_directory}}/files/{DIRECTORY}", "run", "--schedule", steps]
    command += ["--run-directory", "{run_directory}"]
    if cluster.python is not None:
        command += ["--python", cluster.python]
    sources = sorted(
        (each for each in files(node).iterdir() if each.name.endswith(".py")),
        key=lambda each: each.name,
    )
    return WorkloadRunConfig(
        name=name or f"accept-{cluster.name}",
        workload=WorkloadConfig(
            command=command,
            files={f"{DIRECTORY}/{each.name}": str(each) for each in sources},
        ),
    )
