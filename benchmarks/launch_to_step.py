"""Times of a launched run on Kubernetes, Slurm and ssh: to its first step, and from SIGKILL of a
rank to the next one.

    python benchmarks/launch_to_step.py [--repeats 3] [--on kubernetes slurm ssh]

The same tiny GPT-2 on two nodes of one rank, on the clusters that the tests start (as root; `make
test` has installed them), with a checkpoint every 20 steps. One after the other, by turns. Medians
with the extremes.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.integration.kubernetes.cluster import started
from tests.integration.kubernetes.team import Team, until
from tests.integration.launch.desk import Desk
from tests.integration.launch.slurm_cluster import slurm_cluster
from tests.integration.launch.sshd_hosts import two_hosts
from tests.integration.launch.test_slurm import sit_down
from tests.integration.launch.test_ssh import cluster as pair_of
from tests.integration.tiny_run import write_config, write_rows

from drillyard.telemetry.jsonlines import decode

SETTINGS: dict[str, Any] = {
    "training__steps": 100,
    "checkpoint": {"every_steps": 20},
    "logging": {"every_steps": 1, "tensorboard": False},
}
NODE_RANK = 1


@dataclass(frozen=True)
class Place:
    """Where runs are launched: `launch` returns a handle, `wait` waits for its end, and runs are in
    `runs`."""

    launch: Callable[[str], str]
    wait: Callable[[str], object]
    runs: Path


@contextlib.contextmanager
def on_kubernetes(directory: Path) -> Iterator[Place]:
    with started(directory / "c") as cluster:
        place = directory / "team/of/one"
        place.mkdir(parents=True)
        team = Team(cluster, "timed", place)
        team.environment["KUBECONFIG"] = str(cluster.kubeconfig)

        def launch(name: str) -> str:
            config = team.run_config(name, **SETTINGS)
            return team.drillyard(
                "launch", config, "--cluster", team.cluster_config()
            ).stdout.strip()

        yield Place(
            launch, lambda handle: team.drillyard("runs", "wait", handle), team.shared / "runs"
        )


def at_desk(desk: Desk) -> Place:
    write_rows(desk.directory / "rows.jsonl")

    def launch(name: str) -> str:
        # A cache for each, as on Kubernetes.
        cache = str(desk.directory / f"cache-{name}")
        return desk.launch(
            write_config(desk.directory, name, data__cache_directory=cache, **SETTINGS)
        )

    return Place(launch, lambda handle: desk.say("runs", "wait", handle), desk.directory / "runs")


@contextlib.contextmanager
def on_slurm(directory: Path) -> Iterator[Place]:
    with slurm_cluster() as cluster:
        yield at_desk(sit_down(cluster, directory / "slurm"))


@contextlib.contextmanager
def on_ssh(directory: Path) -> Iterator[Place]:
    with two_hosts(directory / "hosts") as hosts:
        yield at_desk(Desk(directory / "ssh", pair_of(hosts)))


PLACES = {"kubernetes": on_kubernetes, "slurm": on_slurm, "ssh": on_ssh}


def first_steps(run: Path) -> int:
    """The attempts of a run that have logged their first step."""
    path = run / "events.jsonl"
    found = [decode(line) for line in path.read_bytes().splitlines()] if path.exists() else []
    return sum(each is not None and each.get("event") == "first_step" for each in found)


def rank_of(rank: int) -> int:
    """The process of a rank of the only run that there is."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (path / "environ").read_bytes().split(b"\0")
            if f"RANK={rank}".encode() in words and b"drillyard" in (path / "cmdline").read_bytes():
                found.append(int(path.name))
    return min(found)


def timed(place: Place, name: str) -> tuple[float, float]:
    """Seconds from `launch` to the first step, and from SIGKILL to that of the next attempt."""
    run = place.runs / name
    begun = time.time()
    handle = place.launch(name)
    until(lambda: first_steps(run) > 0)
    begins = time.time() - begun
    until(lambda: list(run.glob("checkpoints/step-*/manifest.json")))
    os.kill(rank_of(NODE_RANK), signal.SIGKILL)
    killed = time.time()
    until(lambda: first_steps(run) > 1)
    returns = time.time() - killed
    place.wait(handle)
    return begins, returns


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--on", nargs="+", choices=PLACES, default=list(PLACES))
    arguments = parser.parse_args()
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in arguments.on}
    with tempfile.TemporaryDirectory() as temporary, contextlib.ExitStack() as open_places:
        places = {
            name: open_places.enter_context(PLACES[name](Path(temporary))) for name in arguments.on
        }
        for number in range(arguments.repeats):
            for name, place in places.items():
                found[name].append(timed(place, f"timed-{number}"))
                print(
                    f"  {name}: {found[name][-1][0]:.1f} s, {found[name][-1][1]:.1f} s", flush=True
                )
    for name, pairs in found.items():
        for what, values in zip(
            ("launch to first step", "SIGKILL to first step"), zip(*pairs, strict=True), strict=True
        ):
            print(
                f"{name}: {what} {statistics.median(values):.1f} s ({min(values):.1f} to"
                f" {max(values):.1f})"
            )


if __name__ == "__main__":
    main()
