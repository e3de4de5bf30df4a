"""A small training case for tests of exactness: real config, data, model, sharding and step,
without files of a run.

The data are documents of very different lengths with loss on the completion only, so that ranks and
micro-batches hold different numbers of valid tokens: what a wrong normalisation would show in.
"""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from drillyard.config.run import RunConfig
from drillyard.data.prepared_data import prepare
from drillyard.parallel.ranks import Ranks, start_ranks
from drillyard.training.build import batch_shape
from drillyard.training.checkpoint.checkpointer import Checkpointer
from drillyard.training.model_setup import ShardedModel, build_sharded_model, fill_weights
from drillyard.training.optimizer import ShardedAdamW
from drillyard.training.order_check import order_identity
from drillyard.training.resume import checkpoint_state, resume, seed_rank
from drillyard.training.trainer import StepWindow, Trainer

LLAMA = {
    "architecture": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}


def write_documents(directory: Path, count: int = 240) -> Path:
    """Prompts and completions that a small model can learn something from, of uneven length."""
    generator = random.Random(7)
    words = [
        "alpha",
        "beta",
        "gamma",
        "delta",
        "epsilon",
        "zeta",
        "eta",
        "theta",
        "iota",
        "kappa",
        "lambda",
        "mu",
    ]
    path = directory / "documents.jsonl"
    with path.open("w") as file:
        for number in range(count):
            prompt = " ".join(generator.choices(words, k=generator.randint(2, 16)))
            length = generator.choice([1, 2, 3, 14])
            completion = " ".join((prompt.split() * 9)[:length])
            file.write(
                json.dumps({"prompt": f"{number}: {prompt}", "completion": completion}) + "\n"
            )
    return path


def make_config(directory: Path, **changes: Any) -> RunConfig:
    """A run config over the documents in `directory`; `changes` are dotted settings with __ for the
    dot."""
    settings: dict[str, Any] = {
        "name": "case",
        "output": str(directory / "runs"),
        "model": {"config": dict(LLAMA), "init": "random"},
        "data": {
            "source": str(directory / "documents.jsonl"),
            "format": "prompt-completion",
            "sequence_length": 64,
            "tokenizer": {"train": "bpe", "vocab_size": 320},
            "cache_directory": str(directory / "cache"),
        },
        "training": {
            "steps": 20,
            "micro_batch_size": 1,
            "global_batch_size": 4,
            "precision": "fp64",
            "optimizer": {"learning_rate": 4.0e-3},
            "schedule": {"name": "cosine", "warmup_steps": 3},
            "gradient_clipping": 0.5,
            "activation_checkpointing": "none",
            "compile": False,
            "device": "cpu",
            "threads_per_rank": 1,
        },
    }
    for dotted, value in changes.items():
        *parents, last = dotted.split("__")
        place = settings
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = value
    return RunConfig.model_validate(settings)


def norms_in_fp64(model: nn.Module) -> None:
    """Replace the RMS norms' forward by one that does not pass through fp32, as transformers' does
    in an fp64 model."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = _rms_norm_forward(module)


def _rms_norm_forward(module: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    def forward(hidden: torch.Tensor) -> torch.Tensor:
        scale = torch.rsqrt(hidden.square().mean(-1, keepdim=True) + module.variance_epsilon)
        return module.weight * (hidden * scale)

    return forward


def build(
    config: RunConfig, ranks: Ranks | None = None, *, filled: bool = True
) -> tuple[Trainer, ShardedModel]:
    """A trainer for `config` on the ranks that this process is one of.

    Without `filled` its weights are left to a checkpoint. All that nobody has written to is NaN,
    weights and rotary tables alike.
    """
    ranks = ranks or start_ranks(config.training, config.parallelism)
    with ranks.in_turn() as is_first:
        data = prepare(config, only_open=not is_first)
    with unset_memory_is_nan():
        model = build_sharded_model(config, data.tokenizer, ranks)
    if filled:
        fill_weights(config, model)
    if config.training.precision == "fp64":
        norms_in_fp64(model.causal_lm)
    optimizer = ShardedAdamW(
        model.root, config.training.optimizer, config.training.gradient_clipping, ranks
    )
    shape = batch_shape(config, ranks.num_data_ranks)
    steps_of_epoch = -(-data.train.num_sequences // shape.global_batch_size)
    trainer = Trainer(
        config,
        ranks,
        model,
        optimizer,
        data.train,
        shape,
        config.training.steps or int(config.training.epochs or 0) * steps_of_epoch,
    )
    seed_rank(config.training.seed, 0, ranks)
    return trainer, model


@contextlib.contextmanager
def unset_memory_is_nan() -> Iterator[None]:
    """New memory holds NaN, as torch's deterministic mode does it."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def run_steps(trainer: Trainer, first: int, last: int) -> np.ndarray:
    """Losses and gradient norms before clipping of steps first..last-1: fp64 [steps, 2]."""
    rows = []
    for step in range(first, last):
        loss, norm = trainer.train_step(step, StepWindow(0.0))
        rows.append([loss.item(), norm.item()])
    return np.array(rows)


class SilentLog:
    """Takes events and messages and forgets them."""

    def event(self, name: str, **fields: Any) -> None:
        pass

    def message(self, text: str) -> None:
        pass


def identity_of(trainer: Trainer) -> dict[str, Any]:
    """What a checkpoint must agree with, as the assembled run has it."""
    data, batch = trainer.data, trainer.shape.global_batch_size
    return order_identity(
        trainer.config, data.fingerprint, data.num_sequences, batch, trainer.total_steps
    )


def checkpointer_in(folder: str) -> Checkpointer:
    """A checkpointer of a run directory that nobody else writes to."""
    return Checkpointer(
        Path(folder),
        keep=3,
        keep_best=False,
        asynchronous=True,
        identity={},
        on_event=lambda *args, **fields: None,
    )


def start_save(trainer: Trainer, step: int, folder: str) -> Checkpointer:
    """Begin to save the trainer's state after `step` steps, as a run does; closing the result waits
    for the end."""
    checkpointer = checkpointer_in(folder)
    metadata = {
        **identity_of(trainer),
        "step": step,
        "world_size": trainer.ranks.world_size,
        "device": "cpu",
    }
    checkpointer.save(step, checkpoint_state(trainer.optimizer, trainer.ranks), metadata=metadata)
    return checkpointer


def resume_from(trainer: Trainer, folder: str) -> int:
    """Load the newest checkpoint of `folder` into a trainer, as a run does; returns the number of
    steps it has done."""
    checkpointer = checkpointer_in(folder)
    silent: Any = SilentLog()
    step, _ = resume(
        trainer.config, checkpointer, trainer.optimizer, trainer.ranks, identity_of(trainer), silent
    )
    checkpointer.close()
    return step


def losses_and_norms(config: RunConfig) -> np.ndarray:
    """All steps of `config` from the start: fp64 [steps, 2]."""
    trainer, _ = build(config)
    return run_steps(trainer, 0, trainer.total_steps)


def full_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter gathered whole, by name (collective)."""
    return {
        name: parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        for name, parameter in model.named_parameters()
    }
