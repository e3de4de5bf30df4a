"""How long `drillyard runs list` takes over 500 runs of a real Slurm cluster (goal: under 2 s).

    python benchmarks/launch_list.py [--runs 500] [--repeats 7]

Starts Slurm on this machine as the tests do (root, Debian's slurm-wlm and munge), submits a sweep
as one array job, whose first points run while the others wait, and times whole processes: `runs
list`, `runs list --json` and `runs status` of one. Every list is checked to have all runs. Medians
with the extremes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.integration.launch.slurm_cluster import slurm_cluster

RUN = "name: many\noutput: runs\nworkload: {command: [sleep, '600'], per: node}\n"
CLUSTER = """\
name: quad
platform: slurm
nodes: 1
processes_per_node: 1
slurm: {partition: main, gres: "gpu:8"}
"""


def drillyard(directory: Path, environment: dict[str, str], *arguments: str) -> tuple[float, str]:
    """Wall seconds of one process, and what it printed."""
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "drillyard", *arguments],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    seconds = time.perf_counter() - started
    if done.returncode:
        sys.exit(
            f"drillyard {' '.join(arguments[:3])} ...: exit code {done.returncode}\n{done.stderr}"
        )
    return seconds, done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary, slurm_cluster() as cluster:
        directory = Path(temporary)
        home = {
            name: str(directory / name)
            for name in ("XDG_CONFIG_HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME")
        }
        environment = {**os.environ, **cluster.environment, **home}
        (directory / "run.yaml").write_text(RUN)
        (directory / "cluster.yaml").write_text(CLUSTER)
        points = ",".join(f"p{number}" for number in range(arguments.runs))
        sweep = f"workload.environment.POINT={points}"
        submitted, handles = drillyard(
            directory, environment, "launch", "run.yaml", "--sweep", sweep
        )
        runs = handles.split()
        print(f"launch --sweep, {len(runs)} points as one array: {submitted:.2f} s")
        for name, command in (
            ("runs list", ["list"]),
            ("runs list --json", ["list", "--json"]),
            ("runs status", ["status", runs[-1]]),
        ):
            taken = []
            for _ in range(arguments.repeats):
                seconds, printed = drillyard(directory, environment, "runs", *command)
                taken.append(seconds)
            if command[0] == "list":
                listed = (
                    len(json.loads(printed)["runs"])
                    if "--json" in command
                    else len(printed.splitlines()) - 1
                )
                assert listed == arguments.runs, f"{listed} of {arguments.runs} runs were listed"
            print(
                f"{name:18} median {statistics.median(taken):.2f} s  ({min(taken):.2f} to"
                f" {max(taken):.2f})"
            )
        cluster.run("scancel", "--me", check=False)


if __name__ == "__main__":
    main()
