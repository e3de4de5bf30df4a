"""How well a small model learns `builtin:function-calling`: accuracy on calls never trained, before
and after.

    python benchmarks/learn_function_calls.py [--seeds 0 1 2] [--steps 1000] [--adapter-steps 300]

For each seed: `drillyard train` on two ranks from random weights, 200 held-out questions before the
first step and after the last, the wall time of the whole command, and the accuracy of the best
constant answer, which is the one answer that is right most often.

Then adapters (LoRA of rank 16 on all linear layers) are trained on the model for the functions that
it never saw: 200 other questions on these before and after, and the 200 on calls of the old
functions after.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from drillyard.config.load import load_run_config
from drillyard.data.builtin.function_calling import rows
from drillyard.data.held_out_parts import evaluation_rows
from drillyard.evaluation.call_scoring import judge_calls

QUESTIONS = 200
PART = "function-calling/calls"


def settings_of(seed: int, steps: int, directory: Path) -> dict[str, Any]:
    """A run of four layers of width 64."""
    sizes = {
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "intermediate_size": 256,
    }
    return {
        "name": f"seed-{seed}",
        "output": str(directory),
        "model": {"config": {"architecture": "llama", **sizes}, "init": "random"},
        "data": {
            "source": {
                "path": "builtin:function-calling",
                "options": {"examples": 60_000, "seed": seed},
            },
            "format": "function-calling",
            "sequence_length": 256,
            "tokenizer": {"train": "bpe", "vocab_size": 768},
            "cache_directory": str(directory / "cache"),
        },
        "training": {
            "steps": steps,
            "seed": seed,
            "micro_batch_size": 16,
            "precision": "fp32",
            "optimizer": {"learning_rate": 4.0e-3},
            "schedule": {"name": "cosine", "warmup_steps": 100},
        },
        "evaluation": {
            "at_start": True,
            "metrics": ["function-call"],
            "samples": QUESTIONS,
            "batch_size": 100,
            "max_new_tokens": 96,
        },
        "logging": {"every_steps": 100, "tensorboard": False},
    }


def adapter_settings(seed: int, steps: int, directory: Path) -> dict[str, Any]:
    """A run of adapters on the model of `seed`, on rows of the functions that it never saw; those
    are written."""
    parts = {"functions": QUESTIONS, "calls": QUESTIONS, "train": QUESTIONS + 4000}
    for name, count in parts.items():
        made = list(rows("calls" if name == "calls" else "functions", count, seed))
        kept = made[QUESTIONS:] if name == "train" else made
        (directory / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in kept))
    base = settings_of(seed, steps, directory)
    model = str(directory / f"seed-{seed}/final")
    lora = {"rank": 16, "alpha": 32.0, "target_modules": "all-linear"}
    held_out = [str(directory / f"{name}.jsonl") for name in ("functions", "calls")]
    return base | {
        "name": f"adapter-{seed}",
        "model": {"id": model, "lora": lora},
        "data": (
            base["data"]
            | {
                "source": str(directory / "train.jsonl"),
                "held_out": {"source": held_out},
                "tokenizer": model,
            }
        ),
        "training": (
            base["training"]
            | {
                "schedule": {"name": "cosine", "warmup_steps": 20},
                "optimizer": {"learning_rate": 4.0e-3},
            }
        ),
    }


def accuracies(
    directory: Path, name: str, settings: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any], float]:
    """Train; the share of right answers by part before and after, and the seconds of the whole
    command."""
    path = directory / f"{name}.yaml"
    path.write_text(json.dumps(settings))
    started = time.perf_counter()
    command = [sys.executable, "-m", "drillyard", "train", str(path), "--nproc-per-node", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stdout[-2000:] + done.stderr[-2000:])
    seconds = time.perf_counter() - started
    lines = (directory / name / "events.jsonl").read_text().splitlines()
    found = [event["results"] for event in map(json.loads, lines) if event["event"] == "evaluation"]
    before, after = (
        {
            part: values["function_call"]
            for part, values in each.items()
            if "function_call" in values
        }
        for each in (found[0], found[-1])
    )
    return before, after, seconds


def best_constant(path: Path) -> float:
    """The share of questions that the best single answer gets right."""
    rows = evaluation_rows(load_run_config(path), PART, QUESTIONS)
    answers = {json.dumps(row["messages"][-1]["tool_calls"], sort_keys=True) for row in rows}
    calls = [[each["function"] for each in json.loads(answer)] for answer in answers]
    texts = [
        "\n".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in each)
        for each in calls
    ]
    right = [
        sum(judge_calls(row["tools"], row["accepted"], text).outcome == "correct" for row in rows)
        for text in texts
    ]
    return max(right) / len(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--adapter-steps", type=int, default=300)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        for seed in arguments.seeds:
            name = f"seed-{seed}"
            before, after, seconds = accuracies(
                directory, name, settings_of(seed, arguments.steps, directory)
            )
            constant = best_constant(directory / f"{name}.yaml")
            unseen = after["function-calling/functions"]
            print(
                f"seed {seed}: before {before[PART]:.1%}, best constant {constant:.1%}, after"
                f" {after[PART]:.1%}; functions never trained {unseen:.1%}; {seconds:.0f} s",
                flush=True,
            )
            settings = adapter_settings(seed, arguments.adapter_steps, directory)
            before, after, seconds = accuracies(directory, f"adapter-{seed}", settings)
            new, old = (
                next(part for part in after if name in part) for name in ("functions", "calls")
            )
            print(
                f"        adapters: functions never trained before {before[new]:.1%}, after"
                f" {after[new]:.1%}; calls of the old ones before {before[old]:.1%}, after"
                f" {after[old]:.1%}; {seconds:.0f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
