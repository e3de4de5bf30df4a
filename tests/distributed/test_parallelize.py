"""What is applied to a model changes speed and memory, not training; evaluation leaves the fp32
masters in place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.distributed.ranks import run_ranks
from tests.distributed.training_case import build, make_config, run_steps, write_documents
from torch.distributed.tensor import DTensor

from drillyard.evaluation.generate import generate
from drillyard.evaluation.held_out_loss import evaluate_loss
from drillyard.models import attention
from drillyard.training import model_setup

STEPS = 4
TWO_KINDS_OF_LAYERS = {
    "architecture": "gemma3_text",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}


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
    # Prompts of several lengths: generation must not compile again for each.
    texts = generate(
        model.root,
        [[5] * length for length in range(2, 14)],
        trainer.ranks,
        end_tokens=[0],
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
    config = make_config(
        Path(directory), training__precision="bf16", data__held_out={"fraction": 0.2}
    )
    trainer, model = build(config)
    run_steps(trainer, 0, 2)
    before = {shard.name: shard.local.clone() for shard in trainer.optimizer.shards}
    (sequences,) = trainer.data.sources
    options = {"attention": model.attention, "batch_size": 3, "limit": 7, "chunk_tokens": None}
    result = evaluate_loss(model.root, sequences, trainer.ranks, **options)
    generate(model.root, [[5, 6, 7]], trainer.ranks, end_tokens=[0], max_new_tokens=4, batch_size=2)
    parameters = dict(model.root.named_parameters())
    return {
        "sharded": all(isinstance(parameter, DTensor) for parameter in parameters.values()),
        "dtypes": {str(parameter.dtype) for parameter in parameters.values()},
        "unchanged": all(
            torch.equal(before[shard.name], shard.local) for shard in trainer.optimizer.shards
        ),
        "in training mode": model.root.training,
        "result": (result["loss"], result["tokens"], result["sequences"]),
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
    # Seven sequences for two ranks of three: in the second round one rank has none, and adds
    # nothing.
    assert one["result"][1:] == (one["tokens with loss"], 7)


def attention_by_offsets(q, k, v, cu_q, cu_k, max_q, max_k, *, scale, window_size, **options):  # type: ignore[no-untyped-def]
    """What flash attention over documents computes, on a CPU."""
    position_T = torch.arange(q.shape[0])
    document_T = torch.searchsorted(cu_q, position_T.int(), right=True)
    behind_TT = position_T[:, None] - position_T
    mask_TT = (document_T[:, None] == document_T) & (behind_TT >= 0)
    if window_size[0] >= 0:
        mask_TT = mask_TT & (behind_TT <= window_size[0])
    q, k, v = (states.transpose(0, 1)[None] for states in (q, k, v))
    output = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, mask_TT, scale=scale, enable_gqa=True
    )
    return output[0].transpose(0, 1)


def graphs_and_losses(directory: str, compiled: bool) -> tuple[int, list[float]]:
    """Steps and evaluations with offsets of many sizes; the graphs that torch made for them."""
    attention.varlen.varlen_attn = attention_by_offsets
    attention.SMALLEST_OFFSETS = 2
    model_setup.attention_kernel = lambda config, device: "varlen"
    compile_with_inductor = torch.compile
    torch.compile = lambda function, **options: compile_with_inductor(
        function, backend="eager", **options
    )
    config = make_config(
        Path(directory),
        model={"config": TWO_KINDS_OF_LAYERS, "init": "random"},
        training__compile=compiled,
        training__precision="fp32",
        training__micro_batch_size=4,
        data__held_out={"fraction": 0.2},
    )
    trainer, model = build(config)
    (sequences,) = trainer.data.sources
    found = []
    for step, count in ((0, 1), (3, 2), (6, 7), (9, 11)):
        found += run_steps(trainer, step, step + 3)[:, 0].tolist()
        options = {
            "attention": model.attention,
            "batch_size": 3,
            "limit": count,
            "chunk_tokens": None,
        }
        found.append(evaluate_loss(model.root, sequences, trainer.ranks, **options)["loss"])
    return torch._dynamo.utils.counters["stats"]["unique_graphs"], found


def test_compiled_blocks_have_a_graph_per_kind_of_layer_with_gradients_and_without(
    tmp_path: Path,
) -> None:
    write_documents(tmp_path)
    graphs, losses = run_ranks(graphs_and_losses, 1, str(tmp_path), True)[0]
    _, reference = run_ranks(graphs_and_losses, 1, str(tmp_path), False)[0]
    np.testing.assert_allclose(losses, reference, rtol=1e-5)
    assert graphs == 4
