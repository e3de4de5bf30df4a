"""Goodput that a run reports against goodput by a stopwatch that sees only its processes and
printed lines.

One run on two ranks with five faults: both ranks killed in turn, a rank stopped until the watchdog
ends the attempt, the whole run asked to stop (and started again), the supervisor killed (and
started again). The stopwatch notes when each line of a step arrives; a step's time is that since
the line before it in the same attempt, an attempt's first step counts as a median one, repeated
steps count nothing. Wall time is from the first start to the last exit.

    python benchmarks/goodput_stopwatch.py [--steps 600] [--hidden 256]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.restart import rank_pids
from benchmarks.workload import llama_run

WATCHDOG_SECONDS = 15
STALL_FACTOR = 3


class Stopwatch:
    """Starts the run again and again until it is done, striking once at each of the given steps."""

    def __init__(
        self,
        command: list[str],
        run_directory: Path,
        faults: dict[int, Callable[[Stopwatch], None]],
    ) -> None:
        self.command, self.run_directory, self.faults = command, run_directory, faults
        self.attempts: list[list[tuple[int, float]]] = []
        self.process: subprocess.Popen[str]

    def run(self) -> float:
        """Run to the end; returns wall seconds from the first start to the last exit."""
        started = time.monotonic()
        code = -1
        while code != 0:
            self.attempts.append([])
            self.process = subprocess.Popen(
                self.command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
            assert self.process.stdout is not None
            for line in self.process.stdout:
                self.note(line)
            code = self.process.wait()
            if code not in (0, 85, -signal.SIGKILL):
                raise SystemExit(f"the run failed with exit code {code}: see {self.run_directory}")
        return time.monotonic() - started

    def note(self, line: str) -> None:
        """Note the arrival of a step's line, and strike when one of the faults is due."""
        if (
            not line.startswith("{")
            or "step" not in (record := json.loads(line))
            or "loss" not in record
        ):
            return
        step = int(record["step"])
        if self.attempts[-1] and step <= self.attempts[-1][-1][0]:
            self.attempts.append([])
        self.attempts[-1].append((step, time.monotonic()))
        due = [at for at in self.faults if at <= step]
        for at in due:
            self.faults.pop(at)(self)

    def productive_seconds(self) -> float:
        """The time of all steps, each counted once, as it was when first done."""
        gaps = [
            after - before
            for lines in self.attempts
            for (_, before), (_, after) in itertools.pairwise(lines)
        ]
        median = statistics.median(gaps)
        seen: set[int] = set()
        total = 0.0
        for lines in self.attempts:
            before = None
            for step, arrival in lines:
                seconds = median if before is None else arrival - before
                before = arrival
                if step not in seen:
                    total += min(seconds, STALL_FACTOR * median)
                seen.add(step)
        return total


def to_rank(number: signal.Signals, rank: int) -> Callable[[Stopwatch], None]:
    """Send a signal to a rank."""
    return lambda watch: os.kill(sorted(rank_pids(watch.run_directory))[rank], number)


def to_supervisor(number: signal.Signals) -> Callable[[Stopwatch], None]:
    """Send a signal to the process that was started."""
    return lambda watch: watch.process.send_signal(number)


FAULTS = [
    to_rank(signal.SIGKILL, 0),
    to_rank(signal.SIGKILL, 1),
    to_rank(signal.SIGSTOP, 1),
    to_supervisor(signal.SIGTERM),
    to_supervisor(signal.SIGKILL),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        settings = llama_run(
            Path(folder),
            "goodput",
            hidden=arguments.hidden,
            layers=arguments.layers,
            heads=4,
            kv_heads=4,
            sequence_length=64,
            micro_batch_size=4,
            vocab_size=2048,
            documents=500,
            words=300,
            training={
                "steps": arguments.steps,
                "precision": "fp32",
                "compile": False,
                "device": "cpu",
            },
            checkpoint={"every_steps": arguments.steps // 15},
            logging={"tensorboard": False},
        )
        config = Path(folder) / "run.yaml"
        config.write_text(json.dumps(settings))
        directory = Path(folder) / "runs" / "goodput"
        command = [sys.executable, "-m", "drillyard", "train", str(config), "--nproc-per-node", "2"]
        command += [
            "--console",
            "json",
            "--max-restarts",
            "10",
            "--watchdog",
            str(WATCHDOG_SECONDS),
        ]
        moments = [arguments.steps * part // 6 + 7 for part in range(1, 6)]
        watch = Stopwatch(command, directory, dict(zip(moments, FAULTS, strict=True)))
        wall = watch.run()
        productive = watch.productive_seconds()
        summary = json.loads((directory / "summary.json").read_text())
    goodput = productive / wall
    print(f"stopwatch: wall {wall:.2f} s, productive {productive:.2f} s, goodput {goodput:.4f}")
    seconds = summary["seconds_by_category"]
    print(
        f"summary:   wall {summary['wall_seconds']:.2f} s, productive"
        f" {seconds['productive']:.2f} s, ",
        end="",
    )
    print(f"goodput {summary['goodput']:.4f}")
    print(
        f"relative difference {summary['goodput'] / goodput - 1:+.3%}; restarts"
        f" {summary['restarts']}"
    )


if __name__ == "__main__":
    main()
