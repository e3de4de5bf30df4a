"""What a job's containers do on Vertex AI: their command is started once per replica, as the
service does it, with CLUSTER_SPEC and the bucket behind the real gcsfuse in the place of /gcs.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.integration import waiting
from tests.integration.gcs import BUCKET, Bucket
from tests.integration.launch.agents import free_port_range
from tests.integration.launch.vertex_place import Place
from tests.integration.launch.vertex_server import Replicas, Vertex

from drillyard.launch import prepared_run as job_module
from drillyard.launch import run_changes
from drillyard.launch.request import LogSelection
from drillyard.launch.run_status import State
from drillyard.launch.vertex import config

until = partial(waiting.until, seconds=90.0)


@pytest.fixture
def mounted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory in the place of /gcs, in which the bucket is mounted with gcsfuse."""
    made = Bucket(tmp_path)
    made.start_server()
    made.mount()
    gcs = tmp_path / "gcs"
    gcs.mkdir()
    (gcs / BUCKET).symlink_to(made.place)
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", made.endpoint)
    monkeypatch.setattr(config, "MOUNT", str(gcs))
    port = free_port_range()
    monkeypatch.setattr(job_module, "port_of", lambda handle: port)
    yield gcs
    made.discard()


@pytest.fixture
def replicas(mounted: Path) -> Iterator[Callable[[Vertex], Replicas]]:
    started: list[Replicas] = []

    def start(vertex: Vertex) -> Replicas:
        started.append(Replicas(vertex, vertex.newest, mounted))
        vertex.enter(vertex.newest, "RUNNING")
        return started[-1]

    yield start
    for each in started:
        each.end()


def script(name: str, text: str, **settings: Any) -> str:
    message = {
        "name": name,
        "processes_per_node": 1,
        "workload": {"command": ["sh", "-c", text], **settings},
    }
    return json.dumps(message)


def test_replicas_find_their_ranks_and_each_other(
    mounted: Path, replicas: Callable[[Vertex], Replicas], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (
        'echo "rank $NODE_RANK of $NNODES at $MASTER_ADDR, $GREETING"; sleep 1; echo "again'
        ' $NODE_RANK"'
    )
    monkeypatch.setenv("A_GREETING", "hello")
    with Vertex() as vertex:
        place = Place(
            vertex,
            nodes="3",
            network_stack="ethernet",
            environment="{GREETING: '${env:A_GREETING}'}",
        )
        run_changes.submit(place.launcher, place.plan(script("ranks", text)))
        running = replicas(vertex)
        lines: list[bytes] = []
        follower = threading.Thread(
            target=lambda: lines.extend(place.launcher.logs("ranks", LogSelection(follow=True)))
        )
        follower.start()
        running.run(max_restarts=0)
        follower.join(60)
        status = place.launcher.status("ranks")
        assert status.state is State.succeeded, status
        log = b"".join(lines).decode()
        for node in range(3):
            assert f"rank {node} of 3 at 127.0.0.1, hello" in log
            assert f"again {node}" in log
        again = b"".join(place.launcher.logs("ranks", LogSelection(node=2, tail=2))).decode()
        assert "2: " in again
        assert len(again.splitlines()) == 2
        fetched = mounted.parent / "fetched"
        place.launcher.fetch("ranks", ["launch/job.json"], str(fetched))
        assert json.loads((fetched / "launch/job.json").read_text())["run"] == "ranks"


def test_a_preempted_replica_joins_again_and_the_run_goes_on(
    mounted: Path, replicas: Callable[[Vertex], Replicas]
) -> None:
    # The first round waits to be disturbed; the second one ends.
    text = 'echo "round $ROUND on $NODE_RANK"; [ "$ROUND" -gt 0 ] || sleep 120'
    with Vertex() as vertex:
        place = Place(
            vertex,
            nodes="2",
            network_stack="ethernet",
            environment="{ROUND: '{round}'}",
            consumption="spot",
        )
        run_changes.submit(place.launcher, place.plan(script("disturbed", text)))
        running = replicas(vertex)
        until(lambda: place.launcher.status("disturbed").state is State.running)
        running.kill(1, 0)
        running.run()
        status = place.launcher.status("disturbed")
        assert status.state is State.succeeded, status
        log = b"".join(place.launcher.logs("disturbed", LogSelection())).decode()
        assert "round 1 on 0" in log
        assert "round 1 on 1" in log
        state = json.loads(place.launcher.read("disturbed", "launch/state.json", 0))
        assert (state["round"], state["failures"]) == (1, 0)


def test_a_refused_run_is_started_once_however_often_the_service_starts_its_containers(
    mounted: Path, replicas: Callable[[Vertex], Replicas]
) -> None:
    with Vertex() as vertex:
        place = Place(vertex, nodes="2", network_stack="ethernet")
        run_changes.submit(
            place.launcher,
            place.plan(script("refused", "echo started; echo bad config >&2; exit 2")),
        )
        running = replicas(vertex)
        running.run(max_restarts=4)
        assert running.restarts == 4
        status = place.launcher.status("refused")
        assert status.state is State.failed
        assert status.failure is not None
        assert status.failure.exit_code == 2
        log = b"".join(place.launcher.logs("refused", LogSelection())).decode()
        assert log.count("=== attempt 0 of refused") == 2, log
        assert "=== attempt 1" not in log
