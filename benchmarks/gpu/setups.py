"""What the rows share: the trainer's own step over synthetic sequences, assembled as `drillyard
train` assembles it."""

from __future__ import annotations

import functools
import math
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from drillyard.config.run import RunConfig
from drillyard.data.mapped_sequences import Batch
from drillyard.data.sampler import Mixture
from drillyard.models.sharding import local_tensor
from drillyard.parallel.ranks import Ranks
from drillyard.training.build import batch_shape
from drillyard.training.model_setup import ShardedModel, build_sharded_model, fill_weights
from drillyard.training.optimizer import ShardedAdamW
from drillyard.training.trainer import StepWindow, Trainer


@dataclass(frozen=True)
class Setting:
    """Where a row runs: `cuda` or `cpu`, `tiny` for smoke-test sizes, and a directory of its own
    for its files."""

    device: str
    tiny: bool
    directory: Path


def small_llama(setting: Setting) -> dict[str, Any]:
    """The inline config of a Llama of two layers."""
    return {
        "architecture": "llama",
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": False,
        **small_sizes(setting),
    }


def small_sizes(setting: Setting) -> dict[str, Any]:
    """Sizes of a small model whose four heads have 64 features; tiny, 16."""
    width = 64 if setting.tiny else 256
    return {"hidden_size": width, "intermediate_size": 2 * width, "vocab_size": 2 * width}


class Tokenizer:
    """As much of a tokenizer as the assembly of a model reads."""

    eos_token_id = bos_token_id = pad_token_id = 0

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size


class SyntheticSequences:
    """Full sequences of random tokens, the same for the same number: a source of the loader's
    `Mixture`.

    Each has `documents` documents of random lengths, 1 included. With one document every token
    carries loss; with several, those of every second document do.
    """

    name = key = "synthetic"
    pad_id = 0

    def __init__(self, count: int, length: int, vocab_size: int, documents: int) -> None:
        self.count, self.sequence_length, self.vocab_size, self.documents = (
            count,
            length,
            vocab_size,
            documents,
        )
        self.valid_tokens = np.array(
            [(self.read([row]).labels >= 0).sum() for row in range(count)], np.int64
        )

    def __len__(self) -> int:
        return self.count

    def read(self, rows: Any) -> Batch:
        """The sequences with these numbers."""
        found = [self._sequence(int(row)) for row in rows]
        return Batch(*(np.stack(arrays) for arrays in zip(*found, strict=True)))

    def _sequence(self, row: int) -> tuple[np.ndarray[Any, Any], ...]:
        generator = np.random.default_rng(row)
        tokens = generator.integers(1, self.vocab_size, self.sequence_length + 1, dtype=np.int64)
        starts = np.zeros(self.sequence_length, bool)
        starts[0] = True
        starts[generator.integers(1, self.sequence_length, self.documents - 1)] = True
        document_ids = np.cumsum(starts, dtype=np.int32) - 1
        begins = np.maximum.accumulate(np.where(starts, np.arange(self.sequence_length), 0))
        labels = np.where(document_ids % 2 == 0, tokens[1:], -100)
        return tokens[:-1], labels, np.arange(self.sequence_length) - begins, document_ids


def run_config(
    setting: Setting,
    model: dict[str, Any],
    *,
    attention: str = "auto",
    sequence_length: int = 256,
    lora: dict[str, Any] | None = None,
    quantization: str | None = None,
    **training: Any,
) -> RunConfig:
    """A run config for `model`, an inline model config; `training` are settings of that section.
    Tiny, sequences have 32 tokens."""
    described = {
        "config": model,
        "init": "random",
        "attention": attention,
        "lora": lora,
        "quantization": quantization,
    }
    return RunConfig.model_validate(
        {
            "name": "benchmark",
            "model": described,
            "data": {
                "source": "builtin:python-stdlib",
                "sequence_length": 32 if setting.tiny else sequence_length,
            },
            "training": {
                "steps": 1000,
                "micro_batch_size": 4,
                "optimizer": {"learning_rate": 1.0e-3},
                "schedule": {"name": "constant"},
                "activation_checkpointing": "none",
                "compile": False,
                "device": setting.device,
                "threads_per_rank": 1 if setting.tiny else None,
            }
            | training,
        }
    )


def assembled(
    config: RunConfig,
    ranks: Ranks,
    *,
    documents: int = 1,
    sequences: int = 8,
    seed_by_name: bool = False,
) -> tuple[Trainer, ShardedModel]:
    """A trainer of `config` over `sequences` synthetic sequences, which repeat.

    `seed_by_name` fills weights that are equal on every kind of device.
    """
    assert config.model.config is not None
    vocab_size = config.model.config["vocab_size"]
    tokenizer: Any = Tokenizer(vocab_size)
    source: Any = SyntheticSequences(sequences, config.data.sequence_length, vocab_size, documents)
    model = build_sharded_model(config, tokenizer, ranks)
    fill_weights(config, model)
    if seed_by_name:
        _fill_by_name(model)
    training = config.training
    optimizer = ShardedAdamW(model.root, training.optimizer, training.gradient_clipping, ranks)
    assert training.steps is not None
    shape = batch_shape(config, ranks.num_data_ranks)
    trainer = Trainer(
        config, ranks, model, optimizer, Mixture([source], [1.0], 0), shape, training.steps
    )
    return trainer, model


@torch.no_grad()
def _fill_by_name(model: ShardedModel) -> None:
    """Normal draws on the host, seeded by name, for every matrix: torch draws differ between kinds
    of device."""
    for name, parameter in model.root.named_parameters():
        if parameter.ndim >= 2:
            draws = np.random.default_rng(zlib.crc32(name.encode())).normal(
                0.0, 0.02, tuple(parameter.shape)
            )
            local_tensor(parameter).copy_(torch.from_numpy(draws))


def losses_and_norms(trainer: Trainer, steps: int) -> np.ndarray[Any, Any]:
    """Losses and gradient norms of steps 0 to `steps`: [steps, 2]."""
    pairs = [trainer.train_step(step, StepWindow(0.0)) for step in range(steps)]
    return np.array([[loss.item(), norm.item()] for loss, norm in pairs])


def compile_quickly(setting: Setting) -> None:
    """In tiny rows blocks are traced and not translated: a graph takes a second instead of half a
    minute."""
    if setting.tiny:
        torch.compile = functools.partial(torch.compile, backend="eager")


def largest_deviation(found: np.ndarray[Any, Any], reference: np.ndarray[Any, Any]) -> float:
    """The largest relative difference; infinite where something is not finite."""
    difference = float(np.max(np.abs(found / reference - 1)))
    return difference if math.isfinite(difference) else math.inf
