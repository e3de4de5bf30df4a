"""Seconds from the kill of a rank to the first new step, by parts.

`drillyard train` on two ranks, a rank killed with SIGKILL several times, each time some steps after
a checkpoint. The moment of the kill is this script's, all others are those of the run's own events.
Medians over the kills.

    python benchmarks/restart.py [--standby] [--kills 5] [--hidden 256] [--layers 4]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.workload import llama_run

# Each part ends at this event of the new attempt (the first two: of the supervisor).
PARTS = {
    "failure": "death noticed, cause found",
    "restart": "all ranks ended",
    "round_start": "new ranks: processes, imports, rendezvous, caches opened",
    "parameters": "model built and sharded",
    "resume": "checkpoint verified and loaded",
    "first_step": "first step",
}
STEPS_AFTER_CHECKPOINT = 60
"""Enough for processes that stand by to have imported everything."""


def rank_pids(run_directory: Path) -> list[int]:
    """The processes that are ranks of this run; standbys for the next attempt are left out."""
    saved = os.fsencode(run_directory / "run.yaml")
    pids = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            ours = saved in (process / "cmdline").read_bytes().split(b"\0")
            if ours and os.readlink(process / "fd" / "1") != os.devnull:
                pids.append(int(process.name))
    return pids


def events(run_directory: Path) -> list[dict[str, Any]]:
    """The whole lines of events.jsonl so far."""
    path = run_directory / "events.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def wait_for_steps(run_directory: Path, attempt: int, process: subprocess.Popen[bytes]) -> None:
    """Wait until this attempt has saved a checkpoint and trained some more steps."""
    while process.poll() is None:
        ours = [event for event in events(run_directory) if event.get("round") == attempt]
        saved = [event["step"] for event in ours if event["event"] in ("checkpoint", "resume")]
        last = max((event["step"] for event in ours if event["event"] == "step"), default=0)
        if saved and last >= saved[0] + STEPS_AFTER_CHECKPOINT:
            return
        time.sleep(0.05)
    raise SystemExit(
        f"the run ended with exit code {process.returncode} before it was killed: see"
        f" {run_directory}"
    )


def parts_of(attempt: int, killed: float, run_directory: Path) -> dict[str, float]:
    """Seconds of each part of the restart that begins `attempt`, whose rank was killed at `killed`
    (epoch)."""
    parts, before = {}, killed
    for name in PARTS:
        number = attempt - 1 if name == "failure" else attempt
        moment = next(
            datetime.fromisoformat(event["time"]).timestamp()
            for event in events(run_directory)
            if event["event"] == name and event.get("round") == number
        )
        parts[name], before = moment - before, moment
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--standby", action="store_true", help="with ranks that stand by")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--sequence-length", type=int, default=64)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        settings = llama_run(
            Path(folder),
            "restart",
            hidden=arguments.hidden,
            layers=arguments.layers,
            heads=4,
            kv_heads=4,
            sequence_length=arguments.sequence_length,
            micro_batch_size=4,
            vocab_size=2048,
            documents=500,
            words=300,
            training={"steps": 1_000_000, "precision": "fp32", "compile": False, "device": "cpu"},
            checkpoint={"every_steps": 20},
            logging={"tensorboard": False},
        )
        config = Path(folder) / "run.yaml"
        config.write_text(json.dumps(settings))
        directory = Path(folder) / "runs" / "restart"
        command = [sys.executable, "-m", "drillyard", "train", str(config), "--nproc-per-node", "2"]
        standby = "--standby" if arguments.standby else "--no-standby"
        process = subprocess.Popen(
            [*command, "--max-restarts", "100", standby],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        kills, killed = [], time.time()
        try:
            for number in range(arguments.kills + 1):
                wait_for_steps(directory, number, process)
                if number:
                    kills.append(parts_of(number, killed, directory))
                if number < arguments.kills:
                    killed = time.time()
                    os.kill(rank_pids(directory)[number % 2], signal.SIGKILL)
        finally:
            process.terminate()
            process.wait()
    totals = [sum(parts.values()) for parts in kills]
    print(f"from the kill to the first new step: {statistics.median(totals):.2f} s", end="")
    print(f" ({min(totals):.2f} to {max(totals):.2f}, {len(kills)} kills)")
    for name, text in PARTS.items():
        seconds = [parts[name] for parts in kills]
        print(
            f"  {statistics.median(seconds):6.2f} s  ({min(seconds):.2f} to {max(seconds):.2f}) "
            f" {text}"
        )


if __name__ == "__main__":
    main()
