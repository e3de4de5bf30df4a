"""A run config and a step record to start from."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from drillyard.config.run import RunConfig
from drillyard.telemetry import StepRecord


@pytest.fixture
def make_config() -> Callable[..., RunConfig]:
    """A function that makes a run config with the given logging settings."""

    def make(**logging: object) -> RunConfig:
        return RunConfig.model_validate(
            {
                "name": "trial",
                "model": {"id": "some/model"},
                "data": {"source": "rows.jsonl", "sequence_length": 4096},
                "training": {"steps": 100, "optimizer": {"learning_rate": 1e-4}},
                "logging": {"tensorboard": False, **logging},
            }
        )

    return make


@pytest.fixture
def config(make_config) -> RunConfig:
    return make_config()


@pytest.fixture
def record() -> StepRecord:
    """The fifth step of 16 B200s training 70 billion parameters."""
    return StepRecord(
        step=5,
        loss=0.6620123456789,
        learning_rate=1e-5,
        grad_norm=1.25,
        step_seconds=14.54,
        tokens=16 * 8 * 4096,
        valid_tokens=500_000,
        num_gpus=16,
        data_seconds=0.01,
        memory_gib=141.5,
    )
