"""A run directory with everything that a report shows, written without training: 16 GPUs that fail
once.

Step times, losses and all else are functions of the step, so that tests can say what must come out.
"""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from drillyard.telemetry.jsonlines import encode

STEPS = 160
FAILED_AFTER, RESUMED_FROM = 100, 90
STALLS = {12: 50.0, 130: 80.0}
NOT_FINITE = 25
TOKENS = 16 * 8 * 4096
FLOPS_PER_TOKEN, PEAK = 6 * 70.55e9, 2250e12
CLUSTER = """
name: b200-flex
platform: gke
location: {project: my-project, region: us-central1, zone: us-central1-b}
machine: a4-highgpu-8g
nodes: 2
consumption: flex-start-queued
storage: {bucket: my-bucket}
image: us-docker.pkg.dev/my-project/drillyard/drillyard:latest
"""


def loss_of(step: int) -> float:
    """The loss of a step: falls, and differs in every digit."""
    return 0.4 + 2.4 * math.exp(-step / 30) + 0.01 * math.sin(step)


def seconds_of(step: int, first: bool = False) -> float:
    """The duration of a step; the first one of an attempt compiles."""
    return 60.0 if first else STALLS.get(step, 14.5 + 0.01 * (step % 7))


class _Writer:
    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.now = datetime(2026, 1, 31, 12, tzinfo=UTC)
        self.lines: dict[str, list[str]] = {"events.jsonl": [], "metrics.jsonl": []}

    def line(self, file: str, record: dict[str, Any]) -> None:
        moment = self.now.isoformat(timespec="microseconds").replace("+00:00", "Z")
        self.lines[file].append(encode({"time": moment, **record}))

    def event(self, name: str, after: float = 0.0, **fields: Any) -> None:
        self.now += timedelta(seconds=after)
        self.line("events.jsonl", {"event": name, **fields})

    def step(self, step: int, attempt: int, accelerator: str | None, first: bool) -> None:
        seconds = seconds_of(step, first)
        self.now += timedelta(seconds=seconds)
        rate = TOKENS / seconds / 16
        record = {
            "round": attempt,
            "step": step,
            "loss": math.nan if step == NOT_FINITE else loss_of(step),
            "learning_rate": 1e-5,
            "grad_norm": 1.0 + step / 1000,
            "step_seconds": seconds,
            "tokens": TOKENS,
            "valid_tokens": TOKENS,
            "num_gpus": 16,
            "data_seconds": 0.01,
            "compile_seconds": 40.0 if first and attempt == 0 else None,
            "memory_gib": 141.5,
            "window_steps": 1,
            "tokens_per_second_per_gpu": rate,
            "tflops_per_gpu": rate * FLOPS_PER_TOKEN / 1e12,
            "mfu": rate * FLOPS_PER_TOKEN / PEAK if accelerator else None,
            "formula": "6N",
        }
        self.line("metrics.jsonl", record)
        self.event("step", round=attempt, step=step, step_seconds=seconds, window_steps=1)


def write_run(
    directory: Path,
    *,
    steps: int = STEPS,
    accelerator: str | None = "b200",
    end: str | None = "completed",
) -> Path:
    """Write events.jsonl, metrics.jsonl, run.yaml and cluster.yaml; `end=None` leaves the run in
    its last step."""
    writer = _Writer(directory)
    writer.event("run_start", round=0, world_size=16)
    _start_round(writer, 0, steps, accelerator)
    step, attempt, first = 0, 0, True
    while step < steps:
        step += 1
        writer.step(step, attempt, accelerator, first)
        first = False
        if step == NOT_FINITE:
            writer.event("nonfinite_step", round=0, step=step, loss=math.nan, grad_norm=1.5)
        if step == FAILED_AFTER and attempt == 0:
            writer.event(
                "failure", 5.0, round=0, step=step, reason="rank 11 died by SIGKILL", failed_rank=11
            )
            writer.event("restart", round=1, reason="rank 11 died by SIGKILL")
            _start_round(writer, 1, steps, accelerator)
            writer.event(
                "resume",
                20.0,
                round=1,
                step=RESUMED_FROM,
                path="checkpoints/step-00000090",
                seconds=20.0,
            )
            step, attempt, first = RESUMED_FROM, 1, True
        elif step % 40 == 0:
            _evaluate(writer, step, attempt)
        elif step % 30 == 0:
            _save(writer, step, attempt)
    if end is not None:
        writer.event("end", 1.0, round=attempt, step=step, status=end)
    for name, lines in writer.lines.items():
        (directory / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    (directory / "run.yaml").write_text("name: trial\ntraining: {steps: 160}\n", encoding="utf-8")
    (directory / "cluster.yaml").write_text(CLUSTER, encoding="utf-8")
    return directory


def _start_round(writer: _Writer, number: int, steps: int, accelerator: str | None) -> None:
    writer.event("round_start", 30.0, round=number, world_size=16, torch="2.15.0", python="3.12.4")
    writer.event("data", 2.0, round=number, parts={"rows": {"tokens": 1_000_000}})
    writer.event(
        "parameters",
        round=number,
        count=70_550_000_000,
        trainable=70_550_000_000,
        formula="6N",
        flops_per_token=FLOPS_PER_TOKEN,
        accelerator=accelerator,
        precision="bf16",
        peak_flops=PEAK if accelerator else None,
    )
    settings = {"training.compile": True, "parallelism.shard": 16}
    writer.event(
        "resolved", round=number, settings=settings, reasons={"parallelism.shard": "all ranks"}
    )
    writer.event(
        "order", round=number, total_steps=steps, global_batch_size=128, hardware="NVIDIA B200"
    )


def _evaluate(writer: _Writer, step: int, number: int) -> None:
    writer.event("evaluation_begin", round=number, step=step)
    writer.event("evaluation_end", 30.0, round=number, step=step, seconds=30.0)
    figures = {
        "loss": loss_of(step) + 0.1,
        "perplexity": 2.0,
        "tokens": 5000,
        "questions": 200,
        "unjudged": 3,
        "sql_execution": step / 200,
    }
    writer.event("evaluation", round=number, step=step, results={"questions": figures})


def _save(writer: _Writer, step: int, number: int) -> None:
    writer.event("checkpoint_begin", round=number, step=step)
    writer.event("checkpoint_end", 3.0, round=number, step=step, seconds=3.0)
    sizes = {"bytes": 840 * 2**30, "blocking_seconds": 3.0, "seconds": 60.0}
    writer.event("checkpoint", round=number, step=step, path=f"checkpoints/step-{step:08}", **sizes)
