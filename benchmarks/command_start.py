"""How long commands that need no torch take: `drillyard --help` (goal: under 0.3 s), `drillyard
schema run`, and `drillyard estimate` of a run on 1,024 nodes (goal: under 1 s).

    python benchmarks/command_start.py [--repeats 11]

Whole processes, from start to exit, after one that is not counted; medians with the extremes.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path

RECIPE = Path(__file__).resolve().parents[1] / "recipes" / "llama31-70b-b200"
ESTIMATE = [
    "estimate", str(RECIPE / "run.yaml"), "--config", str(RECIPE / "config.json"),
    "--machine", "a4-highgpu-8g", "--nodes", "1024",
]  # fmt: skip
COMMANDS = {
    "--help": ["--help"],
    "--version": ["--version"],
    "schema run": ["schema", "run"],
    "estimate, 1,024 nodes": ESTIMATE,
    "estimate, 1,024 nodes, auto": [*ESTIMATE, "--set", "training.activation_checkpointing=auto"],
}


def seconds(arguments: list[str]) -> float:
    """Wall seconds of one process."""
    started = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "drillyard", *arguments], check=True, stdout=subprocess.DEVNULL
    )
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=11)
    arguments = parser.parse_args()
    for name, command in COMMANDS.items():
        seconds(command)
        runs = [seconds(command) for _ in range(arguments.repeats)]
        low, middle, high = min(runs), statistics.median(runs), max(runs)
        print(f"drillyard {name:28} median {middle:.3f} s  ({low:.3f} to {high:.3f})")


if __name__ == "__main__":
    main()
