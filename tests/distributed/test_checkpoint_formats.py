"""A checkpoint of every earlier format is loaded by the real loader into a real, sharded model and
its optimizer.

`checkpoint_formats/format-N` was written once, by `save_tiny` on two ranks when N was the current
format, and is never written again; a new format adds a directory. Its values follow from
`value_of`, so a number that ends up in another place, or in another tensor, shows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.distributed.ranks import run_ranks
from tests.distributed.training_case import full_parameters
from transformers import LlamaConfig, LlamaForCausalLM

from drillyard.config.run import OptimizerConfig, ParallelismConfig, TrainingConfig
from drillyard.models.architectures import blocks
from drillyard.models.loss import LanguageModelLoss
from drillyard.models.random_init import init_buffers
from drillyard.models.sharding import local_tensor
from drillyard.parallel.parallelize import parallelize_model
from drillyard.parallel.ranks import Ranks, start_ranks
from drillyard.training.checkpoint.checkpointer import Checkpointer
from drillyard.training.checkpoint.inventory import list_checkpoints
from drillyard.training.checkpoint.manifest import FORMAT_VERSION
from drillyard.training.checkpoint.verification import verify
from drillyard.training.model_setup import materialise
from drillyard.training.optimizer import ShardedAdamW
from drillyard.training.resume import checkpoint_state, finish_load

FORMATS = Path(__file__).parent / "checkpoint_formats"
STEP = 10


def value_of(key: str, shape: torch.Size) -> torch.Tensor:
    """Numbers that no other key has: k + 1/1, k + 1/2, k + 1/3, ... with k from the name."""
    count = torch.Size(shape).numel()
    return (sum(key.encode()) + 1.0 / torch.arange(1, count + 1, dtype=torch.float32)).reshape(
        shape
    )


def tiny() -> tuple[LanguageModelLoss, ShardedAdamW, Ranks]:
    """A sharded Llama of some hundred parameters with its optimizer, filled with other numbers than
    `value_of`'s."""
    training = TrainingConfig.model_validate(
        {
            "steps": 20,
            "optimizer": {"learning_rate": 1e-3},
            "precision": "fp32",
            "device": "cpu",
            "compile": False,
            "activation_checkpointing": "none",
            "threads_per_rank": 1,
        }
    )
    ranks = start_ranks(training, ParallelismConfig())
    with torch.device("meta"):
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=16,
                hidden_size=8,
                intermediate_size=8,
                num_hidden_layers=1,
                num_attention_heads=2,
                num_key_value_heads=1,
                tie_word_embeddings=False,
            )
        )
    root = LanguageModelLoss(model)
    parallelize_model(root, blocks(model), ranks, training, keep_unsharded=True)
    root.to_empty(device=ranks.device)
    init_buffers(model)
    materialise(root)
    with torch.no_grad():
        for parameter in root.parameters():
            parameter.fill_(-1.0)
    return root, ShardedAdamW(root, OptimizerConfig(learning_rate=1e-3), 1.0, ranks), ranks


def checkpointer_of(run: Path) -> Checkpointer:
    settings: dict[str, Any] = {
        "keep": 1,
        "keep_best": False,
        "asynchronous": False,
        "identity": {"name": "tiny"},
    }
    return Checkpointer(run / "checkpoints", **settings, on_event=lambda *_, **__: None)


def save_tiny(run: Path) -> None:
    """Write the checkpoint of the current format; what a new format's directory is made with."""
    _, optimizer, ranks = tiny()
    state = checkpoint_state(optimizer, ranks)
    for key, tensor in state.items():
        if key.startswith(("model.", "optimizer.exp_avg")):
            full = value_of(key, tensor.shape)
            local_tensor(tensor).copy_(full.chunk(ranks.world_size)[ranks.rank])
    state["optimizer.step"].fill_(float(STEP))
    state["optimizer.skipped"].copy_(torch.tensor([2.0, 1.0, 2.0]))
    state[f"random.{ranks.rank:05d}"] = torch.get_rng_state()
    checkpointer = checkpointer_of(run)
    checkpointer.save(
        STEP, state, metadata={"held_out_loss": 1.25, "world_size": ranks.world_size}, wait=True
    )
    checkpointer.close()


def load_format(version: int) -> dict[str, Any]:
    """Load into the model, its optimizer and the random generators; what is different from what was
    saved."""
    root, optimizer, ranks = tiny()
    checkpointer = checkpointer_of(FORMATS / f"format-{version}")
    loaded = checkpointer.load(checkpoint_state(optimizer, ranks))
    assert loaded is not None and loaded.info.manifest is not None
    finish_load(loaded, 0, optimizer, ranks)
    checkpointer.close()
    wrong, compared = [], 0
    for name, parameter in full_parameters(root).items():
        if not torch.equal(parameter, value_of(f"model.{name}", parameter.shape)):
            wrong.append(name)
        compared += parameter.numel()
    for shard in optimizer.shards:
        kept = optimizer.optimizer.state[shard.local]
        for moment in ("exp_avg", "exp_avg_sq"):
            full = value_of(f"optimizer.{moment}.{shard.name}", shard.parameter.shape)
            if not torch.equal(kept[moment], full.chunk(ranks.world_size)[ranks.rank]):
                wrong.append(f"{moment} of {shard.name}")
        if kept["step"] != STEP:
            wrong.append(f"step count of {shard.name}")
    return {
        "wrong": wrong,
        "compared": compared,
        "skipped": optimizer.skipped.tolist(),
        "step": loaded.step,
        "format_version": loaded.info.manifest.format_version,
        "metadata": (loaded.metadata["held_out_loss"], loaded.metadata["world_size"]),
    }


def load_every_format() -> dict[int, dict[str, Any]]:
    found = {version: load_format(version) for version in range(1, FORMAT_VERSION + 1)}
    dist.barrier()
    return found


def test_every_format_up_to_the_current_one_has_a_stored_checkpoint_whose_bytes_are_as_written() -> (  # noqa: E501
    None
):
    for version in range(1, FORMAT_VERSION + 1):
        (info,) = list_checkpoints(FORMATS / f"format-{version}")
        assert info.manifest is not None and info.manifest.format_version == version
        assert all(file.verdict == "ok" for file in verify(info))


def test_a_checkpoint_of_every_format_fills_model_and_optimizer_with_the_numbers_saved() -> None:
    for rank in run_ranks(load_every_format, 2):
        for version, found in rank.items():
            assert found["wrong"] == [] and found["compared"] > 500
            assert (found["step"], found["format_version"]) == (STEP, version)
            assert found["metadata"] == (1.25, 2)
            assert found["skipped"] == [2.0, 1.0, 1.0]  # `restore` ends a row of skipped steps
