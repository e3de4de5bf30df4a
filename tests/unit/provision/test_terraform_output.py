"""What Terraform prints, as values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from drillyard.errors import UserError
from drillyard.provision.terraform_output import (
    EventLines,
    action_of,
    changes_text,
    planned_changes,
    state_resources,
)


def change(address: str, actions: list[str], **values: Any) -> dict[str, Any]:
    return {
        "address": address,
        "type": address.partition(".")[0],
        "mode": "managed",
        "change": {"actions": actions, **values},
    }


def test_a_plan_is_changes_with_their_reasons_and_drift() -> None:
    pool = "google_container_node_pool"
    document = {
        "resource_changes": [
            change("google_compute_network.a", ["create"], after={"name": "a"}),
            change(
                f"{pool}.b",
                ["update"],
                before={"node_count": 4, "id": "x", "version": "1"},
                after={"node_count": 2, "id": "x"},
                after_unknown={"version": True},
            ),
            change(
                f"{pool}.c",
                ["delete", "create"],
                before={"name": "c"},
                after={"name": "d"},
                replace_paths=[["name"], ["node_config", 0, "machine_type"]],
            ),
            change("google_compute_router.d", ["no-op"]),
            {**change("data.google_project.this", ["read"]), "mode": "data"},
        ],
        "resource_drift": [change("google_compute_router.d", ["delete"])],
    }
    found = planned_changes(Path("plan"), document)
    assert [(each.action, each.because, each.shrinks) for each in found.changes] == [
        ("create", (), False),
        ("update", ("node_count",), True),
        ("replace", ("name", "node_config"), False),
        ("no-op", (), False),
    ]
    assert found.drift == {"google_compute_router.d": "delete"}
    assert changes_text(found.wanted) == [
        "create 1 resource",
        f"update {pool}.b (node_count)",
        f"replace {pool}.c (name, node_config)",
    ]
    assert not found.is_empty and planned_changes(Path("plan"), {}).is_empty


POOL = "google_container_node_pool.a"
OLD = {"version": "1.33", "status": [], "labels": {"a": "1"}, "nodes": 2}


@pytest.mark.parametrize(
    ("drifted", "wanted", "is_drift"),
    [
        ({"version": "1.34"}, {}, False),
        ({"status": [{"phase": "running"}]}, {}, False),
        ({"version": "1.34"}, {"nodes": 4}, False),
        ({"labels": {"a": "2"}}, {"labels": {"a": "1"}}, True),
        ({"labels": None}, {"labels": {"a": "1"}}, True),
        ({"labels": {"a": "1", "b": "2"}}, {"labels": {"a": "1"}}, True),
        ({"labels": {"a": "1", "b": "2"}}, {"labels": {"a": "3", "b": "2"}}, False),
        ({"status": [{"phase": "ended"}], "nodes": 1}, {"nodes": 2}, True),
    ],
)
def test_an_attribute_that_the_cloud_sets_is_not_drift_unless_the_plan_changes_it_back(
    drifted: dict[str, Any], wanted: dict[str, Any], is_drift: bool
) -> None:
    found = {**OLD, **drifted}
    actions = ["update"] if wanted else ["no-op"]
    document = {
        "resource_drift": [change(POOL, ["update"], before=OLD, after=found)],
        "resource_changes": [change(POOL, actions, before=found, after={**found, **wanted})],
    }
    assert planned_changes(Path("plan"), document).drift == ({POOL: "update"} if is_drift else {})


def test_what_is_gone_is_drift_also_where_the_config_does_not_have_it_any_more() -> None:
    document = {"resource_drift": [change(POOL, ["delete"], before=OLD, after=None)]}
    found = planned_changes(Path("plan"), document)
    assert found.drift == {POOL: "delete"} and found.is_empty


def test_an_attribute_that_is_known_after_the_apply_is_not_changed_back() -> None:
    found = {**OLD, "version": "1.34"}
    after = {"nodes": 4, "labels": {"a": "1"}, "status": []}
    unknown = {"version": True}
    planned = change(POOL, ["update"], before=found, after=after, after_unknown=unknown)
    drift = change(POOL, ["update"], before=OLD, after=found)
    document = {"resource_drift": [drift], "resource_changes": [planned]}
    assert planned_changes(Path("plan"), document).drift == {}


@pytest.mark.parametrize(
    ("before", "after", "shrinks"),
    [
        ({"node_count": 2}, {"node_count": 3}, False),
        ({"node_count": None}, {"node_count": 3}, False),
        (
            {"autoscaling": [{"total_max_node_count": 8}]},
            {"autoscaling": [{"total_max_node_count": 4}]},
            True,
        ),
        ({"autoscaling": []}, {"autoscaling": [{"total_max_node_count": 4}]}, False),
    ],
)
def test_a_pool_shrinks_by_its_nodes_or_its_limit(
    before: dict[str, Any], after: dict[str, Any], shrinks: bool
) -> None:
    row = change("google_container_node_pool.a", ["update"], before=before, after=after)
    assert planned_changes(Path("p"), {"resource_changes": [row]}).changes[0].shrinks is shrinks


def test_both_orders_of_delete_and_create_are_a_replacement() -> None:
    assert action_of(["create", "delete"]) == action_of(["delete", "create"]) == "replace"
    assert action_of(["no-op"]) == "no-op"


def test_a_state_lists_managed_resources_with_keys_and_taint() -> None:
    state = {
        "version": 4,
        "resources": [
            {"mode": "data", "type": "google_project", "name": "this", "instances": [{}]},
            {
                "mode": "managed",
                "type": "google_compute_network",
                "name": "a",
                "instances": [{"attributes": {"id": "x"}, "status": "tainted"}],
            },
            {
                "mode": "managed",
                "type": "google_compute_subnetwork",
                "name": "b",
                "instances": [{"index_key": "k", "attributes": {}}],
            },
        ],
    }
    found = state_resources(json.dumps(state))
    assert [(each.address, each.tainted) for each in found] == [
        ("google_compute_network.a", True),
        ('google_compute_subnetwork.b["k"]', False),
    ]
    assert found[0].attributes == {"id": "x"} and state_resources("") == []


def event(kind: str, **content: Any) -> str:
    return json.dumps({"@level": "info", "type": kind, **content})


def hook(seconds: int) -> dict[str, Any]:
    address = "google_container_cluster.cluster"
    return {"resource": {"addr": address}, "action": "create", "elapsed_seconds": seconds}


def test_events_become_a_line_per_resource_and_one_a_minute() -> None:
    lines = EventLines()
    shown = [lines.read(event("apply_start", hook=hook(0)))]
    shown += [lines.read(event("apply_progress", hook=hook(each))) for each in range(10, 130, 10)]
    shown += [lines.read(event("apply_complete", hook=hook(131)))]
    assert [each for each in shown if each] == [
        "creating google_container_cluster.cluster: 60 s",
        "creating google_container_cluster.cluster: 120 s",
        "created google_container_cluster.cluster in 131 s",
    ]


def test_diagnostics_are_kept_and_other_lines_are_the_document() -> None:
    lines = EventLines()
    found = {"severity": "error", "summary": "no", "detail": "why", "address": "a.b"}
    lines.read(event("diagnostic", diagnostic=found))
    lines.read(event("diagnostic", diagnostic={**found, "severity": "warning"}))
    lines.read('{"format_version": "1.2"}')
    lines.read("not JSON")
    assert [(each.text, each.address) for each in lines.errors] == [("no why", "a.b")]
    assert len(lines.warnings) == 1
    assert lines.rest == ['{"format_version": "1.2"}', "not JSON"]


@pytest.mark.parametrize("text", ["{", "[]", "3", "[" * 100_000])
def test_a_damaged_state_is_an_error_with_what_to_do(text: str) -> None:
    with pytest.raises(UserError, match="gcloud storage ls --all-versions"):
        state_resources(text, "gcloud storage ls --all-versions")
