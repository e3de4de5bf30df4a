"""What `drillyard train` hands to the supervisor."""

from __future__ import annotations

import os

import pytest

from drillyard.config.run import RunConfig
from drillyard.supervise.training import threads_per_rank


def run_config(**training: object) -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": "small",
            "model": {"config": {"architecture": "llama"}, "init": "random"},
            "data": {"source": "a.txt", "sequence_length": 64},
            "training": {"steps": 1, "optimizer": {"learning_rate": 1e-3}, **training},
        }
    )


def test_the_cores_of_the_host_are_shared_among_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    assert [threads_per_rank(run_config(), ranks) for ranks in (1, 8, 32)] == [16, 2, 1]


def test_configured_threads_are_taken_as_they_are() -> None:
    assert threads_per_rank(run_config(threads_per_rank=3), 8) == 3
