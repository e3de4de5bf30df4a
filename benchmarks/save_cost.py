"""What checkpoints cost a run: seconds that training waits per save, and wall time with saves over
wall time without.

One save per 50 steps, as the trainer makes them (asynchronous, checksums, manifest, deletion of old
ones) between blocks of 50 steps with a save and blocks without, in alternating order, in the same
ranks. A block with a save ends when its checkpoint is complete, so none of its cost falls on its
neighbour. For comparison: plain `dcp.save` of the same state, for which training waits throughout.

    python benchmarks/save_cost.py [--blocks 10] [--hidden 256] [--layers 4] [--sequence-length 128]
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import checkpoint as dcp

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.step_overhead import callbacks_without_supervision, interval, make_config
from tests.distributed.ranks import run_ranks

from drillyard.data.prepared_data import prepare
from drillyard.parallel.ranks import start_ranks
from drillyard.telemetry import RunLog
from drillyard.training.build import build_run
from drillyard.training.model_setup import fill_weights
from drillyard.training.resume import checkpoint_state

STEPS_PER_SAVE = 50
WARMUP_BLOCKS = 1


def measure(arguments: argparse.Namespace, directory: str) -> dict[str, list[float]]:
    """Seconds of each block, of each wait for a save and of each plain `dcp.save`, on every rank
    alike."""
    boxes: list[Any] = [make_config(Path(directory), arguments) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(boxes)
    config = boxes[0]
    ranks = start_ranks(config.training, config.parallelism)
    with ranks.in_turn() as is_first:
        data = prepare(config, only_open=not is_first)
    run = Path(directory) / "run"
    run.mkdir(exist_ok=True)
    log = RunLog(run, rank=ranks.rank, config=config, console="none", attempt=0)
    parts = build_run(config, ranks, data, log)
    callbacks = callbacks_without_supervision(config, ranks, parts, data, log, run)
    checkpointer, optimizer = callbacks.checkpointer, parts.trainer.optimizer
    without_saves = config.checkpoint.model_copy(update={"every_steps": None})
    callbacks.config = config.model_copy(update={"checkpoint": without_saves})
    fill_weights(config, parts.model)
    checkpointer.prepare(checkpoint_state(optimizer, ranks))
    seconds: dict[str, list[float]] = {
        "with saves": [],
        "without": [],
        "blocked": [],
        "dcp.save": [],
    }
    done = 0

    def train(steps: int) -> None:
        nonlocal done
        parts.trainer.total_steps = done + steps
        parts.trainer.train(done, callbacks)
        done += steps

    for block in range(arguments.blocks + WARMUP_BLOCKS):
        for name in ("with saves", "without") if block % 2 else ("without", "with saves"):
            dist.barrier()
            started = time.perf_counter()
            blocked = 0.0
            if name == "with saves":
                state = checkpoint_state(optimizer, ranks)
                called = time.perf_counter()
                checkpointer.save(done, state, metadata={"step": done, "held_out_loss": None})
                blocked = time.perf_counter() - called
            train(STEPS_PER_SAVE)
            checkpointer.wait()
            dist.barrier()
            if block >= WARMUP_BLOCKS:
                seconds[name].append(time.perf_counter() - started)
                if name == "with saves":
                    seconds["blocked"].append(blocked)
    for number in range(5):
        dist.barrier()
        started = time.perf_counter()
        dcp.save(
            checkpoint_state(optimizer, ranks),
            checkpoint_id=str(Path(directory) / f"plain-{number}"),
        )
        seconds["dcp.save"].append(time.perf_counter() - started)
        dist.barrier()
        if ranks.rank == 0:
            shutil.rmtree(Path(directory) / f"plain-{number}")
    checkpointer.close()
    log.close()
    seconds["parameters"] = [float(parts.model.num_parameters)]
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--blocks", type=int, default=10, help="of 50 steps, with a save and without each"
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--sequence-length", type=int, default=128)
    parser.add_argument("--micro-batch-size", type=int, default=4)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        seconds = run_ranks(measure, arguments.ranks, arguments, directory, timeout=3600)[0]
    step = statistics.median(seconds["without"]) / STEPS_PER_SAVE
    blocked, plain = statistics.median(seconds["blocked"]), statistics.median(seconds["dcp.save"])
    low, high = min(seconds["blocked"]), max(seconds["blocked"])
    ratio, lowest, highest = interval(seconds["with saves"], seconds["without"])
    whole = sum(seconds["with saves"]) / sum(seconds["without"])
    print(
        f"{seconds['parameters'][0] / 1e6:.2f} M parameters, {arguments.ranks} ranks, median step"
        f" {1e3 * step:.1f} ms"
    )
    print(
        f"training waits per save {1e3 * blocked:.1f} ms ({1e3 * low:.1f} to {1e3 * high:.1f}), ",
        end="",
    )
    print(
        f"{blocked / (STEPS_PER_SAVE * step):.3%} of 50 steps; plain dcp.save {1e3 * plain:.0f} ms"
    )
    print(
        f"wall time with saves / without: {whole:.4f} over {STEPS_PER_SAVE * arguments.blocks}"
        f" steps each; medians of blocks {ratio:.4f} (95 % interval {lowest:.4f} to {highest:.4f})"
    )


if __name__ == "__main__":
    main()
