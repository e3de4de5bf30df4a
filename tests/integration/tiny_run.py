"""A tiny training run for tests through the real commands: its data, its config, and a hold on its
processes.

GPT-2 with dropout, so that random state matters, on JSONL rows of text-to-SQL whose queries give
results. A start of ranks costs each of them about five seconds of imports: tests put several facts
into one run.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from tests.integration.held import Holds

from drillyard.telemetry.jsonlines import decode

STEPS = 40
BATCH = 4
SEQUENCE_LENGTH = 64
GPT2 = {"architecture": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4}
DROPOUT = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}
DRILLYARD = [sys.executable, "-m", "drillyard"]
TIMEOUT_SECONDS = 480
"""For a command of seconds: only what hangs takes so long, on a slow and busy machine too."""


def write_rows(path: Path, count: int = 200) -> Path:
    """Text-to-SQL rows of uneven length, as JSONL; each also has a `text`."""
    generator = random.Random(7)
    columns = ["age", "size", "price", "name", "city"]
    with path.open("w", encoding="utf-8") as file:
        for number in range(count):
            column, other = generator.sample(columns, 2)
            schema = (
                f"CREATE TABLE t ({column} INT, {other} INT); INSERT INTO t VALUES ({number}, 1),"
                f" (2, {number});"
            )
            chosen = generator.choice(["", f" WHERE {other} = 1", f" ORDER BY {column}"])
            row = {
                "schema": schema,
                "question": f"{column} of {number}?",
                "sql": f"SELECT {column} FROM t{chosen}",
                "text": " ".join(generator.choices(columns, k=generator.randint(3, 40))),
            }
            file.write(json.dumps(row) + "\n")
    return path


def write_config(directory: Path, name: str, **changes: Any) -> Path:
    """NAME.yaml in `directory` for a run on its rows.jsonl; `changes` are settings with __ for the
    dot."""
    settings: dict[str, Any] = {
        "name": name,
        "output": str(directory / "runs"),
        "model": {"config": GPT2 | DROPOUT, "init": "random"},
        "data": {
            "source": str(directory / "rows.jsonl"),
            "format": "text-to-sql",
            "sequence_length": SEQUENCE_LENGTH,
            "too_long": "truncate",
            "loss_on": "all",
            "tokenizer": {"train": "bpe", "vocab_size": 320},
            "held_out": {"fraction": 0.2},
            "cache_directory": str(directory / "cache"),
        },
        "training": {
            "steps": STEPS,
            "micro_batch_size": 2,
            "precision": "fp32",
            "optimizer": {"learning_rate": 4.0e-3},
            "device": "cpu",
            "threads_per_rank": 1,
        },
        "evaluation": {"samples": 4, "max_new_tokens": 8},
        "logging": {"tensorboard": False},
    }
    for dotted, value in changes.items():
        *parents, last = dotted.split("__")
        place = settings
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = value
    path = directory / f"{name}.yaml"
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")
    return path


def drillyard(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    command = [*DRILLYARD, *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, **options
    )


def train(config: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """`drillyard train` on two ranks, to its end."""
    return drillyard("train", config, "--nproc-per-node", 2, *arguments)


STARTED: list[subprocess.Popen[str]] = []
"""What tests have started in the background; conftest.py ends what a test has left."""


class Run:
    """The run directory of a config, and the processes that work in it."""

    def __init__(self, config: Path) -> None:
        self.config = config
        self.directory = config.parent / "runs" / config.stem

    def start(self, *options: str, holds: Holds | None = None) -> subprocess.Popen[str]:
        """`drillyard train` on two ranks, in the background; it waits at the moments of `holds`."""
        program = holds.program if holds else DRILLYARD
        command = [*program, "train", str(self.config), "--nproc-per-node", "2", *options]
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        STARTED.append(process)
        return process

    def records(self, file: str) -> list[dict[str, Any]]:
        """The whole lines of a JSON lines file that is there so far.

        A kill in mid-write on a FUSE mount may tear a line, which the next writer ends: every
        reader skips such lines.
        """
        path = self.directory / file
        # As bytes: the last line may end within a character.
        content = path.read_bytes() if path.exists() else b""
        whole = [line for line in content.splitlines(keepends=True) if line.endswith(b"\n")]
        return [json.loads(line) for line in whole if decode(line) is not None]

    def events(self, name: str) -> list[dict[str, Any]]:
        """The events of one name, in order."""
        return [event for event in self.records("events.jsonl") if event["event"] == name]

    def figures(self) -> list[tuple[int, float, float]]:
        """(step, loss, gradient norm) of every logged step, those done again included."""
        return [
            (line["step"], line["loss"], line["grad_norm"])
            for line in self.records("metrics.jsonl")
        ]

    def last_step(self) -> int:
        """The last logged step so far."""
        lines = self.records("metrics.jsonl")
        return int(lines[-1]["step"]) if lines else 0

    def weights(self) -> bytes:
        """The bytes of the exported model."""
        return (self.directory / "final" / "model.safetensors").read_bytes()

    def summary(self) -> dict[str, Any]:
        """summary.json."""
        content: dict[str, Any] = json.loads(
            (self.directory / "summary.json").read_text(encoding="utf-8")
        )
        return content

    def send(self, number: signal.Signals, rank: int) -> None:
        """Send a signal to a rank of this run."""
        os.kill(self._rank_pid(rank), number)

    def _rank_pid(self, rank: int) -> int:
        configs = {os.fsencode(self.directory / "run.yaml"), os.fsencode(self.config)}
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                ours = not configs.isdisjoint((process / "cmdline").read_bytes().split(b"\0"))
                environment = (process / "environ").read_bytes().split(b"\0") if ours else []
                stands_by = ours and os.readlink(process / "fd" / "1") == os.devnull
                if f"RANK={rank}".encode() in environment and not stands_by:
                    return int(process.name)
        raise AssertionError(f"no process is rank {rank} of {self.directory}")


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Until `condition` holds, while `process` lives."""
    while not condition():
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.02)


def contents(directory: Path) -> dict[str, str]:
    """A digest of every file below `directory`."""
    return {
        str(path.relative_to(directory)): hashlib.blake2b(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }
