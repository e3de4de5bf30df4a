"""Nodes of a Kubernetes cluster: free ones, those with fewer GPUs, and those that a run may not
use."""

from __future__ import annotations

import json
from typing import Any

from tests.unit.launch.requests import WORKLOAD, cluster, planned, request

from drillyard.launch.kubernetes.nodes import nodes_with_free_gpus, short_of_gpus, usable_nodes
from drillyard.launch.kubernetes.release import VALUES


def node(name: str, gpus: int | None, **changes: Any) -> dict[str, Any]:
    ready = {"type": "Ready", "status": changes.get("ready", "True")}
    offered = {} if gpus is None else {"nvidia.com/gpu": str(gpus)}
    return {
        "metadata": {"name": name, "labels": changes.get("labels", {})},
        "spec": {"unschedulable": changes.get("cordoned", False)},
        "status": {"conditions": [ready], "allocatable": {"cpu": "8", **offered}},
    }


def pod(on: str, gpus: int, phase: str = "Running") -> dict[str, Any]:
    container = {"resources": {"limits": {"nvidia.com/gpu": str(gpus)}}}
    return {
        "spec": {"nodeName": on, "containers": [container]},
        "status": {"phase": phase},
    }


def test_nodes_whose_gpus_no_pod_has_are_idle() -> None:
    nodes = [node("a", 8), node("b", 8), node("c", 7), node("d", None)]
    pods = [pod("a", 1), pod("b", 8, "Succeeded")]
    assert nodes_with_free_gpus(nodes, pods, 8) == ["b"]


def test_a_node_with_fewer_gpus_is_named_and_one_of_another_kind_only_where_it_is_needed() -> None:
    nodes = [node("a", 8), node("c", 7), node("d", None)]
    assert list(short_of_gpus(nodes, 8, wanted=1)) == ["c"]
    assert list(short_of_gpus(nodes, 8, wanted=2)) == ["c", "d"]
    assert short_of_gpus(nodes, 8, wanted=1)["c"].startswith("offers 7 of 8 ")


def test_nodes_that_the_pods_cannot_use_do_not_count() -> None:
    nodes = [
        node("a", 8, labels={"pool": "x"}),
        node("b", 8, labels={"pool": "x"}, cordoned=True),
        node("c", 8, labels={"pool": "x"}, ready="False"),
        node("d", 8),
        node("e", 8, labels={"pool": "x"}),
    ]
    found = usable_nodes(nodes, {"pool": "x"}, ["e"])
    assert [each["metadata"]["name"] for each in found] == ["a"]


def test_excluded_nodes_are_values_of_the_chart() -> None:
    settings = {"kubernetes": "{volume_claim: v}", "storage": "{directory: /data}", "image": "i:1"}
    text = cluster("kubernetes", None, 2, processes_per_node="1", **settings)
    plain = json.loads(planned(request(text, WORKLOAD)).file(VALUES).content)
    without = planned(request(text, WORKLOAD, exclude=("n1", "n2"))).file(VALUES).content
    assert json.loads(without) == {**plain, "excludeNodes": ["n1", "n2"]}
