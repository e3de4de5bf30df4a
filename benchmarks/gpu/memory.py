"""Predicted memory against `torch.cuda.max_memory_allocated`, for a table of setups of the trainer's own step.

    python benchmarks/gpu/memory.py [--layers 8] [--hidden 2048] [--sequence-length 4096] [--only sdpa]
    torchrun --nproc-per-node 8 benchmarks/gpu/memory.py

Each setup is assembled as `drillyard train` does it (`set_up_model`, `ShardedAdamW`, `Trainer.train_step`) with random
weights and full sequences, and its second and third step are measured. What the allocator holds is compared with the
sum of the terms of the step (the CUDA context and NCCL's buffers are outside of it, fragmentation is beside it); what
it has reserved and what the driver says is in use stand next to the high end of everything. Prints a line per setup,
and JSON Lines on request.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

GIB = 2**30
OUTSIDE_OF_THE_ALLOCATOR = ("CUDA context", "NCCL buffers")
SETTINGS: dict[str, dict[str, Any]] = {
    "sdpa": {"attention": "sdpa"},
    "varlen": {"attention": "varlen"},
    "varlen, full checkpointing": {"attention": "varlen", "activation_checkpointing": "full"},
    "varlen, selective checkpointing": {"attention": "varlen", "activation_checkpointing": "selective"},
    "varlen, compiled": {"attention": "varlen", "compile": True},
    "varlen, compiled, full checkpointing": {
        "attention": "varlen",
        "compile": True,
        "activation_checkpointing": "full",
    },
    "varlen, accumulation": {"attention": "varlen", "gradient_accumulation": 2},
    "sdpa, fp32": {"attention": "sdpa", "precision": "fp32", "micro_batch_size": 1},
    "varlen, wide vocabulary": {"attention": "varlen", "vocab_size": 128256, "activation_checkpointing": "full"},
}


class Tokenizer:
    """As much of a tokenizer as the model's assembly reads."""

    eos_token_id = bos_token_id = pad_token_id = 0

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size


class Sequences:
    """Random tokens, every one of which carries loss, in sequences of one document each."""

    def __init__(self, length: int, vocab_size: int) -> None:
        self.length = length
        self.vocab_size = vocab_size

    def indices(self, step: int, count: int) -> list[int]:
        return list(range(count))

    def valid_tokens(self, references: list[int]) -> int:
        return len(references) * self.length

    def read(self, references: list[int]) -> Any:
        import numpy as np

        from drillyard.data import Batch

        shape = (len(references), self.length)
        tokens = np.random.default_rng(0).integers(0, self.vocab_size, shape, dtype=np.int64)
        positions = np.broadcast_to(np.arange(self.length, dtype=np.int64), shape).copy()
        return Batch(tokens, tokens, positions, np.zeros(shape, np.int32))


def run_config(arguments: argparse.Namespace, changes: dict[str, Any]) -> Any:
    """The run config of one setup; `changes` are those of SETTINGS."""
    from drillyard.config import RunConfig

    chosen = {"micro_batch_size": arguments.micro_batch_size, "vocab_size": 32000, "compile": False} | changes
    model = {
        "architecture": "llama",
        "hidden_size": arguments.hidden,
        "intermediate_size": 4 * arguments.hidden,
        "num_hidden_layers": arguments.layers,
        "num_attention_heads": arguments.hidden // 64,
        "num_key_value_heads": max(1, arguments.hidden // 256),
        "vocab_size": chosen.pop("vocab_size"),
        "max_position_embeddings": arguments.sequence_length,
        "tie_word_embeddings": False,
    }
    return RunConfig.model_validate(
        {
            "name": "memory",
            "model": {"config": model, "init": "random", "attention": chosen.pop("attention")},
            "data": {"source": "builtin:python-stdlib", "sequence_length": arguments.sequence_length},
            "training": {
                "steps": 4,
                "optimizer": {"learning_rate": 1.0e-4},
                "schedule": {"name": "constant"},
                "activation_checkpointing": "none",
                "device": arguments.device,
            }
            | chosen,
        }
    )


def measure(config: Any, ranks: Any) -> dict[str, Any]:
    """Steps of `config` on this rank: predicted and measured GiB."""
    import torch

    from drillyard.estimate.memory import memory_estimate
    from drillyard.models import init_random
    from drillyard.parallel.setup import set_up_model
    from drillyard.training.assemble import batch_shape
    from drillyard.training.optimizer import ShardedAdamW
    from drillyard.training.trainer import StepWindow, Trainer

    vocab_size = config.model.config["vocab_size"]
    tokenizer: Any = Tokenizer(vocab_size)
    data: Any = Sequences(config.data.sequence_length, vocab_size)
    model = set_up_model(config, tokenizer, ranks)
    init_random(model.causal_lm, 0)
    training = config.training
    optimizer = ShardedAdamW(model.root, training.optimizer, training.gradient_clipping, ranks)
    trainer = Trainer(
        config,
        ranks,
        model.root,
        optimizer,
        data,
        batch_shape(config, ranks),
        training.steps,
        attention=model.attention,
        gather_gradients_once=model.small,
    )
    trainer.train_step(0, StepWindow(0.0))
    gc.collect()
    on_gpu = ranks.device.type == "cuda"
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    for step in (1, 2):
        trainer.train_step(step, StepWindow(0.0))
    estimate = memory_estimate(model.resolved.setup)
    row = {"peak_at": estimate.peak_at, **predicted(estimate)}
    if on_gpu:
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        row |= {
            "allocated_gib": torch.cuda.max_memory_allocated() / GIB,
            "reserved_gib": torch.cuda.max_memory_reserved() / GIB,
            "used_gib": (total - free) / GIB,
        }
    return row


def predicted(estimate: Any) -> dict[str, float]:
    """Ends of what the allocator is predicted to hold at the peak, and of everything."""
    left_out = (*OUTSIDE_OF_THE_ALLOCATOR, "allocator fragmentation")
    inside = [part for part in estimate.as_json()["parts"] if part["name"] not in left_out]
    low, high = (sum((part.get(end) or part)["value"] for part in inside) for end in ("low", "high"))
    total = estimate.total
    return {"low_gib": low, "high_gib": high, "total_low_gib": total.low.value, "total_high_gib": total.high.value}


def line(name: str, row: dict[str, Any]) -> str:
    """A row of the table: predicted ends, measured, and how far the measured is outside of them."""
    text = f"{name:40} {row['low_gib']:8.2f} {row['high_gib']:8.2f}"
    if "allocated_gib" not in row:
        return f"{text} {'-':>10} {'-':>8} {'-':>9} {row['total_high_gib']:8.2f} {'-':>7}  {row['peak_at']}"
    allocated = row["allocated_gib"]
    outside = min(0.0, allocated / row["low_gib"] - 1) + max(0.0, allocated / row["high_gib"] - 1)
    return (
        f"{text} {allocated:10.2f} {outside:8.1%} {row['reserved_gib']:9.2f} {row['total_high_gib']:8.2f}"
        f" {row['used_gib']:7.2f}  {row['peak_at']}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--sequence-length", type=int, default=4096)
    parser.add_argument("--micro-batch-size", type=int, default=2)
    parser.add_argument("--only", action="append", choices=list(SETTINGS), help="a setup of the table; may be repeated")
    parser.add_argument(
        "--device", choices=["cuda", "cpu"], default="cuda", help="cpu: predictions only, to try it out"
    )
    parser.add_argument("--json", type=Path, help="write the rows there, one a line")
    arguments = parser.parse_args()

    from drillyard.config.run import ParallelismConfig
    from drillyard.errors import UserError
    from drillyard.parallel.ranks import start_ranks, stop_ranks

    chosen = {name: SETTINGS[name] for name in arguments.only or SETTINGS}
    first = run_config(arguments, next(iter(chosen.values())))
    ranks = start_ranks(first.training, ParallelismConfig())
    talks = ranks.rank == 0
    if talks:
        print(f"{ranks.world_size} ranks on {ranks.device.type}; GiB per rank")
        print(
            f"{'setting':40} {'low':>8} {'high':>8} {'allocated':>10} {'outside':>8} {'reserved':>9} {'all high':>8}"
            f" {'in use':>7}  peak at"
        )
    rows = []
    for name, changes in chosen.items():
        try:
            row = measure(run_config(arguments, changes), ranks)
        except UserError as error:
            row = {"error": str(error)}
        rows.append({"setting": name, "ranks": ranks.world_size, **row})
        if talks:
            print(f"{name:40} {row['error'].splitlines()[0]}" if "error" in row else line(name, row))
        gc.collect()
    if talks and arguments.json:
        arguments.json.write_text("".join(json.dumps(row) + "\n" for row in rows))
    stop_ranks()


if __name__ == "__main__":
    main()
