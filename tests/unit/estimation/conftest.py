"""A job of eight-GPU nodes for tests to fail."""

from __future__ import annotations

from typing import Any

import pytest

from drillyard.estimation.failure_estimate import FailureInputs, checkpoint_cost, restart_time
from drillyard.estimation.quantity import given
from drillyard.hardware import catalog


@pytest.fixture
def make_job():
    """A job on H100 nodes: 30 days of 10 s steps, asynchronous checkpoints, a restart of 5
    minutes."""

    def make(
        *,
        machine: str = "a3-megagpu-8g",
        num_nodes: int = 2048,
        cost: dict[str, Any] | None = None,
        **job: Any,
    ):
        row = catalog().machine(machine)
        checkpoint = checkpoint_cost(
            row,
            catalog().accelerator_of(row),
            num_nodes=num_nodes,
            **{"bytes_per_gpu": 4e8, "asynchronous": True, **(cost or {})},
        )
        restart = restart_time(checkpoint, detect_seconds=0, start_seconds=300, load_seconds=0)
        settled = {
            "steps": 259_200,
            "step_seconds": given(10.0),
            "checkpoint": checkpoint,
            "restart": restart,
            **job,
        }
        return FailureInputs(machine=row, num_nodes=num_nodes, **settled)

    return make
