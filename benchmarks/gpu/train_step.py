"""Tokens per second, TFLOP/s, MFU and peak memory of the trainer's step on one GPU, by attention kernel and compile.

    python benchmarks/gpu/train_step.py [--layers 16] [--hidden 2048] [--sequence-length 4096] [--micro-batch-size 4]

Random weights and random text of full sequences; medians of 10 logged steps after 5 of warm-up. Each setting runs
as `drillyard train` in a process of its own, so what is measured is what a user gets.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

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
    generator = random.Random(0)
    words = ["".join(generator.choices("abcdefghijklmnopqrstuvwxyz", k=6)) for _ in range(5000)]
    with (directory / "text.jsonl").open("w") as file:
        for _ in range(400):
            file.write(json.dumps({"text": " ".join(generator.choices(words, k=4000))}) + "\n")
    config = {
        "name": "gpu",
        "model": {
            "init": "random",
            "config": {
                "architecture": "llama",
                "hidden_size": arguments.hidden,
                "intermediate_size": 4 * arguments.hidden,
                "num_hidden_layers": arguments.layers,
                "num_attention_heads": arguments.hidden // 64,
                "num_key_value_heads": max(1, arguments.hidden // 256),
            },
        },
        "data": {
            "source": str(directory / "text.jsonl"),
            "sequence_length": arguments.sequence_length,
            "tokenizer": {"train": "bpe", "vocab_size": 32000},
        },
        "training": {
            "steps": STEPS,
            "micro_batch_size": arguments.micro_batch_size,
            "optimizer": {"learning_rate": 1e-4},
            "activation_checkpointing": "none",
        },
    }
    path = directory / "run.yaml"
    path.write_text(json.dumps(config))
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
