"""Packed against padded sequences: how full they are, and tokens of documents and of loss that are
trained a second.

    python benchmarks/packing.py [--steps 40] [--repeats 3]

For each set of documents the same model is trained on two ranks with `data.packing` on and off, by
turns; the median step of each run, without its first five, and the median of the runs.
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

WARMUP = 5
SOURCES = {
    "function calls at 512": (
        "builtin:function-calling",
        "function-calling",
        512,
        {"examples": 4000},
    ),
    "text-to-SQL at 256": ("builtin:text-to-sql", "text-to-sql", 256, {"examples": 4000}),
}


def settings_of(name: str, *, packing: bool, steps: int, directory: Path) -> dict[str, Any]:
    """A run of four layers of width 128."""
    path, form, length, options = SOURCES[name]
    sizes = {
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "intermediate_size": 512,
    }
    return {
        "name": "run",
        "output": str(directory / "runs"),
        "model": {"config": {"architecture": "llama", **sizes}, "init": "random"},
        "data": {
            "source": {"path": path, "options": options},
            "format": form,
            "sequence_length": length,
            "packing": packing,
            "tokenizer": {"train": "bpe", "vocab_size": 768},
            "cache_directory": str(directory / "cache"),
        },
        "training": {
            "steps": steps,
            "micro_batch_size": 4096 // length,
            "precision": "fp32",
            "optimizer": {"learning_rate": 1.0e-3},
            "schedule": {"name": "constant"},
        },
        "logging": {"every_steps": 1, "tensorboard": False},
    }


def measured(name: str, *, packing: bool, steps: int) -> tuple[float, float, float]:
    """(fill rate, tokens of documents a second, tokens with loss a second) of one run."""
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        path = directory / "run.yaml"
        path.write_text(
            json.dumps(settings_of(name, packing=packing, steps=steps, directory=directory))
        )
        command = [sys.executable, "-m", "drillyard", "train", str(path), "--nproc-per-node", "2"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(done.stdout[-2000:] + done.stderr[-2000:])
        events = [
            json.loads(line)
            for line in (directory / "runs/run/events.jsonl").read_text().splitlines()
        ]
        lines = [
            json.loads(line)
            for line in (directory / "runs/run/metrics.jsonl").read_text().splitlines()
        ]
    parts = next(event["parts"] for event in events if event["event"] == "data")
    fill = next(part["fill_rate"] for part in parts.values())
    of_steps = lines[WARMUP:]
    seconds = statistics.median(line["step_seconds"] for line in of_steps)
    loss_tokens = statistics.mean(line["valid_tokens"] for line in of_steps)
    return fill, fill * of_steps[0]["tokens"] / seconds, loss_tokens / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    print(
        "| | packing | filled | tokens of documents/s | tokens with loss/s |\n|---|---|---|---|---|"
    )
    for name in SOURCES:
        found: dict[bool, list[tuple[float, float, float]]] = {True: [], False: []}
        for _ in range(arguments.repeats):
            for packing in found:
                found[packing].append(measured(name, packing=packing, steps=arguments.steps))
        for packing, runs in found.items():
            fill, tokens, with_loss = (
                statistics.median(values) for values in zip(*runs, strict=True)
            )
            print(
                f"| {name} | {'on' if packing else 'off'} | {fill:.1%} | {tokens:,.0f} |"
                f" {with_loss:,.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
