"""The part of a step in which memory ran out is read off the error's stack: torch's own error,
raised in each part of a real step, with FSDP2 and without."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from tests.distributed.ranks import run_ranks
from tests.distributed.training_case import build, make_config, write_documents
from torch import nn
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

from drillyard.data.sampler import Mixture
from drillyard.errors import UserError
from drillyard.models import loss
from drillyard.models.architectures import blocks
from drillyard.parallel.whole_weights import WholeWeights
from drillyard.training.optimizer import ClippingAdamW
from drillyard.training.out_of_memory import explained_out_of_memory
from drillyard.training.trainer import StepWindow

FUNCTIONS: dict[str, tuple[str, Any, str]] = {
    "read": ("data", Mixture, "read_step"),
    "loss": ("loss", loss, "loss_and_gradient"),
    "gather": ("gather and reduce", _fsdp_param_group, "foreach_all_gather"),
    "reduce": ("gather and reduce", _fsdp_param_group, "foreach_reduce"),
    "cast": ("gather and reduce", WholeWeights, "use"),
    "update": ("optimizer", ClippingAdamW, "step"),
}
"""By a name for the place: its part, and the function that fails."""


def run_out(*unused: Any, **options: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def fail_in_recomputation(module: nn.Module, inputs: tuple[torch.Tensor]) -> None:
    """Of the calls of a block's part, the second is in backward."""
    vars(module)["calls"] = vars(module).get("calls", 0) + 1
    if vars(module)["calls"] == 2:
        run_out()


def messages(directory: str, places: list[str]) -> dict[str, str]:
    """By place, what is said of a step that ran out of memory there."""
    return {place: message(Path(directory), place) for place in places}


def message(directory: Path, place: str) -> str:
    mode = "full" if place == "recomputation" else "none"
    trainer, model = build(
        make_config(
            directory,
            training__precision="bf16",
            training__activation_checkpointing=mode,
            training__global_batch_size=2,
        )
    )
    block: Any = blocks(model.causal_lm)[-1]
    with contextlib.ExitStack() as stack:
        if place == "forward":
            block.mlp.register_forward_pre_hook(run_out)
        elif place == "backward":
            block.mlp.register_full_backward_pre_hook(run_out)
        elif place == "recomputation":
            block.mlp.register_forward_pre_hook(fail_in_recomputation)
        else:
            _, owner, name = FUNCTIONS[place]
            stack.enter_context(mock.patch.object(owner, name, run_out))
        raised = stack.enter_context(pytest.raises(UserError))
        stack.enter_context(explained_out_of_memory(model, trainer.ranks))
        trainer.train_step(0, StepWindow(0.0))
    assert isinstance(raised.value.__cause__, torch.OutOfMemoryError)
    return str(raised.value)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_part_of_a_step_that_ran_out_of_memory_is_named(tmp_path: Path, ranks: int) -> None:
    write_documents(tmp_path)
    skipped = ("gather", "reduce") if ranks == 1 else ("cast",)
    expected = {place: part for place, (part, *_) in FUNCTIONS.items() if place not in skipped}
    expected |= {"forward": "forward", "backward": "backward", "recomputation": "backward"}
    found = run_ranks(messages, ranks, str(tmp_path), list(expected))[0]
    for place, part in expected.items():
        assert f"in the part `{part}`" in found[place], place
        assert "Tried to allocate 2.00 GiB" in found[place] and "predicted:" in found[place]
