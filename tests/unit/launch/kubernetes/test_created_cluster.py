"""What a run needs no setting for on a cluster that `drillyard cluster up` has made."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from tests.unit.estimation.requests import LLAMA_70B
from tests.unit.launch.requests import TRAINING, WORKLOAD, planned, request
from typer.testing import CliRunner

from drillyard.acceptance.accept_command import acceptance_of
from drillyard.acceptance.check import Level
from drillyard.cli.main import app
from drillyard.config.cluster import ClusterConfig
from drillyard.errors import ConfigError, UserError
from drillyard.estimation.request import EstimateOptions, build_request
from drillyard.launch.kubernetes.config import KubernetesConfig
from drillyard.launch.kubernetes.release import VALUES
from drillyard.launch.submission import load_cluster, plan_launch
from drillyard.provision.cluster_chart import NODE_POOL
from drillyard.provision.provisioner import plan_file
from drillyard.provision.up import MadeCluster, launch_config

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


FIRST = "c-flex-start-queued"
POOLS = """
name: c
platform: gke
location: {project: p, region: us-central1, zone: us-central1-b}
machine: a4-highgpu-8g
nodes: 2
consumption: flex-start-queued
network_stack: gib
processes_per_node: 8
storage: {bucket: my-bucket}
image: i:1
cluster:
  pools:
    - {consumption: spot, nodes: 4}
    - {name: high, machine: a3-highgpu-8g, consumption: reservation, reservations: [mine], nodes: 8}
    - {name: small, machine: g2-standard-96, consumption: on-demand, nodes: 3}
"""


@pytest.fixture
def left_by_up(tmp_path: Path) -> Path:
    """The file that `up --write` leaves."""
    path = tmp_path / "cluster.yaml"
    path.write_text(POOLS, "utf-8")
    found = launch_config(path, plan_file(path).plan, MadeCluster("gke_p_us-central1_c", {}))
    path.write_text(found.text, "utf-8")
    assert yaml.safe_load(found.text)["kubernetes"]["queue"] == "c-flex-start-queued"
    return path


def of_pool(cluster: ClusterConfig) -> tuple[object, ...]:
    section = cluster.section_as(KubernetesConfig)
    return (
        section.queue,
        section.node_selector[NODE_POOL],
        cluster.machine,
        cluster.consumption,
        cluster.nodes,
        cluster.reservation,
    )


@pytest.mark.parametrize(
    ("pool", "found"),
    [
        (None, (FIRST, "a4-highgpu-8g", "flex-start-queued", 2, None)),
        (FIRST, (FIRST, "a4-highgpu-8g", "flex-start-queued", 2, None)),
        ("c-spot", ("c-spot", "a4-highgpu-8g", "spot", 4, None)),
        ("high", ("high", "a3-highgpu-8g", "reservation", 8, "mine")),
        ("small", ("small", "g2-standard-96", "on-demand", 3, None)),
    ],
)
def test_one_file_launches_on_each_of_its_pools(
    left_by_up: Path, pool: str | None, found: tuple[object, ...]
) -> None:
    cluster = load_cluster(left_by_up, pool=pool)
    assert of_pool(cluster) == (found[0], *found)
    # What the file says of the first pool's machine does not hold for another one.
    same = cluster.machine == "a4-highgpu-8g"
    assert cluster.network_stack == ("gib" if same else None)
    assert cluster.processes_per_node == (8 if same else None)
    # One namespace for all: `runs` looks in one.
    assert cluster.section_as(KubernetesConfig).namespace == "runs-privileged"


@pytest.mark.parametrize("pool", ["c-spot", "high", "small"])
def test_a_run_on_a_pool_selects_and_tolerates_its_nodes(left_by_up: Path, pool: str) -> None:
    run = left_by_up.with_name("run.yaml")
    run.write_text('name: r\nworkload: {command: ["true"]}\n', "utf-8")
    ((made,), (plan,)) = plan_launch(run, left_by_up, pool=pool)
    (values,) = [json.loads(each.content) for each in plan.files if each.path == VALUES]
    assert values["queue"] == pool and values["nodeSelector"][NODE_POOL] == pool
    keys = [each["key"] for each in values["tolerations"]]
    assert ("cloud.google.com/gke-spot" in keys) == (pool == "c-spot")
    ((few,), _) = plan_launch(run, left_by_up, pool=pool, nodes=1)
    assert few.cluster.nodes == 1 and made.cluster.nodes > 1


def test_the_queue_of_the_file_is_the_pool_of_its_runs(left_by_up: Path) -> None:
    text = left_by_up.read_text("utf-8")
    left_by_up.write_text(text.replace("queue: c-flex-start-queued", "queue: small"), "utf-8")
    assert load_cluster(left_by_up).machine == "g2-standard-96"
    first = load_cluster(left_by_up, pool="c-flex-start-queued")
    assert of_pool(first)[:2] == ("c-flex-start-queued", "c-flex-start-queued")
    # The cluster itself stays what it was.
    assert plan_file(left_by_up).plan.pools[0].name == FIRST


def test_a_queue_of_its_own_stays_the_first_pools(left_by_up: Path) -> None:
    text = left_by_up.read_text("utf-8")
    left_by_up.write_text(text.replace("queue: c-flex-start-queued", "queue: team"), "utf-8")
    for pool in (None, "c-flex-start-queued"):
        assert of_pool(load_cluster(left_by_up, pool=pool))[:2] == ("team", "c-flex-start-queued")


def test_settings_of_a_stack_hold_for_pools_that_have_it(left_by_up: Path) -> None:
    more = "  pod_network: dranet\n  daemon_resources: {requests: {cpu: 1}}\n"
    left_by_up.write_text(left_by_up.read_text("utf-8") + more, "utf-8")
    found = {
        pool: load_cluster(left_by_up, pool=pool).section_as(KubernetesConfig)
        for pool in ("c-spot", "high", "small")
    }
    assert {pool: each.pod_network for pool, each in found.items()} == {
        "c-spot": "dranet",
        "high": None,
        "small": None,
    }
    assert found["high"].daemon_resources.requests.cpu == "1"
    assert found["small"].daemon_resources.requests.cpu is None


@pytest.mark.parametrize(
    ("pool", "words"),
    [
        ("", "it has"),
        ("hihg", "did you mean high"),
        ("none-of-them", "c-flex-start-queued, c-spot, high, small"),
    ],
)
def test_a_pool_that_the_cluster_does_not_have(left_by_up: Path, pool: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_cluster(left_by_up, pool=pool)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            ("reservations: [mine]", "reservations: []"),
            r"cluster\.pools\.1\.reservations: .*exactly one",
        ),
        (("machine: a3-highgpu-8g", "machine: a3-hihgpu-8g"), "a3-highgpu-8g"),
        (("consumption: reservation", "consumption: calender"), "calendar"),
    ],
)
def test_what_is_wrong_with_the_pool_is_an_error_at_its_line(
    left_by_up: Path, change: tuple[str, str], words: str
) -> None:
    left_by_up.write_text(left_by_up.read_text("utf-8").replace(*change), "utf-8")
    run = left_by_up.with_name("run.yaml")
    run.write_text('name: r\nworkload: {command: ["true"]}\n', "utf-8")
    done = CliRunner().invoke(
        app, ["launch", str(run), "--cluster", str(left_by_up), "--pool", "high", "--dry-run"]
    )
    lines = left_by_up.read_text("utf-8").splitlines()
    (number,) = [number for number, each in enumerate(lines, 1) if change[1] in each]
    assert isinstance(done.exception, UserError)
    assert f"cluster.yaml:{number}:" in str(done.exception)
    assert re.search(words, str(done.exception))


def test_estimate_and_accept_take_a_pool_too(left_by_up: Path) -> None:
    run = left_by_up.with_name("run.yaml")
    run.write_text(TRAINING, "utf-8")
    model = left_by_up.with_name("config.json")
    model.write_text(json.dumps(LLAMA_70B), "utf-8")
    found = [
        build_request(EstimateOptions(run=run, cluster=left_by_up, pool=pool, config=model)).target
        for pool in (None, "high")
    ]
    assert [each.title.partition(" (")[0] for each in found] == [
        "2 x a4-highgpu-8g",
        "8 x a3-highgpu-8g",
    ]
    assert [each.consumption for each in found] == ["flex-start-queued", "reservation"]
    checked = acceptance_of(left_by_up, Level.quick, pool="high", dry_run=True).request.cluster
    assert of_pool(checked) == ("high", "high", "a3-highgpu-8g", "reservation", 8, "mine")
    with pytest.raises(ConfigError, match="--pool belongs to --cluster"):
        build_request(EstimateOptions(run=run, machine="a4-highgpu-8g", pool="high", config=model))


def test_other_platforms_have_no_pools(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("name: here\nplatform: local\n", "utf-8")
    with pytest.raises(ConfigError, match="--pool x: platform local"):
        load_cluster(path, pool="x")
    own = FILE.replace("MACHINE", "a4-highgpu-8g") + "kubernetes: {queue: q}\n"
    path.write_text(own, "utf-8")
    with pytest.raises(ConfigError, match="cluster:"):
        load_cluster(path, pool="c-spot")


def test_one_namespace_has_the_runs_of_a_cluster_whatever_their_nodes() -> None:
    text = FILE.replace("MACHINE", "a4-highgpu-8g")
    one = request(text.replace("nodes: 2", "nodes: 1")).cluster.section_as(KubernetesConfig)
    assert one.namespace == section().namespace == "runs-privileged"
