"""How long a command takes that does not need torch: `drillyard --help` (goal: under 0.3 s) and `drillyard schema run`.

    python benchmarks/command_start.py [--repeats 11]

Whole processes, from start to exit, after one that is not counted; medians with the extremes.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time

COMMANDS = (["--help"], ["--version"], ["schema", "run"])


def seconds(arguments: list[str]) -> float:
    """Wall seconds of one process."""
    started = time.perf_counter()
    subprocess.run([sys.executable, "-m", "drillyard", *arguments], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=11)
    arguments = parser.parse_args()
    for command in COMMANDS:
        seconds(command)
        runs = [seconds(command) for _ in range(arguments.repeats)]
        low, middle, high = min(runs), statistics.median(runs), max(runs)
        print(f"drillyard {' '.join(command):12} median {middle:.3f} s  ({low:.3f} to {high:.3f})")


if __name__ == "__main__":
    main()
