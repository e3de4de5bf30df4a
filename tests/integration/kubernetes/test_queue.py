"""Queues, blocks of nodes and flex-start on simulated nodes: what `runs status` says of each
stage."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from tests.integration.kubernetes import kwok
from tests.integration.kubernetes.cluster import Cluster, started
from tests.integration.kubernetes.team import Team, until

NODES = 16
MANY = 1000
FLEX, BLOCKS = "flex", "blocks"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One of its own: a thousand nodes are not left to other tests."""
    with started(tmp_path_factory.mktemp("queue")) as made:
        yield made


@pytest.fixture(scope="module", autouse=True)
def queues(cluster: Cluster, team: Team) -> None:
    """32 nodes in two blocks behind one queue; another one whose nodes are made on request."""
    team.environment["KUBECONFIG"] = str(cluster.kubeconfig)
    kwok.start_kwok(cluster)
    # Neighbours in name are in different blocks, so that only topology puts a run into one.
    kwok.add_nodes(
        cluster, [kwok.node(f"a-{n:02d}", "a", f"block-{n % 2}") for n in range(2 * NODES)]
    )
    gpus = 2 * NODES * kwok.GPUS_PER_NODE
    cluster.apply(
        *kwok.provisioning_check(FLEX),
        *kwok.queue(BLOCKS, team.name, "a", gpus),
        *kwok.queue(FLEX, team.name, "flex", gpus, admissionChecks=[FLEX]),
    )
    cluster.kubectl(
        "wait", "--for", "condition=Active", f"clusterqueue/{BLOCKS}", f"clusterqueue/{FLEX}"
    )


def launch(team: Team, name: str, queue: str, nodes: int = NODES, **section: Any) -> None:
    """Submit a run of whole nodes, in one block unless `section` says otherwise."""
    section = {"queue": queue, "topology": {"required": kwok.BLOCK}, **section}
    cluster = yaml.safe_load(team.cluster_config(**section).read_text())
    del cluster["processes_per_node"]
    path = team.directory / f"{name}-cluster.yaml"
    path.write_text(yaml.safe_dump({**cluster, "nodes": nodes, "machine": "a4-highgpu-8g"}))
    run = team.run_config(name, training__device="cuda", training__precision="bf16")
    team.drillyard("launch", run, "--cluster", path)


def status(team: Team, name: str) -> dict[str, Any]:
    """What `runs status --json` prints."""
    done = team.drillyard("runs", "status", f"kubernetes://{team.name}/{name}", "--json")
    found: dict[str, Any] = yaml.safe_load(done.stdout)
    return found


def comes_to(
    team: Team, name: str, state: str, words: str = "", seconds: float = 60
) -> dict[str, Any]:
    """The status once the run is in `state` for a reason with these words."""
    seen: list[Any] = []

    def there() -> dict[str, Any] | None:
        found = status(team, name)
        seen[:] = [found]
        return found if found["state"] == state and words in str(found.get("reason")) else None

    try:
        found: dict[str, Any] = until(there, seconds=seconds)
    except TimeoutError:
        raise AssertionError(f"not {state} ({words}): {seen}") from None
    return found


def finish(team: Team, name: str) -> None:
    """Let all pods of a run end with 0."""
    selector = f"jobset.sigs.k8s.io/jobset-name={name}"
    team.cluster.kubectl(
        "--namespace", team.name, "annotate", "pod", "--selector", selector, "test/exit-code=0"
    )


def blocks_of(team: Team, name: str) -> list[str]:
    """The block of each pod's node, by node rank."""
    nodes = {
        each["metadata"]["name"]: each["metadata"]["labels"].get(kwok.BLOCK)
        for each in team.cluster.get("nodes")["items"]
    }
    return [nodes[pod["spec"]["nodeName"]] for pod in team.pods(name)]


def requests(team: Team, name: str) -> list[dict[str, Any]]:
    """The ProvisioningRequests of a run, oldest first."""
    found = team.cluster.get("--namespace", team.name, "provisioningrequests")["items"]
    own = [each for each in found if f"jobset-{name}-" in each["metadata"]["name"]]
    return sorted(own, key=lambda each: str(each["metadata"]["creationTimestamp"]))


def provision(team: Team, request: dict[str, Any], block: str) -> None:
    """Make the nodes that a request asks for, all in one block, and then say so."""
    label = {"autoscaling.gke.io/provisioning-request": request["metadata"]["name"]}
    kwok.add_nodes(
        team.cluster, [kwok.node(f"{block}-{n:02d}", "flex", block, **label) for n in range(NODES)]
    )
    kwok.set_conditions(team.cluster, request, Accepted="Accepted", Provisioned="Provisioned")


def test_a_run_waits_for_flex_start_runs_in_one_block_is_revoked_and_is_resumed(team: Team) -> None:
    name = "flexible"
    launch(team, name, FLEX, max_run_hours=2)
    comes_to(team, name, "queued", f"admission check {FLEX} is Pending")
    assert team.jobset(name)["spec"]["suspend"] is True
    (request,) = until(lambda: requests(team, name))
    assert request["spec"]["provisioningClassName"] == "queued-provisioning.gke.io"
    assert request["spec"]["parameters"]["maxRunDurationSeconds"] == "7200"
    assert [each["count"] for each in request["spec"]["podSets"]] == [NODES]
    provision(team, request, "first")
    comes_to(team, name, "running")
    assert set(blocks_of(team, name)) == {"first"}
    kwok.set_conditions(team.cluster, request, CapacityRevoked="MaxRunDurationReached")
    comes_to(team, name, "failed", "capacity revoked")
    until(lambda: not team.pods(name))
    team.drillyard("runs", "resume", f"kubernetes://{team.name}/{name}")
    comes_to(team, name, "queued", f"admission check {FLEX} is Pending")
    again = until(
        lambda: [
            each
            for each in requests(team, name)
            if each["metadata"]["uid"] != request["metadata"]["uid"]
        ]
    )
    provision(team, again[0], "second")
    comes_to(team, name, "running")
    assert set(blocks_of(team, name)) == {"second"}
    finish(team, name)
    comes_to(team, name, "succeeded")
    team.drillyard("runs", "forget", f"kubernetes://{team.name}/{name}")


def test_a_run_has_one_block_and_the_next_but_one_waits(team: Team) -> None:
    for name in ("first", "second"):
        launch(team, name, BLOCKS)
        comes_to(team, name, "running")
        assert len(set(blocks_of(team, name))) == 1
        ranks = [pod["spec"]["nodeName"] for pod in team.pods(name)]
        assert ranks == sorted(ranks)
    assert blocks_of(team, "first") != blocks_of(team, "second")
    launch(team, "third", BLOCKS)
    comes_to(team, "third", "queued", "nvidia.com/gpu")
    launch(team, "fourth", BLOCKS)
    comes_to(team, "fourth", "queued", f"1 ahead in queue {BLOCKS}")
    finish(team, "first")
    comes_to(team, "first", "succeeded")
    comes_to(team, "third", "running")
    for name in ("third", "fourth", "second"):
        team.drillyard("runs", "cancel", f"kubernetes://{team.name}/{name}")
        assert status(team, name)["state"] == "cancelled"


def test_a_run_over_the_quota_says_so(team: Team) -> None:
    launch(team, "over", BLOCKS, nodes=2 * NODES + 1)
    found = comes_to(team, "over", "queued", "insufficient quota for nvidia.com/gpu")
    assert "264 > 256" in found["reason"]
    team.drillyard("runs", "cancel", f"kubernetes://{team.name}/over")


def test_a_run_at_its_time_limit_says_so(team: Team) -> None:
    launch(team, "limited", BLOCKS, max_run_hours=3 / 3600)
    comes_to(team, "limited", "failed", "time limit")
    until(lambda: not team.pods("limited"))


def test_a_run_of_1000_nodes_is_placed(team: Team) -> None:
    kwok.add_nodes(
        team.cluster, [kwok.node(f"many-{n:04d}", "many", f"block-{n // 100}") for n in range(MANY)]
    )
    team.cluster.apply(*kwok.queue("many", team.name, "many", MANY * kwok.GPUS_PER_NODE))
    launch(team, "large", "many", nodes=MANY, topology={"preferred": kwok.BLOCK})
    found = until(lambda: team.cluster.get("--namespace", team.name, "workloads")["items"])
    (workload,) = [
        each for each in found if each["metadata"]["ownerReferences"][0]["name"] == "large"
    ]
    comes_to(team, "large", "starting", seconds=120)
    name = f"workload/{workload['metadata']['name']}"
    (assigned,) = team.cluster.get("--namespace", team.name, name)["status"]["admission"][
        "podSetAssignments"
    ]
    domains = assigned["topologyAssignment"]["domains"]
    assert (
        sum(each["count"] for each in domains)
        == len({each["values"][-1] for each in domains})
        == MANY
    )
