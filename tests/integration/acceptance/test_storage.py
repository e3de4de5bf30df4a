"""Storage is measured in a directory that is gone afterwards; a node that cannot write is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.integration.acceptance.node_jobs import NodeJob, judged

from drillyard.acceptance.check import Expected, Level
from drillyard.acceptance.checks import storage
from drillyard.acceptance.results import Status
from drillyard.hardware import load_catalog

Start = Callable[..., NodeJob]
SMALL_DISK = 'mount -t tmpfs -o size=4m none "$0" && exec "$@"'


def step(size: int, seconds: float = 60, **more: Any) -> dict[str, Any]:
    arguments = {"bytes": size, "files": 100, "files_seconds": 10}
    return {"probe": "storage", "scope": "node", "seconds": seconds, "arguments": arguments, **more}


def test_what_nodes_write_is_measured_and_removed(start: Start, tmp_path: Path) -> None:
    acceptance = tmp_path / "run-0" / "acceptance"
    acceptance.mkdir(parents=True)
    (acceptance / "notes.txt").write_text("kept")
    (acceptance / "scratch-0-1-0123456789abcdef").mkdir()
    evidence = start([step(1 << 20, on=[0]), step(9 << 20)], 2).wait()
    assert [seen.nodes for seen in evidence.of("storage")] == [(0,), (0,), (1,)]
    assert [seen.error for seen in evidence.of("storage")] == [None] * 3
    left = sorted(each.name for each in acceptance.iterdir())
    assert left == ["evidence.json", "notes.txt"]

    full = evidence.model_copy(update={"level": Level.standard.value})
    results = {
        each.metric: each
        for each in judged(full, checkpoint_bytes=1e9).results
        if each.check == "storage"
    }
    assert set(results) == {"write", "write of all nodes", "read", "files", "save time"}
    assert {each.status for each in results.values()} == {Status.recorded}
    rate, seconds = results["write of all nodes"].observed, results["save time"].observed
    assert isinstance(rate, float) and isinstance(seconds, float)
    assert seconds == pytest.approx(1.0 / rate)

    slower = [
        seen.model_copy(
            update={
                "values": {
                    **(seen.values or {}),
                    "write": {
                        key: value * (3 if key == "seconds" else 1 / 3)
                        for key, value in (seen.values or {})["write"].items()
                    },
                }
            }
        )
        for seen in full.observations
    ]
    outcome = judged(full.model_copy(update={"observations": tuple(slower)}), baseline=full)
    statuses = {each.metric: each.status for each in outcome.results if each.check == "storage"}
    assert statuses["write"] is statuses["write of all nodes"] is Status.warn


def test_a_node_whose_storage_is_full(start: Start, tmp_path: Path) -> None:
    acceptance = tmp_path / "run-0" / "acceptance"
    acceptance.mkdir(parents=True)
    prefix = ["unshare", "-m", "sh", "-c", SMALL_DISK, str(acceptance)]
    evidence = start([step(16 << 20)], 3, prefixes={2: prefix}).wait()
    full = evidence.model_copy(update={"level": Level.standard.value})
    failed = [
        each
        for each in storage.judge(full, Expected(load_catalog(None), None, None, None))
        if each.status is Status.fail
    ]
    assert [each.culprits for each in failed] == [(2,)]
    assert "0.0 GB free" in failed[0].reason


def test_a_killed_probe_leaves_nothing(start: Start, tmp_path: Path) -> None:
    (seen,) = start([step(4 << 30, seconds=1.0)], 1).wait().of("storage")
    assert seen.values is None and seen.error is not None
    left = sorted(each.name for each in (tmp_path / "run-0" / "acceptance").iterdir())
    assert left == ["evidence.json"]
