"""bf16 training keeps fp32 masters and fp32 reductions, and two ranks train as one does, within the spread of seeds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.distributed.ranks import run_ranks
from tests.distributed.training_case import build, make_config, run_steps, write_documents

STEPS = 200
LAST = 20


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


def dtypes(directory: str) -> dict[str, Any]:
    """What precision everything has in one step under bf16."""
    trainer, model = build(bf16_config(directory, 0))
    seen: dict[str, Any] = {"reduced": set(), "computed": set()}

    def watch(function: Any) -> Any:
        def watched(*args: Any, **kwargs: Any) -> Any:
            seen["reduced"].add(str(kwargs["input"].dtype))
            return function(*args, **kwargs)

        return watched

    for module in model.causal_lm.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(lambda module, _, output: seen["computed"].add(str(output.dtype)))
    with pytest.MonkeyPatch.context() as patch:
        # The name that FSDP2 calls changed between versions of torch.
        for name in ("reduce_scatter_tensor", "reduce_scatter_single"):
            if hasattr(dist, name):
                patch.setattr(dist, name, watch(getattr(dist, name)))
        run_steps(trainer, 0, 1)
    seen["masters"] = {str(shard.local.dtype) for shard in trainer.optimizer.shards}
    states = [trainer.optimizer.optimizer.state[shard.local] for shard in trainer.optimizer.shards]
    seen["moments"] = {str(state[name].dtype) for state in states for name in ("exp_avg", "exp_avg_sq")}
    return seen


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


def test_masters_moments_and_reductions_are_fp32(directory: str) -> None:
    for seen in run_ranks(dtypes, 2, directory):
        assert seen["masters"] == seen["moments"] == {"torch.float32"}
        assert seen["reduced"] == {"torch.float32"}
        assert seen["computed"] == {"torch.bfloat16"}
