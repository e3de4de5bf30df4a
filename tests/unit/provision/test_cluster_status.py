"""What `drillyard cluster status` says of a cluster, and what it has cost."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from tests.unit.provision.chart_plans import plan

from drillyard.errors import UnreachableError, UserError
from drillyard.hardware.facts import Fact, FactSource
from drillyard.provision import cluster_status as module
from drillyard.provision.cluster_objects import (
    ClusterObjects,
    PoolStatus,
    QueueStatus,
    ReleaseStatus,
)
from drillyard.provision.cluster_plan import PriceLine
from drillyard.provision.cluster_status import (
    cluster_status,
    cost_so_far,
    drift_lines,
    status_text,
)
from drillyard.provision.terraform_output import Change, PlannedChanges

CREATED, NOW = "2026-03-01T00:00:00Z", datetime(2026, 3, 1, 10, tzinfo=UTC)
POOL = "c-flex-start-queued"


def objects(**changes: Any) -> ClusterObjects:
    """A cluster of ten hours, with one node, three hours old, of a pool that began without any."""
    pool = PoolStatus(POOL, 1, 1, 2, True, ("2026-03-01T07:00:00Z",))
    queue = QueueStatus(POOL, POOL, True, "", 1, 3)
    found = ClusterObjects(
        CREATED, (pool,), (queue,), (ReleaseStatus("kueue", "1", "1", "deployed"),), ()
    )
    return replace(found, **changes)


def dollars(value: float) -> Fact[float]:
    return Fact(value, (FactSource("s", None),))


def priced(*lines: PriceLine) -> Any:
    return replace(plan("a4-highgpu-8g", "flex-start-queued"), prices=lines)


CONTROL = PriceLine("control plane", 1, dollars(0.1))
NODES = PriceLine("GPU nodes", 2, dollars(200.0), running=False, pool=POOL)


def test_the_cost_is_of_what_stands_all_the_time_and_of_nodes_that_are_there() -> None:
    found = cost_so_far(priced(CONTROL, NODES), objects(), NOW)
    assert found is not None
    assert (found.hours, found.usd) == (10.0, 0.1 * 10 + 100.0 * 3)


def test_what_has_no_price_is_named() -> None:
    unknown = PriceLine("disks", 2, None, missing="--hardware")
    found = cost_so_far(priced(CONTROL, unknown), objects(), NOW)
    assert found is not None and found.unpriced == ("disks",)


def status(monkeypatch: pytest.MonkeyPatch, found: Any, **options: Any) -> Any:
    def answer(*_: Any) -> ClusterObjects:
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(module, "cluster_objects_status", answer)
    return cluster_status(priced(CONTROL, NODES), now=NOW, **options)


def test_one_table_has_pools_queues_releases_drift_and_cost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = status(monkeypatch, objects(), drift_of=lambda _: ())
    rows = [line.split("  ") for line in status_text(found).splitlines()]
    assert [row[0].strip() for row in rows[:5]] == ["pool", "queue", "release", "drift", "cost"]
    assert "1 of at most 2 nodes ready" in status_text(found)
    assert "1 admitted, 3 waiting" in status_text(found) and "$301.00" in status_text(found)
    assert found.ready


def test_what_is_missing_has_a_line_and_the_cluster_is_not_ready(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = status(monkeypatch, objects(missing=("kueue 1: is not installed",)))
    assert "missing: kueue 1: is not installed" in status_text(found)
    assert not found.ready


def test_a_part_that_cannot_be_read_does_not_hide_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_: Any) -> tuple[str, ...]:
        raise UserError("no credentials")

    found = status(monkeypatch, objects(), drift_of=refuse)
    assert found.drift is None and found.objects is not None
    assert "not read: drift: no credentials" in status_text(found)
    gone = status(monkeypatch, UnreachableError("cannot be reached"), drift_of=lambda _: ("a",))
    assert (gone.objects, gone.cost, gone.drift) == (None, None, ("a",))
    assert "drift: a" in status_text(gone)


def test_the_json_has_every_part(monkeypatch: pytest.MonkeyPatch) -> None:
    found = status(monkeypatch, objects(), drift_of=lambda _: ()).as_json()
    assert found["ready"] is True and found["drift"] == ()
    assert found["objects"]["queues"][0]["pending"] == 3
    assert found["cost"]["usd"] == 301.0


POOL_ADDRESS, NETWORK = "google_container_node_pool.a", "google_compute_network.b"


def test_each_resource_that_differs_has_one_line_with_who_changed_it() -> None:
    changes = (
        Change(POOL_ADDRESS, "google_container_node_pool", "update", ("nodes",)),
        Change(NETWORK, "google_compute_network", "create"),
        Change("google_compute_router.c", "google_compute_router", "update", ("n",)),
        *(Change(f"google_compute_subnetwork.s{n}", "", "create") for n in range(5)),
    )
    drift = {POOL_ADDRESS: "update", NETWORK: "delete", "google_storage_bucket.d": "delete"}
    found = PlannedChanges(Path("plan"), changes, drift)  # type: ignore[arg-type]
    assert list(drift_lines(found)) == [
        "not made yet: google_compute_subnetwork.s0, google_compute_subnetwork.s1,"
        " google_compute_subnetwork.s2, and 2 more",
        f"{POOL_ADDRESS}: changed by others; up would update it (nodes)",
        f"{NETWORK}: is gone; up would create it",
        "google_compute_router.c: up would update it (n)",
        "google_storage_bucket.d: is gone",
    ]
