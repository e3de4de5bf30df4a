"""Tokens per second, TFLOP/s, MFU and peak memory of the trainer's step on one GPU, by attention kernel and compile.

    python benchmarks/gpu/train_step.py [--layers 16] [--hidden 2048] [--sequence-length 4096] [--micro-batch-size 4]

Random weights and random text of full sequences; medians of 10 logged steps after 5 of warm-up. Each setting runs
as `drillyard train` in a process of its own, so what is measured is what a user gets.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.workload import llama_run

WARMUP, STEPS = 5, 15
SETTINGS: dict[str, dict[str, Any]] = {
    "sdpa": {"model.attention": "sdpa", "training.compile": "false"},
    "varlen": {"model.attention": "varlen", "training.compile": "false"},
    "varlen, compiled": {"model.attention": "varlen", "training.compile": "true"},
    "varlen, compiled, full checkpointing": {
        "model.attention": "varlen",
        "training.compile": "true",
        "training.activation_checkpointing": "full",
    },
}


def write_inputs(directory: Path, arguments: argparse.Namespace) -> Path:
    """Random text and a run config over it."""
    settings = llama_run(
        directory,
        "gpu",
        hidden=arguments.hidden,
        layers=arguments.layers,
        heads=arguments.hidden // 64,
        kv_heads=max(1, arguments.hidden // 256),
        sequence_length=arguments.sequence_length,
        micro_batch_size=arguments.micro_batch_size,
        vocab_size=32000,
        documents=400,
        words=4000,
        training={"steps": STEPS},
    )
    path = directory / "run.yaml"
    path.write_text(json.dumps(settings))
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--sequence-length", type=int, default=4096)
    parser.add_argument("--micro-batch-size", type=int, default=4)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        config = write_inputs(directory, arguments)
        print(f"{'setting':40} {'s/step':>8} {'tokens/s':>9} {'TFLOP/s':>8} {'MFU':>6} {'GiB':>6}")
        for number, (name, changes) in enumerate(SETTINGS.items()):
            command = [sys.executable, "-m", "drillyard", "train", str(config), "--console", "none"]
            for key, value in ({"name": f"gpu-{number}", "output": folder} | changes).items():
                command += ["--set", f"{key}={value}"]
            if subprocess.run(command).returncode:
                print(f"{name:40} failed")
                continue
            lines = (directory / f"gpu-{number}" / "metrics.jsonl").read_text().splitlines()[WARMUP:]
            rows = [json.loads(line) for line in lines]
            seconds = statistics.median(row["step_seconds"] for row in rows)
            row = min(rows, key=lambda row: abs(row["step_seconds"] - seconds))
            mfu = "-" if row["mfu"] is None else f"{row['mfu']:.1%}"
            tokens, tflops, memory = row["tokens_per_second_per_gpu"], row["tflops_per_gpu"], row["memory_gib"]
            print(f"{name:40} {seconds:8.4f} {tokens:9.0f} {tflops:8.1f} {mfu:>6} {memory:6.1f}")


if __name__ == "__main__":
    main()
