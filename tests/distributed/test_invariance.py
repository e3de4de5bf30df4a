"""Gradient accumulation and the number of ranks do not change the training, and planted faults in
either are seen.

The reference is one process that sees the whole global batch at once. Against it: accumulation 4x1,
2 and 4 ranks under FSDP2, HSDP 2x2 and accumulation on 2 ranks. Valid tokens are uneven, clipping
is active, and the loss must really fall, since a model that does not move proves nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.distributed.ranks import run_ranks
from tests.distributed.training_case import (
    build,
    losses_and_norms,
    make_config,
    run_steps,
    write_documents,
)

from drillyard.training.trainer import Trainer

TOLERANCE = {"fp64": (1e-12, 1e-12), "fp32": (1e-5, 1e-4)}
FAULTS = ("own-tokens", "mean-of-means", "no-synchronisation")


def in_both_precisions(function: Any, directory: str) -> dict[str, dict[str, np.ndarray]]:
    return {precision: function(directory, precision) for precision in TOLERANCE}


def one_process(directory: str, precision: str) -> dict[str, np.ndarray]:
    folder = Path(directory)
    whole = {"training__micro_batch_size": 4, "training__precision": precision}
    return {
        "1 rank x 4": losses_and_norms(make_config(folder, **whole)),
        "4 x 1 rank": losses_and_norms(make_config(folder, training__precision=precision)),
    }


def two_ranks(directory: str, precision: str) -> dict[str, np.ndarray]:
    folder = Path(directory)
    results = {
        "2 ranks x 2": losses_and_norms(
            make_config(folder, training__micro_batch_size=2, training__precision=precision)
        ),
        "2 x 2 ranks x 1": losses_and_norms(make_config(folder, training__precision=precision)),
        "2 x 2 ranks, sharded sums": always_synchronised(
            make_config(folder, training__precision=precision)
        ),
    }
    if precision == "fp64":
        results |= {fault: with_fault(make_config(folder), fault) for fault in FAULTS[:2]}
        # Two replicas of one shard each: without the all-reduce each rank trains on its own
        # gradients.
        results["no-synchronisation"] = with_fault(
            make_config(folder, parallelism__replicate=2), "no-synchronisation"
        )
    return results


def four_ranks(directory: str, precision: str) -> dict[str, np.ndarray]:
    folder = Path(directory)
    return {
        "4 ranks": losses_and_norms(make_config(folder, training__precision=precision)),
        "HSDP 2x2": losses_and_norms(
            make_config(folder, parallelism__replicate=2, training__precision=precision)
        ),
    }


def always_synchronised(config: Any) -> np.ndarray:
    """Reduce gradients after every micro-batch, as is done where whole gradients do not fit."""
    trainer, _ = build(config)
    trainer.accumulate_locally = False
    return run_steps(trainer, 0, trainer.total_steps)


class TokensOfRank:
    """A mixture that counts valid tokens wrongly, in the two ways trainers are known to."""

    def __init__(self, trainer: Trainer, fault: str) -> None:
        self.inner, self.trainer, self.fault = trainer.data, trainer, fault

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def valid_tokens(self, references: Any) -> int:
        ranks, shape = self.trainer.ranks, self.trainer.shape
        if self.fault == "own-tokens":
            own = [
                r
                for i, r in enumerate(references)
                if i // shape.micro_batch_size % ranks.world_size == ranks.rank
            ]
            return self.inner.valid_tokens(own) * ranks.world_size
        return self.inner.valid_tokens(references)


def only_scalars(all_reduce: Any) -> Any:
    """An all-reduce that leaves gradients alone: loss and norm are still summed, as by a trainer
    that forgot them."""

    def reduce(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return all_reduce(tensor, *args, **kwargs) if tensor.numel() <= 2 else None

    return reduce


def with_fault(config: Any, fault: str) -> np.ndarray:
    trainer, model = build(config)
    if fault == "own-tokens":
        trainer.data = TokensOfRank(trainer, fault)  # type: ignore[assignment]
    if fault == "mean-of-means":
        forward = model.root.forward

        def mean_of_micro_batch(*args: Any, **inputs: Any) -> torch.Tensor:
            valid = (inputs["targets_R"] != -100).sum().clamp(min=1)
            step_tokens = 1.0 * trainer.shape.accumulation * trainer.ranks.world_size
            return forward(*args, **inputs) / valid * current["valid"] / step_tokens

        current = {"valid": 1}
        inner = trainer.data.valid_tokens

        def remember(references: Any) -> int:
            current["valid"] = inner(references)
            return current["valid"]

        trainer.data.valid_tokens = remember  # type: ignore[method-assign]
        model.root.forward = mean_of_micro_batch  # type: ignore[method-assign]
    if fault == "no-synchronisation":
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "all_reduce", only_scalars(dist.all_reduce))
            return run_steps(trainer, 0, trainer.total_steps)
    return run_steps(trainer, 0, trainer.total_steps)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("invariance")
    write_documents(folder)
    return str(folder)


@pytest.fixture(scope="module")
def results(directory: str) -> dict[str, dict[str, np.ndarray]]:
    found: dict[str, dict[str, np.ndarray]] = {precision: {} for precision in TOLERANCE}
    for function, size in ((one_process, 1), (two_ranks, 2), (four_ranks, 4)):
        for precision, rows in run_ranks(in_both_precisions, size, function, directory)[0].items():
            found[precision] |= rows
    return found


def worst(reference: np.ndarray, other: np.ndarray) -> tuple[float, float]:
    difference = np.abs(other - reference) / np.abs(reference)
    return tuple(difference.max(axis=0))  # type: ignore[return-value]


@pytest.mark.parametrize("precision", TOLERANCE)
def test_layouts_train_alike(results: dict[str, dict[str, np.ndarray]], precision: str) -> None:
    reference = results[precision]["1 rank x 4"]
    for name, rows in results[precision].items():
        if name in FAULTS:
            continue
        loss, norm = worst(reference, rows)
        assert loss <= TOLERANCE[precision][0], (name, loss)
        assert norm <= TOLERANCE[precision][1], (name, norm)


def test_the_case_is_worth_its_name(results: dict[str, dict[str, np.ndarray]]) -> None:
    rows = results["fp64"]["1 rank x 4"]
    assert len(rows) == 20
    assert rows[-4:, 0].mean() < 0.95 * rows[:4, 0].mean(), "the loss does not fall"
    assert (rows[:, 1] > 0.5).any(), "clipping was never active"


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_seen(results: dict[str, dict[str, np.ndarray]], fault: str) -> None:
    loss, norm = worst(results["fp64"]["1 rank x 4"], results["fp64"][fault])
    assert loss > 1e-5 or norm > 1e-4, (loss, norm)
