"""bf16: fp32 masters and reductions, also after a resume; two ranks train as one within the spread
of seeds."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.distributed.ranks import run_ranks
from tests.distributed.training_case import (
    build,
    make_config,
    resume_from,
    run_steps,
    start_save,
    write_documents,
)

from drillyard.training.model_setup import ShardedModel
from drillyard.training.trainer import Trainer

STEPS = 200
LAST = 20
LAYOUTS = {"sharded": 1, "replicated": 2}


def bf16_config(directory: str, seed: int) -> Any:
    return make_config(
        Path(directory),
        training__precision="bf16",
        training__steps=STEPS,
        training__seed=seed,
        training__micro_batch_size=4 // dist.get_world_size(),
    )


def curves(directory: str, seeds: list[int]) -> list[np.ndarray]:
    found = []
    for seed in seeds:
        trainer, _ = build(bf16_config(directory, seed))
        found.append(run_steps(trainer, 0, STEPS)[:, 0])
    return found


def watched_step(trainer: Trainer, model: ShardedModel, step: int) -> dict[str, Any]:
    """One step, and in what precision everything was: masters, moments, what collectives got, what
    layers computed."""
    seen: dict[str, Any] = {"reduced": set(), "computed": set()}

    def watch(function: Any, position: str) -> Any:
        def watched(*args: Any, **kwargs: Any) -> Any:
            tensor = kwargs[position] if position in kwargs else args[0]
            # Loss and norm, two numbers in fp64, are summed besides the gradients.
            if tensor.numel() > 2:
                seen["reduced"].add(str(tensor.dtype))
            return function(*args, **kwargs)

        return watched

    hooks = [
        module.register_forward_hook(
            lambda module, _, output: seen["computed"].add(str(output.dtype))
        )
        for module in model.causal_lm.modules()
        if isinstance(module, torch.nn.Linear)
    ]
    with pytest.MonkeyPatch.context() as patch:
        # The name that FSDP2 calls changed between versions of torch.
        for name, position in (
            ("reduce_scatter_tensor", "input"),
            ("reduce_scatter_single", "input"),
            ("all_reduce", "tensor"),
        ):
            if hasattr(dist, name):
                patch.setattr(dist, name, watch(getattr(dist, name), position))
        seen["rows"] = run_steps(trainer, step, step + 1)
    for hook in hooks:
        hook.remove()
    seen["masters"] = {str(shard.local.dtype) for shard in trainer.optimizer.shards}
    states = [trainer.optimizer.optimizer.state[shard.local] for shard in trainer.optimizer.shards]
    seen["moments"] = {
        str(state[name].dtype) for state in states for name in ("exp_avg", "exp_avg_sq")
    }
    return seen


def master_values(trainer: Trainer) -> list[torch.Tensor]:
    """This rank's weights and moments."""
    state = trainer.optimizer.optimizer.state
    return [
        tensor.clone()
        for shard in trainer.optimizer.shards
        for tensor in (shard.local, state[shard.local]["exp_avg"], state[shard.local]["exp_avg_sq"])
    ]


def in_both_layouts(function: Any, directory: str, folder: str) -> dict[str, dict[str, Any]]:
    return {
        name: function(directory, f"{folder}/{name}", replicate)
        for name, replicate in LAYOUTS.items()
    }


def save_under_bf16(directory: str, folder: str, replicate: int) -> dict[str, Any]:
    """Steps 0 and 1, a save, and step 2 watched."""
    trainer, model = build(short_bf16_config(directory, replicate))
    run_steps(trainer, 0, 2)
    checkpointer = start_save(trainer, 2, folder)
    values = master_values(trainer)
    checkpointer.close()
    return {"values": values, **watched_step(trainer, model, 2)}


def resume_under_bf16(directory: str, folder: str, replicate: int) -> dict[str, Any]:
    """Step 2 from the checkpoint, in new ranks, watched."""
    trainer, model = build(short_bf16_config(directory, replicate), filled=False)
    assert resume_from(trainer, folder) == 2
    values = master_values(trainer)
    return {"values": values, **watched_step(trainer, model, 2)}


def short_bf16_config(directory: str, replicate: int) -> Any:
    """Two micro-batches a step on two ranks, under FSDP2 or with a copy of the model on each."""
    return make_config(
        Path(directory), training__precision="bf16", parallelism__replicate=replicate
    )


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("precision")
    write_documents(folder)
    return str(folder)


def test_two_ranks_train_as_one_within_the_spread_of_seeds(directory: str) -> None:
    one = run_ranks(curves, 1, directory, [0, 1, 2])[0]
    two = run_ranks(curves, 2, directory, [0])[0][0]
    ends = [curve[-LAST:].mean() for curve in one]
    spread = max(ends) - min(ends)
    assert abs(two[-LAST:].mean() - ends[0]) <= spread
    assert two[-LAST:].mean() < 0.7 * two[:LAST].mean(), "the loss does not fall"


def test_masters_moments_and_reductions_are_fp32_before_and_after_a_resume(
    directory: str, tmp_path: Path
) -> None:
    undisturbed = run_ranks(in_both_layouts, 2, save_under_bf16, directory, str(tmp_path))
    resumed = run_ranks(in_both_layouts, 2, resume_under_bf16, directory, str(tmp_path))
    for rank, layout in itertools.product(range(2), LAYOUTS):
        before, after = undisturbed[rank][layout], resumed[rank][layout]
        for seen in (before, after):
            assert seen["masters"] == seen["moments"] == {"torch.float32"}
            assert seen["reduced"] == {"torch.float32"}
            assert seen["computed"] == {"torch.bfloat16"}
        for saved, loaded in zip(before["values"], after["values"], strict=True):
            assert torch.equal(saved, loaded)
        # Weights and moments that passed through bf16 somewhere would have lost these digits.
        weights, moments = after["values"][::3], after["values"][1::3]
        assert any((value.bfloat16().float() != value).any() for value in weights)
        assert any((value.bfloat16().float() != value).any() for value in moments)
        assert before["rows"].tobytes() == after["rows"].tobytes()
