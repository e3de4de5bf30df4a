"""What a cluster of GKE may not be: every rule names the key and what to write, and all mistakes of
a file are one error."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from tests.unit.provision.clusters import bodies, config, gpu_pools, plan

from drillyard.errors import UserError
from drillyard.provision.cluster_chart import FIRST_KUBERNETES
from drillyard.provision.gcp.names import bucket_name_problem, shortened, state_bucket_name
from drillyard.provision.gke.versions import reaches

CHARTS = Path(__file__).parents[3] / "charts"
LOCATION = {"project": "my-project", "region": "us-central1", "zone": "us-central1-b"}


def located(**changes):
    return {"location": {**LOCATION, **changes}}


def pools(*further):
    return {"cluster": {"pools": [{"consumption": "spot", "nodes": 2, **each} for each in further]}}


def creation(**settings):
    return {"cluster": settings}


def refusal(tmp_path, *arguments, **settings):
    with pytest.raises(UserError) as refused:
        plan(tmp_path, config(*arguments, **settings))
    return str(refused.value).splitlines()


RULES = [
    ({"name": "default"}, "name"),
    (located(project="My Project"), "location.project"),
    (located(project="123456789012"), "location.project"),
    (located(zone=None), "location.zone"),
    (located(zone="us-central1"), "location.zone"),
    (located(zone="us-east5-a"), "location.zone"),
    (located(region="us"), "location.region"),
    ({"machine": "p5.48xlarge", "consumption": "spot"}, "machine"),
    ({"machine": "gpu-h100-sxm", "consumption": "spot"}, "machine"),
    ({"machine": "a4-highgpu-9g"}, "machine"),
    ({"network_stack": "tcpxo"}, "network_stack"),
    (
        {"kubernetes": {"pod_network": "dranet"}, "machine": "a3-megagpu-8g"},
        "kubernetes.pod_network",
    ),
    (
        {"consumption": "flex-start", "kubernetes": {"max_run_hours": 169, "queue": "q"}},
        "kubernetes.max_run_hours",
    ),
    ({"storage": {"bucket": "my-google-bucket"}}, "storage.bucket"),
    ({"storage": {"bucket": "Runs"}}, "storage.bucket"),
    ({"storage": {"bucket": "a" * 64}}, "storage.bucket"),
    ({"storage": {"bucket": "runs.example.com"}}, "storage.bucket"),
    ({"storage": {"bucket": "my-project-team-tfstate"}}, "storage.bucket"),
    (creation(state_bucket="goog-state"), "cluster.state_bucket"),
    (creation(labels={"drillyard-cluster": "x"}), "cluster.labels.drillyard-cluster"),
    (creation(labels={"goog-gke": "x"}), "cluster.labels.goog-gke"),
    (creation(labels={f"l{number}": "x" for number in range(64)}), "cluster.labels"),
    (creation(disk_gib=9), "cluster.disk_gib"),
    (creation(cpu_pool={"machine": "g2-standard-8"}), "cluster.cpu_pool.machine"),
    (creation(bucket_recover_days=6), "cluster.bucket_recover_days"),
    (creation(bucket_recover_days=91), "cluster.bucket_recover_days"),
    (creation(existing_bucket=True, bucket_keep_versions=1), "cluster.bucket_keep_versions"),
    ({"storage": {}, **creation(existing_bucket=True)}, "cluster.existing_bucket"),
    ({"storage": {}, **creation(bucket_location="US")}, "cluster.bucket_location"),
    (creation(version="1.31"), "cluster.version"),
    (creation(version="1.32.2-gke.1474999"), "cluster.version"),
    (
        {"kubernetes": {"pod_network": "dranet"}, **creation(version="1.33")},
        "cluster.version",
    ),
    (
        {"consumption": "flex-start", "machine": "g2-standard-4", **creation(version="1.32.1")},
        "cluster.version",
    ),
    (creation(ranges={"nodes": "10.0.0.0/29"}), "cluster.ranges.nodes"),
    (creation(ranges={"nodes": "10.0.0.1/20"}), "cluster.ranges.nodes"),
    (creation(ranges={"nodes": "10.0.0.0/16", "data": "10.0.0.0/8"}), "cluster.ranges.data"),
    (creation(authorized_networks=["203.0.113.1/24"]), "cluster.authorized_networks"),
    (
        creation(compact_placement=True) | {"consumption": "flex-start-queued"},
        "cluster.compact_placement",
    ),
    (
        creation(compact_placement=True)
        | {"machine": "a3-megagpu-8g", "consumption": "flex-start"},
        "cluster.compact_placement",
    ),
    (pools({}), "cluster.pools.0.name"),
    (pools({"name": "cpu"}), "cluster.pools.0.name"),
    (pools({"name": "default-pool"}), "cluster.pools.0.name"),
    (pools({"name": "a" * 41}), "cluster.pools.0.name"),
    (pools({"name": "b", "machine": "p5.48xlarge"}), "cluster.pools.0.machine"),
    (pools({"name": "b", "machine": "a4"}), "cluster.pools.0.machine"),
    (pools({"name": "b", "zone": "us-east5-a"}), "cluster.pools.0.zone"),
    (pools({"name": "b", "zone": "us-central1-a"}), "cluster.pools.0.zone"),
    (pools({"name": "b", "consumption": "on-demand"}), "cluster.pools.0.consumption"),
    (pools({"consumption": "reservation"}), "cluster.pools.0.reservations"),
    (pools({"consumption": "calendar"}), "cluster.pools.0.reservations"),
    (
        pools({"consumption": "reservation", "reservations": ["a", "b"]}),
        "cluster.pools.0.reservations",
    ),
    (pools({"consumption": "reservation", "reservations": ["A"]}), "cluster.pools.0.reservations"),
    (pools({"name": "b", "reservations": ["a"]}), "cluster.pools.0.reservations"),
    (
        pools(
            {
                "machine": "a4x-highgpu-4g",
                "consumption": "reservation",
                "reservations": ["a"],
                "nodes": 19,
            }
        ),
        "cluster.pools.0.nodes",
    ),
    ({"consumption": "reservation", "reservation": "a/b"}, "reservation"),
    ({"consumption": "reservation", "reservation": "r/reservationBlocks/"}, "reservation"),
    (
        {
            "consumption": "reservation",
            "reservation": "projects/other/reservations/r/reservationBlocks/b",
        },
        "reservation",
    ),
    ({"consumption": "calendar", "reservation": None}, "reservation"),
    ({"consumption": "spot", "reservation": "mine"}, "reservation"),
]


@pytest.mark.parametrize(
    ("settings", "key"), RULES, ids=[f"{number}-{key}" for number, (_, key) in enumerate(RULES)]
)
def test_a_broken_rule_is_one_line_at_its_key(settings, key, tmp_path):
    lines = refusal(tmp_path, **settings)
    assert len(lines) == 1, lines
    assert f": {key}" in lines[0]
    assert lines[0].startswith("cluster.yaml:") or "cluster.yaml:" in lines[0]


def test_all_mistakes_of_a_file_are_one_error(tmp_path):
    lines = refusal(
        tmp_path,
        **located(zone="us-east5-a"),
        nodes=5000,
        storage={"bucket": "google"},
        cluster={
            "version": "1.30",
            "ranges": {"pods": "172.17.0.0/16"},
            "pools": [
                {"consumption": "on-demand", "nodes": 2},
                {"machine": "p5.48xlarge", "consumption": "spot", "nodes": 2, "name": "b"},
            ],
        },
    )
    keys = {line.split(": ")[1] for line in lines}
    assert keys == {
        *("location.zone", "storage.bucket", "cluster.version", "cluster.ranges.pods"),
        *("cluster.pools.0.consumption", "cluster.pools.1.machine"),
    }


def test_what_the_errors_ask_for_is_accepted(tmp_path):
    """The remedies of the rules above, typed."""
    plan(tmp_path, config(**creation(version="1.32.2-gke.1475000")))
    plan(tmp_path, config(**creation(version="1.33")))
    plan(tmp_path, config(**creation(disk_gib=10, bucket_recover_days=90)))
    plan(tmp_path, config("a3-megagpu-8g", network_stack="ethernet"))
    block = "r/reservationBlocks/b/reservationSubBlocks/s"
    plan(tmp_path, config(consumption="reservation", reservation=block))
    plan(tmp_path, config(**pools({"name": "b"})))
    plan(
        tmp_path,
        config(
            **pools({"name": "b", "zone": "us-central1-a"}), kubernetes={"pod_network": "dranet"}
        ),
    )
    domains = [
        {"name": f"d{number}", "consumption": "reservation", "reservations": ["a"], "nodes": 18}
        for number in range(2)
    ]
    found = plan(
        tmp_path, config("a4x-highgpu-4g", "reservation", nodes=18, cluster={"pools": domains})
    )
    assert len(gpu_pools(found)) == 3
    assert list(bodies(found, "google_compute_resource_policy")) == ["domain_1x72"]


@pytest.mark.parametrize(
    ("given", "rendered"),
    [
        ("r", "r"),
        ("projects/my-project/reservations/r", "r"),
        ("projects/other/reservations/r", "projects/other/reservations/r"),
        ("r/reservationBlocks/b", "r/reservationBlocks/b"),
        ("projects/my-project/reservations/r/reservationBlocks/b", "r/reservationBlocks/b"),
        (
            "r/reservationBlocks/b/reservationSubBlocks/s",
            "r/reservationBlocks/b/reservationSubBlocks/s",
        ),
    ],
)
def test_a_reservation_is_named_as_the_node_pool_wants_it(given, rendered, tmp_path):
    found = plan(tmp_path, config(consumption="reservation", reservation=given))
    [pool] = gpu_pools(found).values()
    assert pool["node_config"][0]["reservation_affinity"][0]["values"] == [rendered]


def test_versions_are_compared_by_minor_version():
    first = ("1.28.15-gke.3163000", "1.29.15-gke.2467000")
    reached = {
        **{"1.28": True, "1.28.15": True, "1.28.15-gke.3163000": True, "1.29.16": True},
        **{"1.30": True, "1.35.0-gke.1": True, "1.28.14": False, "1.27": False, "1.27.99": False},
        **{"1.28.15-gke.3162999": False, "1.9": False},
    }
    assert {version: reaches(version, first) for version in reached} == reached
    assert reaches("1.9", ())


def test_names_that_are_too_long_are_cut_to_different_ones():
    one, two = (shortened("a" * 38 + ending, "-nodes", 30) for ending in "xy")
    assert one != two
    assert len(one) == len(two) == 30
    assert shortened("team", "-nodes", 30) == "team-nodes"
    bucket = state_bucket_name("p" * 30, "c" * 40)
    assert len(bucket) == 63
    assert bucket_name_problem(bucket) is None
    assert bucket_name_problem(state_bucket_name("example.com:my-project", "team")) is None


def test_a_long_name_fits_everywhere(tmp_path):
    name = "a" * 40
    found = plan(tmp_path, config("a3-megagpu-8g", "flex-start-queued", name=name))
    limits = {"google_container_node_pool": 40, "google_container_cluster": 40}
    for each in found.resources:
        if each.kind in limits or each.kind.startswith("google_compute"):
            assert len(each.name) <= limits.get(each.kind, 63), each


def test_machines_of_ones_own_file_need_what_gke_must_know(tmp_path):
    row = (
        "machines: [{name: mine, cloud: gcp, accelerator: h100, num_accelerators: 8,"
        " network_stack: ethernet, gpu_quota: H100, gpu_quota_form: family}]"
    )
    (tmp_path / "hardware.yaml").write_text(row + "\n", "utf-8")
    [line] = refusal(tmp_path, "mine", hardware="hardware.yaml")
    assert ": machine: " in line
    assert "accelerator_type" in line
    (tmp_path / "hardware.yaml").write_text(
        row.replace("mine,", "mine, accelerator_type: nvidia-h100-80gb,"), "utf-8"
    )
    assert gpu_pools(plan(tmp_path, config("mine", hardware="hardware.yaml")))


def test_a_network_stack_of_ones_own_file_has_frames_that_a_vpc_can_have(tmp_path):
    row = "network_stacks: [{name: tcpxo, networks: {vpcs_per_data_nic: 1, mtu: 9000}}]\n"
    (tmp_path / "hardware.yaml").write_text(row, "utf-8")
    [line] = refusal(tmp_path, "a3-megagpu-8g", hardware="hardware.yaml")
    assert "9000" in line
    assert "8896" in line
    (tmp_path / "hardware.yaml").write_text(row.replace("9000", "8896"), "utf-8")
    found = plan(tmp_path, config("a3-megagpu-8g", hardware="hardware.yaml"))
    assert bodies(found, "google_compute_network")["vpc1"]["mtu"] == 8896


@pytest.mark.parametrize(
    ("machine", "mode", "settings", "compact"),
    [
        ("a3-megagpu-8g", "on-demand", {}, True),
        ("a3-megagpu-8g", "on-demand", {"nodes": 1}, True),
        ("g2-standard-12", "on-demand", {}, False),
        ("a3-megagpu-8g", "on-demand", creation(compact_placement=False), False),
        ("a3-megagpu-8g", "spot", {}, False),
        ("a3-megagpu-8g", "spot", creation(compact_placement=True), True),
        ("a3-megagpu-8g", "reservation", {}, False),
        ("a3-megagpu-8g", "reservation", creation(compact_placement=True), True),
        ("a3-megagpu-8g", "flex-start", {}, False),
        ("a4-highgpu-8g", "flex-start", {}, True),
        ("a3-ultragpu-8g", "flex-start", {}, True),
        ("a4-highgpu-8g", "flex-start-queued", {}, False),
    ],
)
def test_placement_follows_machine_and_way_of_buying(machine, mode, settings, compact, tmp_path):
    [pool] = gpu_pools(plan(tmp_path, config(machine, mode, **settings))).values()
    assert ("placement_policy" in pool) == compact
    assert len(pool["node_locations"]) == 1


def test_facts_of_machines_decide_versions_disks_and_placement(tmp_path):
    """A4X has versions of its own; the SSDs that one can add to G2 are not bought unasked."""
    a4x = ("a4x-highgpu-4g", "reservation")
    [line] = refusal(tmp_path, *a4x, **creation(version="1.33.4-gke.1035999"))
    assert "1.32.8-gke.1108000 or 1.33.4-gke.1036000" in line
    for version in ("1.32.8-gke.1108000", "1.33.4-gke.1036000", "1.34"):
        assert plan(tmp_path, config(*a4x, **creation(version=version)))
    found = plan(tmp_path, config("g2-standard-96", "on-demand"))
    [pool] = gpu_pools(found).values()
    assert "ephemeral_storage_local_ssd_config" not in pool["node_config"][0]
    assert not any("LOCAL_SSD" in quota.metric for quota in found.quotas)
    [pool] = gpu_pools(plan(tmp_path, config("a2-ultragpu-8g", "on-demand"))).values()
    ssds = pool["node_config"][0]["ephemeral_storage_local_ssd_config"]
    assert ssds == [{"local_ssd_count": 8}]


def test_the_charts_need_the_version_of_kubernetes_that_the_rules_name():
    chart = yaml.safe_load((CHARTS / "drillyard-cluster/Chart.yaml").read_text("utf-8"))
    assert chart["kubeVersion"] == f">={FIRST_KUBERNETES}.0-0"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (creation(bucket_location="europe-west4"), "europe-west4"),
        ({"storage": {}}, "storage.bucket"),
        ({"nodes": 20000}, "15000"),
        ({"nodes": 1001}, "1000"),
    ],
)
def test_what_is_allowed_and_rarely_meant_is_a_warning(settings, words, tmp_path):
    usual = plan(tmp_path, config()).warnings
    found = plan(tmp_path, config(**settings)).warnings
    assert any(words in each for each in found)
    assert not any(words in each for each in usual)


@pytest.mark.parametrize("place", ["US", "us", "EUR4", "us-central1", "US-CENTRAL1"])
def test_buckets_may_be_near_or_everywhere(place, tmp_path):
    found = plan(tmp_path, config(**creation(bucket_location=place)))
    assert bodies(found, "google_storage_bucket")["runs"]["location"] == place
    assert not any("bucket_location" in each and "slower" in each for each in found.warnings)


def test_a_zone_for_ai_is_one_of_its_region(tmp_path):
    found = plan(tmp_path, config(**located(zone="us-central1-ai1a")))
    assert (found.region, found.pools[0].region) == ("us-central1", "us-central1")
