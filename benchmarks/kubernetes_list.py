"""How long `drillyard runs list` takes over 500 JobSets of a real API server (goal: under 2 s).

    python benchmarks/kubernetes_list.py [--runs 500] [--repeats 7]

Starts the tests' cluster (as root; .ci/tools/kubernetes has built its programs), submits a run, and copies its JobSet,
suspended, under other names. Whole processes are timed: `runs list`, `runs list --json` and `runs status` of one; every
list is checked to have all runs. Before that, of three runs on two pods: the time from `launch` to the first step, and
from SIGKILL of a rank to the first step after it, with a checkpoint every 20 steps. Medians with the extremes.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.integration.kubernetes.cluster import started
from tests.integration.kubernetes.team import Team, until
from tests.integration.kubernetes.test_runs import processes

from drillyard.telemetry.jsonlines import decode

BATCH = 50


def copied(team: Team, count: int) -> None:
    """`count` suspended JobSets like that of the run `one`, each of a run of its own."""
    original = team.jobset("one")
    kept = {key: original["metadata"][key] for key in ("labels", "annotations") if key in original["metadata"]}
    made = []
    for number in range(count):
        name = f"many-{number:03d}"
        text = json.dumps({**original, "metadata": {"name": name, "namespace": team.name, **kept}, "status": None})
        document: dict[str, Any] = json.loads(text.replace('"one"', f'"{name}"'))
        del document["status"]
        document["spec"]["suspend"] = True
        made.append(document)
    for start in range(0, count, BATCH):
        team.cluster.apply(*made[start : start + BATCH])


def seconds(call: Callable[[], Any], repeats: int) -> str:
    """The median of some calls, with the extremes."""
    found = []
    for _ in range(repeats):
        begun = time.perf_counter()
        call()
        found.append(time.perf_counter() - begun)
    return f"{statistics.median(found):.2f} s ({min(found):.2f} to {max(found):.2f})"


def began(team: Team, name: str, attempt: int) -> bool:
    """Whether an attempt of a run has logged its first step."""
    path = team.shared / "runs" / name / "events.jsonl"
    found = [decode(line) for line in path.read_bytes().splitlines()] if path.exists() else []
    return sum(each.get("event") == "first_step" for each in found) > attempt


def first_step_times(team: Team, repeats: int) -> tuple[list[float], list[float]]:
    """Seconds from `launch` to the first step, and from SIGKILL of a rank to the first step of the next attempt."""
    begins, returns = [], []
    for number in range(repeats):
        name = f"timed-{number}"
        run = team.run_config(name, training__steps=100, checkpoint={"every_steps": 20}, logging={"every_steps": 1})
        begun = time.time()
        handle = team.drillyard("launch", run, "--cluster", team.cluster_config()).stdout.strip()
        until(lambda name=name: began(team, name, 0))
        begins.append(time.time() - begun)
        until(lambda name=name: list((team.shared / "runs" / name).glob("checkpoints/step-*/manifest.json")))
        os.kill(processes(team.pods(name)[1])[-1], signal.SIGKILL)
        killed = time.time()
        until(lambda name=name: began(team, name, 1))
        returns.append(time.time() - killed)
        team.drillyard("runs", "wait", handle)
    return begins, returns


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--timed", type=int, default=3, help="runs whose first steps are timed")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary, started(Path(temporary, "c")) as cluster:
        place = Path(temporary, "team/of/one")
        place.mkdir(parents=True)
        team = Team(cluster, "many", place)
        team.environment["KUBECONFIG"] = str(cluster.kubeconfig)
        begins, returns = first_step_times(team, arguments.timed)
        for what, found in (("launch to first step", begins), ("SIGKILL to first step", returns)):
            print(f"{what}: {statistics.median(found):.1f} s ({min(found):.1f} to {max(found):.1f})", flush=True)
        run = team.run_config("one", training__steps=2)
        handle = team.drillyard("launch", run, "--cluster", team.cluster_config()).stdout.strip()
        team.drillyard("runs", "wait", handle)
        copied(team, arguments.runs - 1)
        listed = team.drillyard("runs", "list", "--json").stdout
        assert sum(f"/many-{number:03d}" in listed for number in range(arguments.runs - 1)) == arguments.runs - 1
        for words in (("runs", "list"), ("runs", "list", "--json"), ("runs", "status", handle)):
            print(f"{' '.join(words[:3])}: {seconds(lambda words=words: team.drillyard(*words), arguments.repeats)}")


if __name__ == "__main__":
    main()
