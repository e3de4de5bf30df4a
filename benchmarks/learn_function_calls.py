"""How well a small model learns `builtin:function-calling`: accuracy on calls never trained, before and after.

    python benchmarks/learn_function_calls.py [--seeds 0 1 2] [--steps 1000]

For each seed: `drillyard train` on two ranks from random weights, 200 held-out questions before the first step and
after the last, the wall time of the whole command, and the accuracy of the best constant answer, which is the one
answer that is right most often.
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
from drillyard.data.held_out_parts import evaluation_rows
from drillyard.evaluation.call_scoring import judge_calls

QUESTIONS = 200
PART = "function-calling/calls"


def settings_of(seed: int, steps: int, directory: Path) -> dict[str, Any]:
    """A run of four layers of width 64."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 256}
    return {
        "name": f"seed-{seed}",
        "output": str(directory),
        "model": {"config": {"architecture": "llama", **sizes}, "init": "random"},
        "data": {
            "source": {"path": "builtin:function-calling", "options": {"examples": 60_000, "seed": seed}},
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


def best_constant(path: Path) -> float:
    """The share of questions that the best single answer gets right."""
    rows = evaluation_rows(load_run_config(path), PART, QUESTIONS)
    answers = {json.dumps(row["messages"][-1]["tool_calls"], sort_keys=True) for row in rows}
    calls = [[each["function"] for each in json.loads(answer)] for answer in answers]
    texts = ["\n".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in each) for each in calls]
    right = [
        sum(judge_calls(row["tools"], row["accepted"], text).outcome == "correct" for row in rows) for text in texts
    ]
    return max(right) / len(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=1000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        for seed in arguments.seeds:
            path = Path(temporary) / f"{seed}.yaml"
            path.write_text(json.dumps(settings_of(seed, arguments.steps, Path(temporary))))
            started = time.perf_counter()
            command = [sys.executable, "-m", "drillyard", "train", str(path), "--nproc-per-node", "2"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                sys.exit(done.stdout[-2000:] + done.stderr[-2000:])
            seconds = time.perf_counter() - started
            lines = (Path(temporary) / f"seed-{seed}/events.jsonl").read_text().splitlines()
            found = [event["results"] for event in map(json.loads, lines) if event["event"] == "evaluation"]
            before, after = (each[PART]["function_call"] for each in (found[0], found[-1]))
            unseen = found[-1]["function-calling/functions"]["function_call"]
            print(
                f"seed {seed}: before {before:.1%}, best constant answer {best_constant(path):.1%}, after {after:.1%}; "
                f"functions never trained {unseen:.1%}; {seconds:.0f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
