"""What is applied to a model changes speed and memory, not training; evaluation leaves the fp32 masters in place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.distributed.ranks import run_ranks
from tests.distributed.training_case import build, make_config, run_steps, write_documents
from torch.distributed.tensor import DTensor

from drillyard.evaluation.generate import generate
from drillyard.evaluation.loss import evaluate_loss

STEPS = 4


def losses_by_mode(directory: str) -> dict[str, np.ndarray]:
    found = {}
    for mode in ("none", "selective", "full"):
        trainer, _ = build(
            make_config(
                Path(directory),
                training__activation_checkpointing=mode,
                training__precision="fp32",
                training__micro_batch_size=4,
            )
        )
        found[mode] = run_steps(trainer, 0, STEPS)
    trainer, model = build(
        make_config(
            Path(directory),
            training__activation_checkpointing="full",
            training__compile=True,
            training__precision="fp32",
            training__micro_batch_size=4,
        )
    )
    found["full, compiled"] = run_steps(trainer, 0, STEPS)
    # Prompts of several lengths: generation must not compile anew for each.
    texts = generate(
        model.root,
        [[5] * length for length in range(2, 14)],
        trainer.ranks,
        eos_token_id=0,
        pad_token_id=1,
        max_new_tokens=8,
        batch_size=2,
    )
    found["generated"] = np.array([len(texts)])
    return found


def test_recomputing_and_compiling_change_no_training(tmp_path: Path) -> None:
    write_documents(tmp_path)
    found = run_ranks(losses_by_mode, 1, str(tmp_path))[0]
    assert found["selective"].tobytes() == found["none"].tobytes()
    assert found["full"].tobytes() == found["none"].tobytes()
    np.testing.assert_allclose(found["full, compiled"], found["none"], rtol=1e-4)
    assert found["generated"] == [12]


def parameters_after_evaluation(directory: str) -> dict[str, Any]:
    config = make_config(Path(directory), training__precision="bf16", data__held_out={"fraction": 0.2})
    trainer, model = build(config)
    run_steps(trainer, 0, 2)
    before = {shard.name: shard.local.clone() for shard in trainer.optimizer.shards}
    (sequences,) = trainer.data.sources
    options = {"attention": model.attention, "batch_size": 3, "limit": 7, "chunk_tokens": None}
    result = evaluate_loss(model.root, sequences, trainer.ranks, **options)
    generate(model.root, [[5, 6, 7]], trainer.ranks, eos_token_id=0, pad_token_id=1, max_new_tokens=4, batch_size=2)
    parameters = dict(model.root.named_parameters())
    return {
        "sharded": all(isinstance(parameter, DTensor) for parameter in parameters.values()),
        "dtypes": {str(parameter.dtype) for parameter in parameters.values()},
        "unchanged": all(torch.equal(before[shard.name], shard.local) for shard in trainer.optimizer.shards),
        "in training mode": model.root.training,
        "result": (result.loss, result.tokens, result.sequences),
        "tokens with loss": int(sequences.valid_tokens[:7].sum()),
    }


def test_evaluation_and_generation_leave_the_fp32_masters_sharded(tmp_path: Path) -> None:
    write_documents(tmp_path)
    one, two = run_ranks(parameters_after_evaluation, 2, str(tmp_path))
    for facts in (one, two):
        assert facts["sharded"]
        assert facts["dtypes"] == {"torch.float32"}
        assert facts["unchanged"]
        assert facts["in training mode"]
    assert one["result"] == two["result"]
    # Seven sequences for two ranks of three: in the second round one rank has none, and adds nothing.
    assert one["result"][1:] == (one["tokens with loss"], 7)
