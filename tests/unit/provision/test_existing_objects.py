"""What of a cluster that somebody else has made is used, added or in the way."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.launch.requests import request

from drillyard.provision.existing_objects import Key, ObjectState, adapted
from drillyard.provision.foreign_queues import queue_fit
from drillyard.provision.helm_releases import own_release
from drillyard.provision.provisioner import plan_cluster

FILE = """
name: team-a
platform: kubernetes
nodes: 2
machine: gpu-h100-sxm
storage: {directory: /data}
"""
GPU = "nvidia.com/gpu"
LEVEL = "pod-security.kubernetes.io/enforce"
NAMESPACE: Key = ("Namespace", "", "team-a")
QUEUE: Key = ("ClusterQueue", "", "gpus")


def values(section: str = "{namespace: team-a, queue: gpus, volume_claim: shared}") -> Any:
    plan = plan_cluster(request(f"{FILE}kubernetes: {section}\n").cluster)
    return own_release(plan.releases).values


def body(**spec: Any) -> dict[str, Any]:
    return {"metadata": {}, "spec": spec}


def namespace(name: str = "team-a", **labels: str) -> dict[str, Any]:
    return {"metadata": {"labels": {"kubernetes.io/metadata.name": name, **labels}}}


def cluster_queue(quota: int | str = 16, resources: tuple[str, ...] = (), **spec: Any) -> Any:
    named = (GPU, "cpu", "memory", *resources)
    group = {
        "coveredResources": list(named),
        "flavors": [
            {"name": "f", "resources": [{"name": each, "nominalQuota": quota} for each in named]}
        ],
    }
    return body(**{"namespaceSelector": {}, "resourceGroups": [group], **spec})


def compared(
    given: Any, there: dict[Key, Any], ours: tuple[Key, ...] = ()
) -> tuple[dict[str, Any], dict[tuple[str, str], ObjectState]]:
    """The adapted values, and the states by kind and name, on a cluster that has these objects."""
    there = {NAMESPACE: namespace(), **there}
    foreign = {key: each for key, each in there.items() if key not in ours}
    found, states = adapted(given, foreign, there.get)
    return found, {(each.kind, each.name): each for each in states}


def test_on_a_cluster_with_nothing_all_is_added() -> None:
    found, states = compared(values(), {})
    assert found["existing"] == ["Namespace/team-a"]  # the file names it
    assert {each.state for each in states.values()} == {"used"}
    assert "clusterQueue" not in found["pools"][0]


def test_a_queue_of_somebody_else_that_fits_is_used_and_none_is_made() -> None:
    found, states = compared(values(), {QUEUE: cluster_queue()})
    assert found["pools"][0]["clusterQueue"] == "gpus"
    assert states["ClusterQueue", "gpus"].state == "used"
    assert "ClusterQueue/gpus" not in found["existing"]


def test_a_local_queue_of_somebody_else_brings_its_cluster_queue() -> None:
    there = {
        ("LocalQueue", "team-a", "gpus"): body(clusterQueue="shared"),
        ("ClusterQueue", "", "shared"): cluster_queue(),
    }
    found, states = compared(values(), there)
    assert found["pools"][0]["clusterQueue"] == "shared"
    assert "LocalQueue/team-a/gpus" in found["existing"]
    assert states["ClusterQueue", "shared"].state == "used"


def test_a_local_queue_is_in_the_way_where_its_cluster_queue_is_gone_and_not_made() -> None:
    key = ("LocalQueue", "team-a", "gpus")
    _, states = compared(values(), {key: body(clusterQueue="gone")})
    assert states["ClusterQueue", "gone"].state == "conflict"
    assert "kubernetes.queue" in states["ClusterQueue", "gone"].why
    found, states = compared(values(), {key: body(clusterQueue="gpus")})
    assert "conflict" not in {each.state for each in states.values()}
    assert "clusterQueue" not in found["pools"][0]


def test_our_own_queue_stays_though_another_namespace_has_a_local_queue_of_somebody_else() -> None:
    there = {
        QUEUE: cluster_queue(),
        ("LocalQueue", "team-a", "gpus"): body(clusterQueue="shared"),
        ("ClusterQueue", "", "shared"): cluster_queue(),
    }
    found, _ = compared(values(), there, ours=(QUEUE,))
    assert "clusterQueue" not in found["pools"][0]
    assert "LocalQueue/team-a/gpus" in found["existing"]


def test_a_queue_of_somebody_else_that_no_namespace_would_use_is_not_in_the_way() -> None:
    there = {
        QUEUE: cluster_queue(quota=0),
        ("LocalQueue", "team-a", "gpus"): body(clusterQueue="shared"),
        ("ClusterQueue", "", "shared"): cluster_queue(),
    }
    found, states = compared(values(), there)
    assert "conflict" not in {each.state for each in states.values()}
    assert found["pools"][0]["clusterQueue"] == "gpus"  # none of ours is made over it


FITS: list[tuple[dict[str, Any], str]] = [
    ({"quota": 8}, "its quota of nvidia.com/gpu is 8"),
    ({"quota": "16"}, ""),
    ({"quota": "16000m"}, ""),
    ({"quota": "1k"}, ""),
    ({"quota": "1Ki"}, ""),
    ({"quota": 0, "cohort": "all"}, ""),
    ({"quota": 0, "cohortName": "all"}, ""),
    ({"stopPolicy": "Hold"}, "stopped"),
    ({"stopPolicy": "None"}, ""),
    ({"namespaceSelector": {"matchLabels": {"team": "a"}}}, ""),
    (
        {
            "namespaceSelector": {
                "matchExpressions": [
                    {"key": "team", "operator": "In", "values": ["a", "b"]},
                    {"key": "team", "operator": "NotIn", "values": ["c"]},
                    {"key": "team", "operator": "Exists"},
                    {"key": "other", "operator": "DoesNotExist"},
                ]
            }
        },
        "",
    ),
]
DOES_NOT: list[tuple[dict[str, Any], str]] = [
    ({"quota": 0}, "no quota of nvidia.com/gpu"),
    ({"resourceGroups": []}, "does not cover nvidia.com/gpu"),
    ({"namespaceSelector": None}, "takes no runs of namespace team-a"),
    ({"namespaceSelector": {"matchLabels": {"team": "b"}}}, "takes no runs of namespace team-a"),
    (
        {"namespaceSelector": {"matchExpressions": [{"key": "team", "operator": "DoesNotExist"}]}},
        "takes no runs of namespace team-a",
    ),
]


@pytest.mark.parametrize(("spec", "note"), FITS)
def test_what_a_queue_has_for_runs_is_used_and_what_differs_is_said(
    spec: dict[str, Any], note: str
) -> None:
    problems, notes = queue_fit(cluster_queue(**spec), {GPU: "16"}, {"team-a": {"team": "a"}})
    assert problems == [] and len(notes) == bool(note) and note in "".join(notes)


@pytest.mark.parametrize(("spec", "problem"), DOES_NOT)
def test_a_queue_in_which_no_run_would_start_is_in_the_way(
    spec: dict[str, Any], problem: str
) -> None:
    given = {QUEUE: cluster_queue(**spec), NAMESPACE: namespace(team="a")}
    _, states = compared(values(), given)
    assert states["ClusterQueue", "gpus"].state == "conflict"
    assert problem in states["ClusterQueue", "gpus"].why
    assert "kubernetes.queue" in states["ClusterQueue", "gpus"].why


def test_a_queue_that_does_not_count_cpus_takes_pods_that_state_none() -> None:
    group = {"coveredResources": [GPU], "flavors": []}
    group["flavors"] = [{"name": "f", "resources": [{"name": GPU, "nominalQuota": 16}]}]
    queue = body(namespaceSelector={}, resourceGroups=[group])
    problems, notes = queue_fit(queue, {GPU: "16", "cpu": "8", "memory": "1Gi"}, {"team-a": {}})
    assert problems == [] and len(notes) == 2


def test_a_namespace_and_an_account_that_the_file_names_must_be_there_with_the_command() -> None:
    given = values("{namespace: gone, service_account: mine, volume_claim: shared}")
    _, states = compared(given, {})
    assert states["Namespace", "gone"].state == "missing"
    assert states["Namespace", "gone"].why.endswith("kubectl create namespace gone")
    account = states["ServiceAccount", "gone/mine"]
    assert account.state == "missing"
    assert account.why.endswith("kubectl -n gone create serviceaccount mine")


@pytest.mark.parametrize(
    ("name", "level", "state"),
    [
        ("runs", "restricted", "used"),
        ("runs", "", "used"),
        ("runs-privileged", "", "used"),
        ("runs-privileged", "privileged", "used"),
        ("runs-privileged", "baseline", "conflict"),
        ("runs-privileged", "restricted", "conflict"),
    ],
)
def test_a_namespace_of_somebody_else_is_used_where_its_level_takes_the_runs(
    name: str, level: str, state: str
) -> None:
    key = ("Namespace", "", name)
    there = {key: namespace(name, **({LEVEL: level} if level else {}))}
    found, states = compared(values("{volume_claim: shared}"), there)
    assert states["Namespace", name].state == state
    assert (f"Namespace/{name}" in found["existing"]) is (state == "used")


def test_a_namespace_that_is_being_deleted_is_waited_for() -> None:
    gone = {"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}}
    _, states = compared(values(), {NAMESPACE: gone})
    assert states["Namespace", "team-a"].state == "conflict"


def test_accounts_roles_and_priorities_of_somebody_else_stay_as_they_are() -> None:
    there = {
        ("ServiceAccount", "team-a", "trainer"): body(),
        ("Role", "team-a", "drillyard"): body(),
        ("WorkloadPriorityClass", "", "high"): {"metadata": {}, "value": 5},
    }
    found, states = compared(values(), there)
    assert {each.state for each in states.values()} == {"used"}
    assert set(found["existing"]) == {
        "Namespace/team-a",
        "ServiceAccount/team-a/trainer",
        "Role/team-a/drillyard",
        "WorkloadPriorityClass/high",
    }
    assert "5" in states["WorkloadPriorityClass", "high"].why


@pytest.mark.parametrize(
    ("spec", "state"),
    [
        ({"nodeLabels": {"pool": "a"}}, "used"),
        ({"nodeLabels": {"pool": "b"}}, "conflict"),
        ({}, "conflict"),
        ({"nodeLabels": {"pool": "a"}, "tolerations": [{"operator": "Exists"}]}, "conflict"),
    ],
)
def test_a_flavor_of_somebody_else_is_used_where_it_selects_the_same_nodes(
    spec: dict[str, Any], state: str
) -> None:
    section = "{namespace: team-a, queue: gpus, volume_claim: shared, node_selector: {pool: a}}"
    found, states = compared(values(section), {("ResourceFlavor", "", "gpus"): body(**spec)})
    assert states["ResourceFlavor", "gpus"].state == state
    assert ("ResourceFlavor/gpus" in found["existing"]) is (state == "used")
