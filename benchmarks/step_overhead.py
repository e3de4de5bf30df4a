"""A step of the trainer over a step of a bare FSDP2 loop, in the same ranks, in alternating blocks
of 20 steps.

The trainer logs every step to all its files with signals on; the bare loop (bare_loop.py) gets its
batches ready made. Both train the same architecture with loss on every token, fused AdamW, the same
normalisation and clipping. Printed: the median step of each, the ratio of medians over blocks, and
its 95 % interval by bootstrap over pairs of blocks.

    python benchmarks/step_overhead.py [--blocks 15] [--hidden 256] [--layers 4] [--sequence-length
    128]
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.bare_loop import BareLoop
from benchmarks.workload import llama_run
from tests.distributed.ranks import run_ranks

from drillyard.config.run import RunConfig
from drillyard.data.prepared_data import prepare
from drillyard.data.sampler import BatchShape
from drillyard.models.architectures import blocks
from drillyard.models.attention import packed_attention_inputs
from drillyard.models.meta_model import build_model
from drillyard.models.random_init import init_random
from drillyard.parallel.ranks import start_ranks
from drillyard.telemetry import RunLog
from drillyard.training.build import build_callbacks, build_run
from drillyard.training.callbacks import StepCallbacks
from drillyard.training.model_setup import fill_weights

STEPS_PER_BLOCK = 20
WARMUP_BLOCKS = 2


def make_config(directory: Path, arguments: argparse.Namespace) -> RunConfig:
    """The run that both train: fp32, nothing compiled."""
    settings = llama_run(
        directory,
        "overhead",
        hidden=arguments.hidden,
        layers=arguments.layers,
        heads=4,
        kv_heads=4,
        sequence_length=arguments.sequence_length,
        micro_batch_size=arguments.micro_batch_size,
        vocab_size=2048,
        documents=2000,
        words=300,
        training={"steps": 1_000_000, "precision": "fp32", "compile": False},
    )
    return RunConfig.model_validate(settings)


def measure(arguments: argparse.Namespace, directory: str) -> dict[str, list[float]]:
    """Seconds per step of each block, on every rank alike."""
    config = make_config(Path(directory), arguments) if dist.get_rank() == 0 else None
    boxes: list[Any] = [config]
    dist.broadcast_object_list(boxes)
    config = boxes[0]
    ranks = start_ranks(config.training, config.parallelism)
    with ranks.in_turn() as is_first:
        data = prepare(config, only_open=not is_first)
    (Path(directory) / "run").mkdir(exist_ok=True)
    log = RunLog(Path(directory) / "run", rank=ranks.rank, config=config, console="none", attempt=0)
    parts = build_run(config, ranks, data, log)
    callbacks = callbacks_without_supervision(
        config, ranks, parts, data, log, Path(directory) / "run"
    )
    fill_weights(config, parts.model)
    bare, batches = bare_loop(config, ranks, data)
    seconds: dict[str, list[float]] = {"trainer": [], "bare": []}
    total = parts.trainer.total_steps
    for block in range(arguments.blocks + WARMUP_BLOCKS):
        for name in ("trainer", "bare") if block % 2 else ("bare", "trainer"):
            dist.barrier()
            started = time.perf_counter()
            if name == "trainer":
                first = block * STEPS_PER_BLOCK
                parts.trainer.total_steps = first + STEPS_PER_BLOCK
                parts.trainer.train(first, callbacks)
                parts.trainer.total_steps = total
            else:
                for step in range(STEPS_PER_BLOCK):
                    bare.step(*batches[step])
            if block >= WARMUP_BLOCKS:
                seconds[name].append((time.perf_counter() - started) / STEPS_PER_BLOCK)
    log.close()
    return seconds


def callbacks_without_supervision(
    config: RunConfig, ranks: Any, parts: Any, data: Any, log: RunLog, directory: Path
) -> StepCallbacks:
    """The callbacks of a run whose rank no supervisor watches and no signal stops."""
    signs = SimpleNamespace(step=lambda *_: None)
    side: Any = SimpleNamespace(
        signs=signs,
        begin=lambda *_: None,
        during=lambda _: contextlib.nullcontext(),
        received=None,
        answer=lambda _: None,
    )
    return build_callbacks(config, ranks, parts, data, log, directory, side)


def bare_loop(config: RunConfig, ranks: Any, data: Any) -> tuple[BareLoop, list[tuple[Any, ...]]]:
    """The yardstick on the same ranks, and its batches as tensors."""
    model = build_model(
        config.model,
        vocab_size=len(data.tokenizer),
        dtype=torch.float32,
        attention="sdpa",
        sequence_length=config.data.sequence_length,
        eos_token_id=data.tokenizer.eos_token_id,
        bos_token_id=data.tokenizer.bos_token_id,
        pad_token_id=data.tokenizer.pad_token_id,
    )
    clipping = config.training.gradient_clipping
    assert clipping is not None
    bare = BareLoop(model, blocks(model), ranks.mesh["shard"], 1e-3, clipping, ranks.device)
    init_random(model, 0)
    size = config.training.micro_batch_size
    batches = []
    for step in range(STEPS_PER_BLOCK):
        references = data.train.indices(step, BatchShape(size, num_data_ranks=ranks.world_size))
        batch = data.train.read(references[ranks.rank * size : (ranks.rank + 1) * size])
        attention = packed_attention_inputs(batch, model, "sdpa", ranks.device)
        batches.append(
            (
                torch.from_numpy(batch.input_ids),
                torch.from_numpy(batch.position_ids),
                attention,
                torch.from_numpy(batch.labels),
            )
        )
    return bare, batches


def interval(trainer: list[float], bare: list[float]) -> tuple[float, float, float]:
    """Ratio of medians and its 95 % interval by bootstrap over pairs of blocks."""
    generator = np.random.default_rng(0)
    pairs = np.array([trainer, bare])
    picks = generator.integers(0, pairs.shape[1], size=(10_000, pairs.shape[1]))
    medians = np.median(pairs[:, picks], axis=2)
    low, high = np.percentile(medians[0] / medians[1], [2.5, 97.5])
    return statistics.median(trainer) / statistics.median(bare), float(low), float(high)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=15)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--sequence-length", type=int, default=128)
    parser.add_argument("--micro-batch-size", type=int, default=4)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        seconds = run_ranks(measure, arguments.ranks, arguments, directory, timeout=3600)[0]
    for name, values in seconds.items():
        low, middle, high = (
            1e3 * value for value in (min(values), statistics.median(values), max(values))
        )
        print(f"{name:8} median step {middle:8.2f} ms  ({low:.2f} to {high:.2f})")
    ratio, low, high = interval(seconds["trainer"], seconds["bare"])
    print(
        f"trainer / bare: {ratio:.4f}  (95 % interval {low:.4f} to {high:.4f}, {arguments.blocks}"
        " blocks)"
    )


if __name__ == "__main__":
    main()
