"""A run directory of two attempts on different numbers of GPUs, with times that one can add up."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

from drillyard.telemetry.jsonlines import encode

FLOPS_PER_TOKEN, PEAK = 6000.0, 1e9


class Attempt(NamedTuple):
    """GPUs, seconds of each step but the first (that takes 10), and tokens of a step."""

    gpus: int
    seconds: float
    tokens: int = 1200


def write_changed_run(directory: Path, first: Attempt, second: Attempt) -> Path:
    """Steps 1 to 5, a failure 3 s later, and steps 6 to 10; each attempt has 10 s to its ranks'
    start or, after the failure, 5 s."""
    now = datetime(2026, 1, 31, 12, tzinfo=UTC)
    lines: dict[str, list[str]] = {"events.jsonl": [], "metrics.jsonl": []}

    def line(file: str, **record: Any) -> None:
        time = now.isoformat(timespec="microseconds").replace("+00:00", "Z")
        lines[file].append(encode({"time": time, **record}))

    line("events.jsonl", event="run_start", world_size=first.gpus)
    for number, (gpus, seconds, tokens) in enumerate((first, second)):
        now += timedelta(seconds=5 if number else 10)
        line("events.jsonl", event="round_start", round=number, world_size=gpus)
        line(
            "events.jsonl",
            event="parameters",
            round=number,
            count=1000,
            trainable=1000,
            formula="6N",
            flops_per_token=FLOPS_PER_TOKEN,
            accelerator="b200",
            precision="bf16",
            peak_flops=PEAK,
        )
        if number:
            line("events.jsonl", event="resume", round=1, step=5)
        for step in range(5 * number + 1, 5 * number + 6):
            took = 10.0 if step % 5 == 1 else seconds
            now += timedelta(seconds=took)
            rate = tokens / took / gpus
            line(
                "metrics.jsonl",
                round=number,
                step=step,
                loss=1 / step,
                learning_rate=1e-5,
                grad_norm=1.0,
                step_seconds=took,
                window_steps=1,
                tokens=tokens,
                valid_tokens=tokens,
                num_gpus=gpus,
                data_seconds=0.0,
                memory_gib=1.0,
                tokens_per_second_per_gpu=rate,
                tflops_per_gpu=rate * FLOPS_PER_TOKEN / 1e12,
                mfu=rate * FLOPS_PER_TOKEN / PEAK,
                formula="6N",
            )
            line("events.jsonl", event="step", round=number, step=step, step_seconds=took)
        if not number:
            now += timedelta(seconds=3)
            line("events.jsonl", event="failure", round=0, step=5, reason="a node is gone")
    line("events.jsonl", event="end", round=1, step=10, status="completed")
    directory.mkdir(parents=True)
    for name, written in lines.items():
        (directory / name).write_text("".join(f"{one}\n" for one in written), encoding="utf-8")
    (directory / "run.yaml").write_text("name: trial\n", encoding="utf-8")
    return directory


TWO_THEN_ONE = Attempt(2, 4.0), Attempt(1, 6.0)
"""Tokens/s/GPU 150 and 200. 44 s on two GPUs (10 + 10 + 4 x 4 + 3 + 5), then 34 (10 + 4 x 6) on
one: 122 GPU-seconds."""
ONE_THEN_FOUR = Attempt(1, 8.0), Attempt(4, 1.5)
"""Tokens/s/GPU 150 and 200. 60 s on one GPU (10 + 10 + 4 x 8 + 3 + 5), then 16 (10 + 4 x 1.5) on
four: 124 GPU-seconds."""
