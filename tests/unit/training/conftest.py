"""A run directory as training leaves it, made without training: config, data, events, metrics,
checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from drillyard.config.load import save_resolved
from drillyard.config.run import RunConfig
from drillyard.data.data_changes import write_record
from drillyard.data.prepared_data import prepare
from drillyard.telemetry.events import append_event
from drillyard.training.checkpoint.manifest import Manifest, write_manifest

SOFTWARE = {"torch": "2.15.0", "transformers": "5.0", "python": "3.12"}


def numerics_on(ranks: int) -> dict[str, dict[str, Any]]:
    """What a start on so many ranks says of its rounding."""
    settings = {
        "model.attention": "eager",
        "training.activation_checkpointing": "none",
        "training.compile": False,
        "training.loss_chunk_tokens": 16,
        "training.deterministic": False,
        "training.threads_per_rank": 1,
        "parallelism.shard": ranks,
        "parallelism.replicate": 1,
    }
    return {
        "settings": settings,
        "conditions": {"numerics revision": 1, "hardware": "a CPU", **SOFTWARE},
    }


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    """Two sources, four sequences per step on two ranks in micro-batches of one."""
    (tmp_path / "docs").mkdir()
    rows = [{"text": f"row number {n} " + "and so on " * (n % 9)} for n in range(60)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name in "ab":
        (tmp_path / "docs" / f"{name}.txt").write_text(f"the text of {name} " * 30)
    return RunConfig.model_validate(
        {
            "name": "run",
            "output": str(tmp_path / "runs"),
            "model": {"config": {"architecture": "llama"}, "init": "random"},
            "data": {
                "source": [str(tmp_path / "rows.jsonl"), str(tmp_path / "docs")],
                "sequence_length": 64,
                "tokenizer": {"train": "bpe", "vocab_size": 300},
                "cache_directory": str(tmp_path / "cache"),
            },
            "training": {"steps": 40, "micro_batch_size": 1, "optimizer": {"learning_rate": 1e-3}},
            "logging": {"every_steps": 2, "tensorboard": True},
        }
    )


@pytest.fixture
def make_run(config: RunConfig) -> Callable[..., Path]:
    """Make the run directory: starts of (first logged step, last, ranks), each with an order of its
    own.

    A start goes on from the step before the one that it does first. `numerics`: what differs in
    each start's record.
    """

    def make(
        *attempts: tuple[int, int, int],
        checkpoints: tuple[int, ...] = (),
        numerics: tuple[dict[str, dict[str, Any]], ...] = (),
    ) -> Path:
        directory = Path(config.output) / config.name
        directory.mkdir(parents=True)
        save_resolved(config, directory / "run.yaml")
        data = prepare(config)
        write_record(directory, data.record)
        for number, (first, last, ranks) in enumerate(attempts):
            changed = numerics[number] if numerics else {}
            append_event(directory, "round_start", round=0, world_size=ranks, **SOFTWARE)
            layout = {
                "micro_batch_size": 1,
                "gradient_accumulation": 4 // ranks,
                "world_size": ranks,
            }
            rounding = {
                part: values | changed.get(part, {}) for part, values in numerics_on(ranks).items()
            }
            append_event(
                directory,
                "order",
                round=0,
                data=data.train.fingerprint,
                global_batch_size=4,
                total_steps=40,
                numerics=rounding,
                **layout,
            )
            if first > 2:
                append_event(directory, "resume", round=0, step=first - 2)
            append_event(directory, "first_step", round=0, step=first - 1)
            for step in range(first, last + 1, 2):
                append_metrics(directory, step, num_gpus=ranks)
                if step in checkpoints:
                    append_event(directory, "checkpoint_begin", round=0, step=step)
        for step in checkpoints:
            path = directory / "checkpoints" / f"step-{step:08d}"
            path.mkdir(parents=True)
            write_manifest(path, Manifest(step, 2, "2.15.0", "2026-01-01T00:00:00.000Z", {}))
        return directory

    return make


def append_metrics(directory: Path, step: int, **fields: Any) -> None:
    """A logged step, after everything that was written before it."""
    append_event(directory, "step", step=step)
    written = json.loads((directory / "events.jsonl").read_text().splitlines()[-1])
    line = {
        "time": written["time"],
        "round": 0,
        "step": step,
        "loss": 2.0 + 1 / step,
        "grad_norm": 1 / 3,
        **fields,
    }
    with (directory / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
