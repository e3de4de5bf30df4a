"""Runs with products in fp8: a loss near that of bf16, and a resume that gives the same bits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.distributed.adapter_case import adapter_config, write_base
from tests.distributed.ranks import run_ranks
from tests.distributed.training_case import (
    LLAMA,
    build,
    make_config,
    resume_from,
    run_steps,
    start_save,
    write_documents,
)

from drillyard.estimation.memory import memory_estimate
from drillyard.models.export import export
from drillyard.training import model_setup
from drillyard.training.model_setup import fill_frozen_weights
from drillyard.training.numerics import numerics

STEPS, SAVED = 8, 4
LONG = 200


def run(directory: str, precision: str, scaling: str | None, resumed: bool) -> np.ndarray:
    config = make_config(
        Path(directory),
        training__precision=precision,
        training__fp8_scaling=scaling,
        training__steps=STEPS,
    )
    trainer, model = build(config, filled=not resumed)
    assert model.left_in_bf16 == []
    assert ("torchao" in numerics(config, trainer.ranks, model)["conditions"]) == (
        precision == "fp8"
    )
    folder = f"{directory}/checkpoints-{scaling}"
    if resumed:
        assert resume_from(trainer, folder) == SAVED
        return run_steps(trainer, SAVED, STEPS)
    rows = run_steps(trainer, 0, SAVED)
    start_save(trainer, SAVED, folder).close()
    return np.concatenate([rows, run_steps(trainer, SAVED, STEPS)])


def long_run(directory: str, precision: str) -> np.ndarray:
    """The losses of LONG steps of the demo's model (4 blocks of 64), on fewer tokens a step."""
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
    }
    config = make_config(
        Path(directory),
        model={"config": LLAMA | sizes, "init": "random"},
        training__precision=precision,
        training__steps=LONG,
        training__micro_batch_size=4,
        training__optimizer={"learning_rate": 2.0e-3},
    )
    trainer, _ = build(config)
    return run_steps(trainer, 0, LONG)[:, 0]


def test_a_resume_gives_the_same_bits(tmp_path: Path) -> None:
    write_documents(tmp_path)
    for scaling in ("tensorwise", "rowwise"):
        whole = run_ranks(run, 2, str(tmp_path), "fp8", scaling, False)[0]
        again = run_ranks(run, 2, str(tmp_path), "fp8", scaling, True)[0]
        assert np.array_equal(whole[SAVED:], again)
    exact = run_ranks(run, 2, str(tmp_path), "bf16", None, False)[0]
    assert not np.array_equal(exact, whole)
    np.testing.assert_allclose(whole[:, 0], exact[:, 0], rtol=0.02)


def test_200_steps_end_within_two_per_cent_of_bf16(tmp_path: Path) -> None:
    write_documents(tmp_path)
    exact, near = (run_ranks(long_run, 1, str(tmp_path), each)[0] for each in ("bf16", "fp8"))
    assert exact[-40:].mean() < 0.7 * exact[0]
    np.testing.assert_allclose(near[-40:].mean(), exact[-40:].mean(), rtol=0.02)


def with_adapters(
    directory: str, stored: bool, scaling: str
) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """Losses and norms of adapters on a frozen model, those after a resume, and the bytes of the
    frozen model: what there is, and what was estimated; those in fp8."""
    changes = {"training__precision": "fp8", "training__steps": STEPS}
    changes |= {"training__fp8_scaling": scaling}
    config = adapter_config(Path(directory), **changes)
    if not stored:
        model_setup.keep_frozen_weights = lambda model: None
    trainer, model = build(config)
    assert model.stores_fp8
    rows = run_steps(trainer, 0, SAVED)
    start_save(trainer, SAVED, f"{directory}/checkpoints-{stored}").close()
    rows = np.concatenate([rows, run_steps(trainer, SAVED, STEPS)])
    frozen = [each for each in model.causal_lm.parameters() if not each.requires_grad]
    frozen += [each for name, each in model.causal_lm.named_buffers() if name.endswith("d_weight")]
    stored_as = [getattr(each, "_data", each) for each in frozen]
    in_fp8 = sum(each.nbytes for each in stored_as if each.itemsize == 1)
    there = sum(each.nbytes for each in stored_as)
    adapters = sum(shard.local.nbytes for shard in trainer.optimizer.shards)
    estimated = memory_estimate(model.resolved.setup).state_bytes["parameters"] - adapters
    again, other = build(config, filled=False)
    fill_frozen_weights(config, other)
    assert resume_from(again, f"{directory}/checkpoints-{stored}") == SAVED
    resumed = run_steps(again, SAVED, STEPS)
    export(other.causal_lm, Path(directory) / f"final-{stored}", adapters="alone")
    return rows, resumed, [there, estimated, in_fp8]


@pytest.mark.parametrize(
    ("ranks", "scaling"), [(1, "tensorwise"), (2, "tensorwise"), (2, "rowwise")]
)
def test_frozen_weights_rest_in_fp8_to_the_same_bits(
    tmp_path: Path, ranks: int, scaling: str
) -> None:
    write_base(tmp_path, LLAMA, torch.bfloat16)
    rows, resumed, (there, estimated, in_fp8) = run_ranks(
        with_adapters, ranks, str(tmp_path), True, scaling
    )[0]
    assert np.array_equal(rows[SAVED:], resumed)
    assert there == estimated and in_fp8 > 0.3 * there
    cast_each_time, _, (_, _, none) = run_ranks(
        with_adapters, ranks, str(tmp_path), False, scaling
    )[0]
    assert none == 0 and np.array_equal(rows, cast_each_time)
    files = [next((tmp_path / f"final-{each}").glob("*.safetensors")) for each in (True, False)]
    assert files[0].read_bytes() == files[1].read_bytes()
