"""The capacity of a cluster config: its machine is known and sold in that way, and what counts
against quotas."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.facts import says

from drillyard.config.cluster import ClusterConfig, cluster_model
from drillyard.config.load import load_cluster_config
from drillyard.errors import UserError
from drillyard.hardware import catalog, load_catalog
from drillyard.hardware.capacity import (
    Quota,
    consumption_problem,
    machine_of,
    quota_needed,
    region_of,
)
from drillyard.hardware.facts import FactSource

GCE = (
    "name: g\nplatform: gce\nlocation: {project: p, zone: z}\nmachine: a4-highgpu-8g\nconsumption:"
    " spot\n"
)


def load(directory: Path, text: str) -> ClusterConfig:
    path = directory / "cluster.yaml"
    path.write_text(text)
    return load_cluster_config(path)


def test_a_machine_that_is_sold_so_is_found(tmp_path: Path) -> None:
    assert machine_of(load(tmp_path, GCE), catalog()) is catalog().machine("a4-highgpu-8g")


def test_a_way_of_buying_that_there_is_not_is_reported_at_its_line_with_those_that_there_are(
    tmp_path: Path,
) -> None:
    with pytest.raises(UserError) as caught:
        machine_of(load(tmp_path, GCE.replace("spot", "on-demand")), catalog())
    assert says(
        str(caught.value),
        f"{tmp_path / 'cluster.yaml'}:5: consumption: a4-highgpu-8g ... 'on-demand'"
        " ... reservation, spot, flex-start, flex-start-queued, calendar",
    )


def test_an_unknown_machine_is_reported_at_its_line_with_the_nearest_and_how_to_give_ones_own(
    tmp_path: Path,
) -> None:
    with pytest.raises(UserError) as caught:
        machine_of(load(tmp_path, GCE.replace("a4-highgpu-8g", "a4-higpu-8g")), catalog())
    first, second = str(caught.value).splitlines()
    assert says(
        first, f"{tmp_path / 'cluster.yaml'}:4: machine: ... 'a4-higpu-8g' ... a4-highgpu-8g"
    )
    assert "--hardware FILE" in second


def test_a_cluster_without_a_machine_is_reported_what_to_do() -> None:
    with pytest.raises(UserError, match=r"machine: missing: .*--machine"):
        machine_of(ClusterConfig(name="s", platform="slurm"), catalog())


def test_ones_own_machine_may_be_had_in_any_way(tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text(
        "machines: [{name: mine, accelerator: h100, num_accelerators: 8, network_stack:"
        " infiniband}]\n"
    )
    assert consumption_problem("spot", load_catalog(own).machine("mine")) is None
    assert consumption_problem(None, catalog().machine("a4-highgpu-8g")) is None


def test_machines_of_ones_own_have_a_machine_and_a_hardware_file_that_any_copy_of_the_config_finds(
    tmp_path: Path,
) -> None:
    text = "name: s\nplatform: ssh\nssh: {hosts: [a]}\nmachine: mine\nhardware: facts/own.yaml\n"
    (tmp_path / "facts").mkdir()
    own = tmp_path / "facts" / "own.yaml"
    own.write_text(
        "machines: [{name: mine, accelerator: h100, num_accelerators: 8, network_stack:"
        " infiniband}]\n"
    )
    cluster = load(tmp_path, text)
    assert cluster.hardware == str(own)
    assert machine_of(cluster, load_catalog(cluster.hardware)).name == "mine"


HOME = {"project": "p", "region": "us-central1"}


def cluster(machine="a4-highgpu-8g", consumption="spot", platform="gke", nodes=2, **fields):
    location = fields.pop("location", HOME)
    return cluster_model()(
        name="c",
        platform=platform,
        machine=machine,
        consumption=consumption,
        nodes=nodes,
        location=location,
        **fields,
    )


def needed(*arguments, **fields):
    quotas = quota_needed(cluster(*arguments, **fields))
    assert all(
        quota.amount > 0 and quota.reason and quota.source.text and quota.unit for quota in quotas
    )
    return {quota.metric: quota for quota in quotas}


@pytest.mark.parametrize(
    ("machine", "metric"),
    [
        ("a2-highgpu-8g", "PREEMPTIBLE_NVIDIA_A100_GPUS"),
        ("a2-ultragpu-8g", "PREEMPTIBLE_NVIDIA_A100_80GB_GPUS"),
        ("a3-highgpu-8g", "PREEMPTIBLE_NVIDIA_H100_GPUS"),
        ("a3-megagpu-8g", "PREEMPTIBLE_NVIDIA_H100_MEGA_GPUS"),
        ("a3-ultragpu-8g", "PREEMPTIBLE_NVIDIA_H200_GPUS"),
        ("a4-highgpu-8g", "PREEMPTIBLE_NVIDIA_B200_GPUS"),
        ("g2-standard-96", "PREEMPTIBLE_NVIDIA_L4_GPUS"),
    ],
)
@pytest.mark.parametrize("consumption", ["spot", "flex-start", "flex-start-queued"])
def test_spot_and_flex_start_use_preemptible_quota(machine, metric, consumption):
    quota = needed(machine, consumption)[metric]
    assert (quota.amount, quota.region, quota.source.unverified) == (16, "us-central1", False)
    assert "GPUS_PER_GPU_FAMILY" not in needed(machine, consumption)


def test_a_queued_request_counts_as_one_whatever_its_size():
    quotas = needed(consumption="flex-start-queued", nodes=64)
    assert quotas["ACTIVE_RESIZE_REQUESTS"].amount == 1
    assert quotas["PREEMPTIBLE_NVIDIA_B200_GPUS"].amount == 512
    assert "ACTIVE_RESIZE_REQUESTS" not in needed(consumption="spot")


def test_on_demand_of_newer_gpus_is_a_family_of_one_metric_and_counts_globally_too():
    quotas = needed("a3-megagpu-8g", "on-demand", nodes=3)
    family = quotas["GPUS_PER_GPU_FAMILY"]
    assert (family.amount, dict(family.dimensions)) == (24, {"gpu_family": "NVIDIA_H100_MEGA"})
    assert (quotas["GPUS_ALL_REGIONS"].amount, quotas["GPUS_ALL_REGIONS"].region) == (24, None)
    assert not any(metric.startswith("PREEMPTIBLE") for metric in quotas)


def test_on_demand_of_older_gpus_has_a_metric_of_its_own_and_counts_vcpus():
    quotas = needed(
        "a2-highgpu-8g", "on-demand", "gce", location={"project": "p", "zone": "us-central1-b"}
    )
    assert (quotas["NVIDIA_A100_GPUS"].amount, quotas["NVIDIA_A100_GPUS"].region) == (
        16,
        "us-central1",
    )
    assert quotas["A2_CPUS"].amount == 192
    assert "A2_CPUS" not in needed("a3-highgpu-8g", "on-demand")


@pytest.mark.parametrize("consumption", ["reservation", "calendar"])
def test_what_a_reservation_holds_is_not_counted_again(consumption):
    quotas = needed(consumption=consumption, reservation="mine")
    assert not any("GPU" in metric for metric in quotas)
    assert quotas["NETWORKS"].amount == 3


@pytest.mark.parametrize(
    ("machine", "networks", "subnets"),
    [
        ("a3-highgpu-8g", 4, 4),
        ("a3-megagpu-8g", 8, 8),
        ("a4-highgpu-8g", 2, 9),
        ("a4x-highgpu-4g", 2, 5),
    ],
)
def test_data_nics_need_networks_of_their_own_and_a_made_cluster_one_more(
    machine, networks, subnets
):
    for platform, own in (("slurm", 0), ("gce", 1), ("gke", 1)):
        quotas = needed(machine, "reservation", platform, reservation="mine")
        amounts = (quotas["NETWORKS"].amount, quotas["SUBNETWORKS"].amount)
        assert amounts == (networks + own, subnets + own)
        assert quotas["NETWORKS"].region is None


def test_disks_and_addresses_grow_with_the_nodes():
    quotas = needed(nodes=10)
    assert quotas["PREEMPTIBLE_LOCAL_SSD_GB"].amount == 10 * 12000
    assert quotas["HDB_TOTAL_GB"].amount == 10 * 200
    made = needed(nodes=10, platform="gce")
    assert made["HDB_TOTAL_GB"].amount == 10 * 200
    assert made["IN_USE_ADDRESSES"].amount == 1
    assert not {"CPUS", "SSD_TOTAL_GB"} & made.keys()  # No controllers.
    public = needed(nodes=10, platform="gce", cluster={"private_nodes": False})
    assert public["IN_USE_ADDRESSES"].amount == 10
    on_slurm = needed(nodes=10, platform="slurm")
    assert on_slurm["HDB_TOTAL_GB"].amount == 10 * 200
    assert on_slurm["IN_USE_ADDRESSES"].amount == 1
    assert "PREEMPTIBLE_LOCAL_SSD_GB" not in needed("a2-highgpu-8g")


CPU_NODES = 3
"""Of the pool of the controllers, one in each zone of the control plane."""


def test_private_nodes_of_gke_share_the_addresses_of_nat():
    assert needed(nodes=10)["IN_USE_ADDRESSES"].amount == 1
    # An address of Cloud NAT serves 64,512 / 64 = 1,008 machines.
    assert needed(nodes=1008 - CPU_NODES)["IN_USE_ADDRESSES"].amount == 1
    assert needed(nodes=1009 - CPU_NODES)["IN_USE_ADDRESSES"].amount == 2
    assert needed(nodes=10)["ROUTERS"].amount == 1
    public = needed(nodes=10, cluster={"private_nodes": False})
    assert public["IN_USE_ADDRESSES"].amount == 10 + CPU_NODES
    assert "ROUTERS" not in public


def test_the_pool_of_the_controllers_counts_by_its_machine_and_its_disks():
    assert needed()["CPUS"].amount == CPU_NODES * 16
    assert needed()["SSD_TOTAL_GB"].amount == CPU_NODES * 200
    other = needed(cluster={"cpu_pool": {"machine": "n2-standard-8", "nodes": 2}, "disk_gib": 100})
    assert other["N2_CPUS"].amount == 2 * CPU_NODES * 8
    assert "CPUS" not in other
    assert other["SSD_TOTAL_GB"].amount == 2 * CPU_NODES * 100
    assert other["HDB_TOTAL_GB"].amount == 2 * 100


def test_all_pools_are_summed_by_metric():
    quotas = needed(
        "a3-megagpu-8g",
        "flex-start-queued",
        cluster={
            "pools": [
                {"consumption": "spot", "nodes": 3},
                {"name": "other", "consumption": "flex-start-queued", "nodes": 1},
                {"consumption": "on-demand", "nodes": 5, "machine": "g2-standard-96"},
            ]
        },
    )
    assert quotas["PREEMPTIBLE_NVIDIA_H100_MEGA_GPUS"].amount == (2 + 3 + 1) * 8
    assert quotas["NVIDIA_L4_GPUS"].amount == quotas["GPUS_ALL_REGIONS"].amount == 5 * 8
    assert quotas["ACTIVE_RESIZE_REQUESTS"].amount == 2
    assert quotas["HDB_TOTAL_GB"].amount == (2 + 3 + 1) * 200
    assert quotas["SSD_TOTAL_GB"].amount == (5 + CPU_NODES) * 200
    assert quotas["SSD_TOTAL_GB"].reason.count("boot disks") == 2
    assert quotas["NETWORKS"].amount == 9


@pytest.mark.parametrize(
    ("machine", "settings", "rules"),
    [
        ("a3-megagpu-8g", {}, 8),
        ("a3-highgpu-8g", {}, 4),
        # RDMA networks have no firewall; the second host NIC's has.
        ("a4-highgpu-8g", {}, 1),
        ("a4-highgpu-8g", {"network_stack": "ethernet"}, 0),
        ("a4-highgpu-8g", {"kubernetes": {"pod_network": "dranet"}}, 0),
        ("g2-standard-8", {}, 0),
        (
            "a3-highgpu-8g",
            {
                "cluster": {
                    "pools": [{"consumption": "spot", "nodes": 1, "machine": "a4-highgpu-8g"}]
                }
            },
            5,
        ),
    ],
)
def test_firewall_rules_are_those_of_the_networks_of_all_pools(machine, settings, rules):
    quotas = needed(machine, "spot", **settings)
    assert ("FIREWALLS" in quotas) == bool(rules)
    if rules:
        assert (quotas["FIREWALLS"].amount, quotas["FIREWALLS"].region) == (rules, None)


@pytest.mark.parametrize(
    ("zone", "region"),
    [
        ("us-central1-b", "us-central1"),
        ("us-central1-ai1a", "us-central1"),
        ("us-east-1a", "us-east-1"),
        ("eu-north1", "eu-north1"),
    ],
)
def test_the_region_of_a_zone(zone, region):
    assert region_of(cluster(location={"project": "p", "zone": zone})) == region


def test_each_metric_is_listed_once_for_each_place():
    quotas = quota_needed(cluster("g2-standard-96", "on-demand", nodes=2))
    keys = [(each.metric, each.region, str(each.dimensions)) for each in quotas]
    assert len(set(keys)) == len(keys)


def test_vertex_counts_training_gpus_and_says_which_names_are_unverified():
    spot = needed("a3-megagpu-8g", "spot", "vertex")
    assert {metric: quota.amount for metric, quota in spot.items()} == {
        "custom_model_training_preemptible_nvidia_h100_mega_gpus": 16
    }
    on_demand = needed("a3-ultragpu-8g", "on-demand", "vertex")[
        "custom_model_training_nvidia_h200_gpus"
    ]
    assert on_demand.source.unverified
    assert not spot["custom_model_training_preemptible_nvidia_h100_mega_gpus"].source.unverified


def test_nebius_counts_gpus_machines_disks_and_the_gpu_cluster():
    quotas = needed(
        "gpu-h100-sxm", "on-demand", "nebius", location={"project": "p", "region": "eu-north1"}
    )
    assert {metric: quota.amount for metric, quota in quotas.items()} == {
        "compute.instance.gpu.h100": 16,
        "compute.instance.count": 2,
        "compute.disk.count": 2,
        "compute.gpucluster.count": 1,
    }
    assert "compute.gpucluster.count" not in needed("gpu-h100-sxm", "on-demand", "nebius", nodes=1)
    assert "compute.instance.gpu.h100" not in needed(
        "gpu-h100-sxm", "reservation", "nebius", reservation="mine"
    )


def test_aws_counts_vcpus_by_family():
    zone = {"project": "p", "zone": "us-east-1a"}
    on_demand = needed("p5.48xlarge", "on-demand", "slurm", location=zone)[
        "Running On-Demand P instances"
    ]
    assert (on_demand.amount, on_demand.unit, on_demand.region) == (384, "vCPUs", "us-east-1")
    assert list(needed("p4d.24xlarge", "spot", "slurm", location=zone)) == [
        "All P4, P3 and P2 Spot Instance Requests"
    ]


def test_machines_that_are_there_already_need_nothing():
    assert quota_needed(ClusterConfig(name="c", platform="local")) == []
    assert quota_needed(ClusterConfig(name="c", platform="ssh", machine="a4-highgpu-8g")) == []
    assert quota_needed(ClusterConfig(name="c", platform="slurm", nodes=4)) == []
    assert (
        quota_needed(ClusterConfig(name="c", platform="slurm", machine="a3-megagpu-8g", nodes=4))
        == []
    )


def test_a_machine_of_another_cloud_is_an_error():
    with pytest.raises(UserError, match=r"p5\.48xlarge.*AWS.*gke.*Google Cloud"):
        quota_needed(cluster("p5.48xlarge"))


def test_a_machine_of_another_cloud_in_a_further_pool_is_an_error_that_names_the_pool():
    pools = {"pools": [{"consumption": "spot", "nodes": 1, "machine": "p5.48xlarge"}]}
    with pytest.raises(UserError, match=r"cluster\.pools\[0\].*p5\.48xlarge.*AWS.*gke"):
        quota_needed(cluster(cluster=pools))


def test_an_unknown_machine_is_reported_with_the_nearest():
    with pytest.raises(UserError, match="mean a4-highgpu-8g"):
        quota_needed(cluster("a4-highgpu"))


@pytest.mark.parametrize(
    ("amount", "unit", "said"),
    [
        (1, "addresses", "1 address"),
        (1, "networks", "1 network"),
        (1, "GB", "1 GB"),
        (2, "rules", "2 rules"),
    ],
)
def test_a_quota_is_said_in_its_number(amount: int, unit: str, said: str) -> None:
    quota = Quota("METRIC", None, amount, unit, "", FactSource("a page", None), {})
    assert quota.in_words == f"{said} of METRIC"
