"""What only a GPU can show: fast attention kernels train like SDPA does; a step never waits for the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.distributed.ranks import run_ranks
from tests.distributed.training_case import build, make_config, run_steps, write_documents

from drillyard.training.trainer import StepWindow

pytestmark = pytest.mark.gpu

STEPS = 20
MODEL = {
    "architecture": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def gpu_config(directory: str, **changes: Any) -> Any:
    return make_config(
        Path(directory),
        model={"config": MODEL, "init": "random", "attention": changes.pop("attention", "auto")},
        training__precision="bf16",
        training__device="cuda",
        training__micro_batch_size=4,
        training__optimizer={"learning_rate": 1e-3},
        **changes,
    )


def losses(directory: str, changes: dict[str, Any]) -> np.ndarray:
    trainer, _ = build(gpu_config(directory, **changes))
    return run_steps(trainer, 0, STEPS)[:, 0]


def steps_without_waiting(directory: str) -> int:
    trainer, _ = build(gpu_config(directory))
    run_steps(trainer, 0, 2)
    torch.cuda.set_sync_debug_mode("error")
    for step in range(2, 6):
        trainer.train_step(step, StepWindow(0.0))
    torch.cuda.set_sync_debug_mode("default")
    return 6


@pytest.mark.parametrize(
    "changes",
    [{"attention": "varlen"}, {"attention": "flex"}, {"attention": "varlen", "training__compile": True}],
    ids=["varlen", "flex", "varlen compiled"],
)
def test_kernels_train_like_sdpa(tmp_path: Path, changes: dict[str, Any]) -> None:
    write_documents(tmp_path)
    reference = run_ranks(losses, 1, str(tmp_path), {"attention": "sdpa"})[0]
    other = run_ranks(losses, 1, str(tmp_path), changes)[0]
    np.testing.assert_allclose(other, reference, rtol=2e-2)
    assert reference[-3:].mean() < reference[:3].mean()


def test_a_step_that_does_not_log_never_waits_for_the_device(tmp_path: Path) -> None:
    write_documents(tmp_path)
    assert run_ranks(steps_without_waiting, 1, str(tmp_path)) == [6]
