"""What a run needs no setting for on a cluster that `drillyard cluster up` has made."""

from __future__ import annotations

import pytest
from tests.unit.launch.requests import WORKLOAD, planned, request

from drillyard.launch.kubernetes.config import KubernetesConfig

FILE = """
name: c
platform: gke
location: {project: p, region: us-central1}
machine: MACHINE
nodes: 2
consumption: spot
storage: {bucket: my-bucket}
image: i:1
"""


def section(more: str = "", machine: str = "a4-highgpu-8g") -> KubernetesConfig:
    found = request(FILE.replace("MACHINE", machine) + more).cluster
    return found.section_as(KubernetesConfig)


@pytest.mark.parametrize(
    "more",
    [
        "",
        "kubernetes: {}\n",
        "kubernetes:\n",
        "cluster: {}\n",
        "cluster: {}\nkubernetes: {grace_seconds: 5}\n",
    ],
)
def test_a_file_of_a_created_cluster_needs_no_names(more: str) -> None:
    found = section(more)
    assert found.context == "gke_p_us-central1_c"
    assert (found.namespace, found.queue) == ("runs-privileged", "c-spot")
    assert (found.service_account, found.run_as_user) == ("trainer", 10001)


def test_a_file_with_a_section_of_its_own_and_no_cluster_section_is_left_as_it_is() -> None:
    found = section("kubernetes: {grace_seconds: 5}\n")
    assert (found.namespace, found.queue, found.service_account) == ("default", None, None)
    assert (found.context, found.run_as_user) == (None, 0)


def test_what_the_file_gives_wins_also_where_it_is_the_usual_default() -> None:
    found = section("cluster: {}\nkubernetes: {namespace: default, queue: null, run_as_user: 0}\n")
    assert (found.namespace, found.queue, found.run_as_user) == ("default", None, 0)
    assert found.service_account == "trainer"


@pytest.mark.parametrize(
    ("machine", "more", "namespace"),
    [
        ("g2-standard-96", "", "runs"),
        ("g2-standard-96", "mounts: [/mnt/disks]\n", "runs-privileged"),
        ("a3-megagpu-8g", "", "runs-privileged"),
        ("a3-megagpu-8g", "network_stack: ethernet\n", "runs"),
        (
            "a4-highgpu-8g",
            "cluster: {}\nkubernetes: {pod_network: dranet, network_libraries: image}\n",
            "runs",
        ),
        ("a4-highgpu-8g", "cluster: {}\nkubernetes: {pod_network: host}\n", "runs-privileged"),
    ],
)
def test_the_namespace_allows_what_the_pods_need_and_no_more(
    machine: str, more: str, namespace: str
) -> None:
    assert section(more, machine).namespace == namespace


def test_the_defaults_are_explained_with_their_reason() -> None:
    plan = planned(request(FILE.replace("MACHINE", "a4-highgpu-8g"), WORKLOAD))
    found = {each.place: each.value for each in plan.fields if each.place.startswith("kubernetes.")}
    assert found["kubernetes.queue"] == "c-spot"
    assert set(found) == {
        f"kubernetes.{key}"
        for key in ("context", "namespace", "queue", "service_account", "run_as_user")
    }


def test_a_time_limit_needs_no_queue_in_the_file() -> None:
    assert section("cluster: {}\nkubernetes: {max_run_hours: 2}\n").limit_seconds == 7200
