"""How long `drillyard runs list` takes over 500 JobSets of a real API server (goal: under 2 s).

    python benchmarks/kubernetes_list.py [--runs 500] [--repeats 7]

Starts the tests' cluster (as root; .ci/tools/kubernetes has built its programs), submits a run, and
copies its JobSet, suspended, under other names. Whole processes are timed: `runs list`, `runs list
--json` and `runs status` of one; every list is checked to have all runs. Medians with the extremes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.integration.kubernetes.cluster import started
from tests.integration.kubernetes.team import Team

BATCH = 50


def copied(team: Team, count: int) -> None:
    """`count` suspended JobSets like that of the run `one`, each of a run of its own."""
    original = team.jobset("one")
    kept = {
        key: original["metadata"][key]
        for key in ("labels", "annotations")
        if key in original["metadata"]
    }
    made = []
    for number in range(count):
        name = f"many-{number:03d}"
        text = json.dumps(
            {**original, "metadata": {"name": name, "namespace": team.name, **kept}, "status": None}
        )
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary, started(Path(temporary, "c")) as cluster:
        place = Path(temporary, "team/of/one")
        place.mkdir(parents=True)
        team = Team(cluster, "many", place)
        team.environment["KUBECONFIG"] = str(cluster.kubeconfig)
        run = team.run_config("one", training__steps=2)
        handle = team.drillyard("launch", run, "--cluster", team.cluster_config()).stdout.strip()
        team.drillyard("runs", "wait", handle)
        copied(team, arguments.runs - 1)
        listed = team.drillyard("runs", "list", "--json").stdout
        assert (
            sum(f"/many-{number:03d}" in listed for number in range(arguments.runs - 1))
            == arguments.runs - 1
        )
        for words in (("runs", "list"), ("runs", "list", "--json"), ("runs", "status", handle)):
            print(
                f"{' '.join(words[:3])}:"
                f" {seconds(lambda words=words: team.drillyard(*words), arguments.repeats)}"
            )


if __name__ == "__main__":
    main()
