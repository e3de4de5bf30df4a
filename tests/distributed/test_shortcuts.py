"""What a rank that is alone leaves out, each against the way with it, side by side in one test:
losses, gradient norms and weights are equal to the bit with one micro-batch, and to 1e-6 with
several."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from tests.distributed.ranks import run_ranks
from tests.distributed.training_case import LLAMA, build, make_config, run_steps, write_documents
from torch import nn
from torch.distributed.tensor import DTensor

from drillyard.estimation.memory.fsdp import REWRITTEN_IN
from drillyard.estimation.setup import installed_torch
from drillyard.models import loss
from drillyard.parallel import parallelize
from drillyard.training import optimizer
from drillyard.training import trainer as trainers

STEPS = 4
WITHOUT: dict[str, tuple[Any, str, Any]] = {
    "narrow gradients": (trainers, "expect_one_micro_batch", lambda *_: None),
    "summed head gradient": (loss, "summed_gradient", lambda model: None),
    "weights kept whole": (parallelize, "holds_whole", lambda *_, **__: False),
}
"""Function that decides on each shortcut, and what leaves it out."""
SHORTCUTS = [name for name in WITHOUT if name != "weights kept whole"]
if installed_torch() >= REWRITTEN_IN:  # before, FSDP2 sums the head's gradient in bf16
    SHORTCUTS = [*WITHOUT]


def trained(directory: str, changes: dict[str, Any]) -> tuple[np.ndarray, dict[str, torch.Tensor]]:
    """Losses and norms of some steps, and the weights after them."""
    trainer, model = build(make_config(Path(directory), **changes))
    figures = run_steps(trainer, 0, STEPS)
    weights = {name: unsharded(parameter) for name, parameter in model.root.named_parameters()}
    return figures, weights


def unsharded(parameter: nn.Parameter) -> torch.Tensor:
    """A copy of the whole weight."""
    values = parameter.detach()
    return (values.full_tensor() if isinstance(values, DTensor) else values).clone()


def side_by_side(
    directory: str, changes: dict[str, Any], names: list[str], kernel: bool
) -> tuple[Any, dict[str, Any], list[int]]:
    """What training gives with every shortcut, without each of `names`, and the gradients that
    were wide with all shortcuts, by step."""
    if kernel:
        optimizer._fits_one_pass = lambda *_: True
    wide: list[int] = []
    own = optimizer.total_norm

    def noted(gradients: Any, dtype: torch.dtype) -> torch.Tensor:
        wide.append(sum(each.dtype == dtype for each in gradients))
        return own(gradients, dtype)

    with mock.patch.object(optimizer, "total_norm", noted):
        expected = trained(directory, changes)
    found = {}
    for name in names:
        with mock.patch.object(*WITHOUT[name]):
            found[name] = trained(directory, changes)
    return expected, found, wide


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    made = tmp_path_factory.mktemp("shortcuts")
    write_documents(made)
    return str(made)


ADAMW = {"learning_rate": 4e-3}
PACKED = ADAMW | {"name": "adamw-8bit"}
WIDE_LLAMA = LLAMA | {"hidden_size": 256, "intermediate_size": 512}
TIED_LLAMA = LLAMA | {"tie_word_embeddings": True}


@pytest.mark.parametrize(
    ("config", "settings", "micro_batches"),
    [
        (LLAMA, ADAMW, 1),
        (TIED_LLAMA, ADAMW, 1),
        (WIDE_LLAMA, PACKED, 1),
        (TIED_LLAMA, ADAMW, 3),
    ],
    ids=["adamw", "tied", "adamw-8bit", "micro-batches"],
)
def test_each_shortcut_trains_as_the_way_without_it(
    directory: str, config: dict[str, Any], settings: dict[str, Any], micro_batches: int
) -> None:
    if settings is PACKED:
        pytest.importorskip("torchao")
    (figures, weights), found, wide = run_ranks(
        side_by_side, 1, directory, changed(config, settings, micro_batches), SHORTCUTS, False
    )[0]
    # Of all tensors the head's alone is a sum with one micro-batch.
    assert set(wide) == {len(weights) if micro_batches > 1 else 1}
    most = 0.0 if micro_batches == 1 else 1e-6
    for name, (others, other_weights) in found.items():
        np.testing.assert_allclose(others, figures, rtol=most, atol=0, err_msg=name)
        for key, weight in weights.items():
            torch.testing.assert_close(other_weights[key], weight, rtol=most, atol=most)


def test_the_optimizer_of_gpus_reads_narrow_gradients_to_the_bit(
    directory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its kernel is interpreted; test_one_rank.py has it beside torch's AdamW."""
    pytest.importorskip("triton", reason="comes with builds of torch for GPUs")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    (figures, weights), found, wide = run_ranks(
        side_by_side, 1, directory, changed(LLAMA, ADAMW, 1), ["narrow gradients"], True
    )[0]
    assert set(wide) == {1}
    others, other_weights = found["narrow gradients"]
    assert others.tolist() == figures.tolist()
    assert all(torch.equal(other_weights[key], weight) for key, weight in weights.items())


def changed(config: dict[str, Any], settings: dict[str, Any], micro_batches: int) -> dict[str, Any]:
    return {
        "model__config": config,
        "training__precision": "bf16",
        "training__global_batch_size": micro_batches,
        "training__optimizer": settings,
        "training__loss_chunk_tokens": 4,
    }
