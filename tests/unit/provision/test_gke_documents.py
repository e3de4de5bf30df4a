"""Published descriptions of clusters for training, each fact that they ask for beside the place
where a plan renders it.

Three documents: a tutorial of Llama 3.1 70B on B200 (or H200) nodes, queued by DWS or spot, with
RDMA; an overview of distributed training with A3 and A3 Mega on GKE; and a recipe of Llama 3 70B on
up to 64 A3 Mega nodes with topology-aware scheduling. A fact is a sentence of ours and the value
that a plan must have at a path: `google_container_cluster.cluster.datapath_provider`. What the
documents ask of Kueue, JobSet and installers is asked of the plan's Helm releases.
"""

from __future__ import annotations

import re

import pytest
from tests.unit.provision.clusters import bodies, config, gpu_pools, plan

from drillyard.errors import UserError

CLUSTER = "google_container_cluster.cluster"


def value(found, path):
    """What the document has at a path; the content of the only item of a list stands for it."""
    kind, label, *keys = path.split(".")
    here = bodies(found, kind)[label]
    for key in keys:
        if isinstance(here, list):
            here = here[int(key)] if key.isdigit() else here[0]
        if not key.isdigit():
            here = here[key]
    return here


def facts_hold(found, facts):
    wrong = {}
    for sentence, (path, expected) in facts.items():
        rendered = value(found, path)
        if rendered != expected:
            wrong[sentence] = (path, rendered)
    assert not wrong


@pytest.fixture
def tutorial(tmp_path):
    """A queued pool and a spot pool of B200 nodes in one cluster."""
    spot = {"name": "gpu-nodepool-spot", "consumption": "spot", "nodes": 2}
    content = config(
        "a4-highgpu-8g",
        "flex-start-queued",
        name="b200",
        nodes=4,
        storage={"bucket": "b200-training"},
        kubernetes={"queue": "dws-local-queue"},
        cluster={"pools": [spot]},
    )
    return plan(tmp_path, content)


DWS = "google_container_node_pool.b200_flex_start_queued"
SPOT = "google_container_node_pool.gpu_nodepool_spot"
TUTORIAL = {
    # Networks.
    "a VPC of its own for the first host NIC": ("google_compute_network.system.name", "b200"),
    "a second VPC for the other host NIC": ("google_compute_network.gvnic_1.name", "b200-gvnic-1"),
    "the second host NIC's VPC has large frames": ("google_compute_network.gvnic_1.mtu", 8896),
    "a third VPC for the GPUs' NICs, RoCE by the zone's profile": (
        "google_compute_network.rdma.network_profile",
        "projects/my-project/global/networkProfiles/us-central1-b-vpc-roce",
    ),
    "the host NICs' network lets the nodes through": (
        "google_compute_firewall.gvnic_1.allow",
        [{"protocol": "tcp"}, {"protocol": "udp"}, {"protocol": "icmp"}],
    ),
    # The cluster.
    "--enable-dataplane-v2": (f"{CLUSTER}.datapath_provider", "ADVANCED_DATAPATH"),
    "--enable-ip-alias": (f"{CLUSTER}.networking_mode", "VPC_NATIVE"),
    "--enable-multi-networking": (f"{CLUSTER}.enable_multi_networking", True),
    "the bucket is mounted by GCS FUSE": (
        f"{CLUSTER}.addons_config.gcs_fuse_csi_driver_config.enabled",
        True,
    ),
    "pods have permissions of their own": (
        f"{CLUSTER}.workload_identity_config.workload_pool",
        "my-project.svc.id.goog",
    ),
    # The queued pool.
    "B200 nodes": (f"{DWS}.node_config.machine_type", "a4-highgpu-8g"),
    "eight B200s": (f"{DWS}.node_config.guest_accelerator.count", 8),
    "of GKE's name": (f"{DWS}.node_config.guest_accelerator.type", "nvidia-b200"),
    "gpu-driver-version=DEFAULT": (
        f"{DWS}.node_config.guest_accelerator.gpu_driver_installation_config.gpu_driver_version",
        "DEFAULT",
    ),
    "--reservation-affinity=none": (
        f"{DWS}.node_config.reservation_affinity.consume_reservation_type",
        "NO_RESERVATION",
    ),
    "--location-policy=ANY": (f"{DWS}.autoscaling.location_policy", "ANY"),
    "--enable-queued-provisioning": (f"{DWS}.queued_provisioning.enabled", True),
    "--flex-start": (f"{DWS}.node_config.flex_start", True),
    "--no-enable-autorepair": (f"{DWS}.management.auto_repair", False),
    # A cluster of a release channel refuses pools without auto_upgrade: nodes are kept by this.
    "--no-enable-autoupgrade: no upgrade interrupts a job": (
        f"{CLUSTER}.maintenance_policy.maintenance_exclusion.exclusion_options.scope",
        "NO_MINOR_OR_NODE_UPGRADES",
    ),
    "--enable-autoscaling, from zero": (f"{DWS}.autoscaling.total_min_node_count", 0),
    "with zero initial nodes": (f"{DWS}.initial_node_count", 0),
    "as many nodes as a job may have": (f"{DWS}.autoscaling.total_max_node_count", 4),
    "gvNIC": (f"{DWS}.node_config.gvnic.enabled", True),
    # The spot pool beside it.
    "spot nodes": (f"{SPOT}.node_config.spot", True),
    "of the same machine": (f"{SPOT}.node_config.machine_type", "a4-highgpu-8g"),
    "which come online by themselves": (f"{SPOT}.node_count", 2),
    # Storage and images.
    "a bucket for data and checkpoints": ("google_storage_bucket.runs.name", "b200-training"),
    "in the region": ("google_storage_bucket.runs.location", "us-central1"),
    "a repository for the image": ("google_artifact_registry_repository.images.format", "DOCKER"),
    "in the same region": ("google_artifact_registry_repository.images.location", "us-central1"),
    "jobs may write to the bucket": (
        "google_storage_bucket_iam_member.namespace_runs.role",
        "roles/storage.objectUser",
    ),
    "nodes may read images": (
        "google_project_iam_member.artifactregistry_reader.role",
        "roles/artifactregistry.reader",
    ),
    "tearing down leaves the project's APIs": (
        "google_project_service.container.disable_on_destroy",
        False,
    ),
}


def test_the_tutorial_of_queued_and_spot_b200_nodes(tutorial):
    facts_hold(tutorial, TUTORIAL)


def test_the_tutorials_rdma_networks(tutorial):
    """One VPC with eight subnets for the NICs, no firewall rule there, and every pool's nodes have
    nine further interfaces in the order of the NICs."""
    subnets = bodies(tutorial, "google_compute_subnetwork")
    rdma = [f"rdma_{number}" for number in range(8)]
    assert {name for name, each in subnets.items() if ".rdma." in each["network"]} == set(rdma)
    firewalls = bodies(tutorial, "google_compute_firewall")
    assert not [each for each in firewalls.values() if ".rdma." in each["network"]]
    for pool in (DWS, SPOT):
        interfaces = value(tutorial, f"{pool}.network_config.additional_node_network_configs")
        assert [re.findall(r"\.(\w+)\.", each["subnetwork"]) for each in interfaces] == [
            *([each] for each in ("gvnic_1", *rdma))
        ]
        assert {each["network"] for each in interfaces[1:]} == {
            "${google_compute_network.rdma.name}"
        }


def test_the_tutorials_network_objects(tutorial):
    """GKENetworkParamSet rdma-0: VPC, subnet and device mode, as rendered for the chart."""
    first = next(each for each in tutorial.interfaces if each.network_object == "rdma-0")
    assert (first.vpc, first.subnet, first.device_mode) == ("b200-rdma", "b200-rdma-0", "RDMA")


def test_the_tutorial_supports_h200_as_well(tmp_path):
    found = plan(tmp_path, config("a3-ultragpu-8g", "flex-start-queued"))
    [pool] = gpu_pools(found).values()
    assert pool["node_config"][0]["guest_accelerator"][0]["type"] == "nvidia-h200-141gb"
    assert len(pool["network_config"][0]["additional_node_network_configs"]) == 9


@pytest.mark.parametrize(
    ("machine", "data_networks"),
    [
        ("a3-megagpu-8g", 8),
        ("a3-highgpu-8g", 4),
        ("a3-ultragpu-8g", 9),
        ("a2-highgpu-8g", 0),
        ("a2-ultragpu-8g", 0),
        ("g2-standard-96", 0),
    ],
)
def test_the_overview_of_machines(machine, data_networks, tmp_path):
    """Each machine that it names, with the networks of GPUDirect where it has them."""
    [pool] = gpu_pools(plan(tmp_path, config(machine, "reservation"))).values()
    interfaces = pool.get("network_config", [{}])[0].get("additional_node_network_configs", [])
    assert len(interfaces) == data_networks


def test_the_overview_of_ways_to_buy(tmp_path):
    """A reservation (of a commitment, or of DWS calendar), DWS flex, on demand and spot, as pools
    of one A3 Mega cluster."""
    further = [
        {"name": "calendar", "consumption": "calendar", "reservations": ["booked"], "nodes": 4},
        {"name": "dws", "consumption": "flex-start-queued", "nodes": 8},
        {"name": "flex", "consumption": "flex-start", "nodes": 8},
        {"name": "any", "consumption": "on-demand", "nodes": 2},
        {"name": "cheap", "consumption": "spot", "nodes": 2},
    ]
    content = config(
        "a3-megagpu-8g", "reservation", name="mega", cluster={"pools": further, "version": "1.33"}
    )
    pool = "google_container_node_pool"
    affinity = "node_config.reservation_affinity"
    facts_hold(
        plan(tmp_path, content),
        {
            "a reservation of one's own": (f"{pool}.mega_reservation.{affinity}.values", ["mine"]),
            "consumed by name": (
                f"{pool}.mega_reservation.{affinity}.consume_reservation_type",
                "SPECIFIC_RESERVATION",
            ),
            "DWS calendar": (f"{pool}.calendar.{affinity}.values", ["booked"]),
            "a DWS enabled pool": (f"{pool}.dws.queued_provisioning.enabled", True),
            "flex-start": (f"{pool}.flex.node_config.max_run_duration", "604800s"),
            "on demand": (f"{pool}.any.node_count", 2),
            "on-demand nodes near each other": (f"{pool}.any.placement_policy.type", "COMPACT"),
            "spot": (f"{pool}.cheap.node_config.spot", True),
            "GPUDirect-TCPXO: eight NICs with their frames": (
                "google_compute_network.vpc8.mtu",
                8244,
            ),
            "and their ports": (
                "google_compute_firewall.vpc8.allow",
                [{"protocol": "tcp"}, {"protocol": "udp"}, {"protocol": "icmp"}],
            ),
        },
    )


def test_the_recipe_of_64_a3_mega_nodes(tmp_path):
    content = config(
        "a3-megagpu-8g",
        "reservation",
        name="a3mega",
        nodes=64,
        storage={"bucket": "a3mega-logs"},
        kubernetes={"queue": "a3-mega", "topology": {"preferred": "kubernetes.io/hostname"}},
        cluster={"version": "1.33"},
    )
    found = plan(tmp_path, content)
    pool = "google_container_node_pool.a3mega_reservation"
    facts_hold(
        found,
        {
            "a regional Standard cluster": (f"{CLUSTER}.location", "us-central1"),
            "of version 1.32.4-gke.1767000 or later": (f"{CLUSTER}.min_master_version", "1.33"),
            "a pool of 64 nodes": (f"{pool}.node_count", 64),
            "a3-megagpu-8g": (f"{pool}.node_config.machine_type", "a3-megagpu-8g"),
            "eight H100 Mega GPUs": (
                f"{pool}.node_config.guest_accelerator.type",
                "nvidia-h100-mega-80gb",
            ),
            "provisioned densely: by the reservation": (
                f"{pool}.node_config.reservation_affinity.consume_reservation_type",
                "SPECIFIC_RESERVATION",
            ),
            "Workload Identity Federation": (
                f"{CLUSTER}.workload_identity_config.workload_pool",
                "my-project.svc.id.goog",
            ),
            "with the nodes' metadata server": (
                f"{pool}.node_config.workload_metadata_config.mode",
                "GKE_METADATA",
            ),
            "Cloud Storage FUSE CSI driver": (
                f"{CLUSTER}.addons_config.gcs_fuse_csi_driver_config.enabled",
                True,
            ),
            "DCGM metrics": (
                f"{CLUSTER}.monitoring_config.enable_components",
                ["SYSTEM_COMPONENTS", "CADVISOR", "KUBELET", "DCGM"],
            ),
            "which managed Prometheus collects": (
                f"{CLUSTER}.monitoring_config.managed_prometheus.enabled",
                True,
            ),
            "a regional bucket for logs": ("google_storage_bucket.runs.location", "us-central1"),
            "Artifact Registry for the image": (
                "google_artifact_registry_repository.images.format",
                "DOCKER",
            ),
            "local SSDs below the pods' files": (
                f"{pool}.node_config.ephemeral_storage_local_ssd_config.local_ssd_count",
                16,
            ),
        },
    )
    networks = value(found, f"{pool}.network_config.additional_node_network_configs")
    assert len(networks) == len({each["network"] for each in networks}) == 8


def releases(found):
    """The plan's Helm releases by name."""
    return {each.name: each for each in found.releases}


def charts_hold(found, facts):
    """Facts about Helm values: the path is the release and keys, with spaces between them."""
    wrong = {}
    for sentence, (path, expected) in facts.items():
        name, *keys = path.split(" ")
        here = releases(found)[name].values
        for key in keys:
            here = here[int(key) if isinstance(here, list) else key]
        if here != expected:
            wrong[sentence] = (path, here)
    assert not wrong


OWN = "drillyard-cluster"
TUTORIAL_CHARTS = {
    "a local queue of the name that jobs have": (f"{OWN} pools 0 queue", "dws-local-queue"),
    "whose nodes Kueue asks of DWS": (
        f"{OWN} pools 0 provisioningClass",
        "queued-provisioning.gke.io",
    ),
    "on the queued pool alone": (
        f"{OWN} pools 0 nodeLabels",
        {"cloud.google.com/gke-nodepool": "b200-flex-start-queued"},
    ),
    "its quota: the GPUs of all nodes": (f"{OWN} pools 0 resources nvidia.com/gpu", "32"),
    "a queue of the spot pool, without DWS": (f"{OWN} pools 1 provisioningClass", ""),
    "GKENetworkParamSet rdma-0: the RDMA network": (f"{OWN} networks 1 vpc", "b200-rdma"),
    "and its first subnet": (f"{OWN} networks 1 subnet", "b200-rdma-0"),
    "deviceMode: RDMA": (f"{OWN} networks 1 deviceMode", "RDMA"),
    "the other host NIC is an ordinary device": (f"{OWN} networks 0 deviceMode", "NetDevice"),
    "NCCL and gIB are installed on nodes of B200s": (
        f"{OWN} installers 0 accelerators",
        ["nvidia-b200"],
    ),
    "a service account for the jobs": (f"{OWN} serviceAccount name", "trainer"),
}


def test_the_tutorials_queues_and_installer(tutorial):
    assert {"kueue", "jobset", OWN} == releases(tutorial).keys()
    charts_hold(tutorial, TUTORIAL_CHARTS)
    values = releases(tutorial)[OWN].values
    assert [each["name"] for each in values["networks"]] == [
        *("gvnic-1", *(f"rdma-{number}" for number in range(8)))
    ]
    [installer] = values["installers"]
    assert "gpudirect-gib/nccl-plugin-gib" in installer["image"]


def test_the_tutorials_capacity_quota_and_cost(tutorial):
    """It uses spot and preemptible quota of B200s, and has a price per step: DWS is billed only
    while nodes are there."""
    quotas = {each.metric: each.amount for each in tutorial.quotas}
    assert quotas["PREEMPTIBLE_NVIDIA_B200_GPUS"] == (4 + 2) * 8
    assert quotas["ACTIVE_RESIZE_REQUESTS"] == 1
    [queued] = [each for each in tutorial.prices if each.pool == "b200-flex-start-queued"]
    assert not queued.running
    # $0.5198 for a step of 14.53 s on two nodes.
    hour = queued.usd_per_hour.value / 4
    assert hour * 2 * 14.53 / 3600 == pytest.approx(0.5198, rel=0.01)


def test_the_tutorials_bucket_and_image_are_those_of_its_jobs(tutorial):
    """What the training chart is given: a bucket that jobs mount, and a registry in the region."""
    names = {each.kind: each.name for each in tutorial.resources}
    assert names["google_artifact_registry_repository"] == "b200"
    members = bodies(tutorial, "google_storage_bucket_iam_member").values()
    assert all("/sa/trainer" in each["member"] for each in members)
    assert {each["role"] for each in members} == {"roles/storage.objectUser"}


def test_the_tutorial_with_a_reservation_instead(tmp_path):
    """It says that a reservation needs other flags alone."""
    dws = plan(tmp_path, config("a4-highgpu-8g", "flex-start-queued", name="b200"))
    bound = plan(tmp_path, config("a4-highgpu-8g", "reservation", name="b200"))
    [pool] = gpu_pools(bound).values()
    assert pool["node_config"][0]["reservation_affinity"][0]["values"] == ["mine"]
    for kind in ("google_compute_network", "google_compute_subnetwork", "google_container_cluster"):
        assert bodies(bound, kind) == bodies(dws, kind)


RECIPE_CHARTS = {
    "the name of the local queue": (f"{OWN} pools 0 queue", "a3-mega"),
    "topology-aware scheduling, by block, subblock and host": (
        f"{OWN} pools 0 topologyLevels",
        [
            "cloud.google.com/gce-topology-block",
            "cloud.google.com/gce-topology-subblock",
            "cloud.google.com/gce-topology-host",
            "kubernetes.io/hostname",
        ],
    ),
    "for up to 512 GPUs": (f"{OWN} pools 0 resources nvidia.com/gpu", "512"),
    "GPUDirect-TCPXO on H100 Mega nodes": (
        f"{OWN} installers 0 accelerators",
        ["nvidia-h100-mega-80gb"],
    ),
    "whose daemon gets its GPUs by the device injector": (
        f"{OWN} deviceInjector accelerators",
        ["nvidia-h100-mega-80gb"],
    ),
    "eight networks of data NICs": (f"{OWN} networks 7 name", "vpc8"),
}


def test_the_recipes_queue_and_installers(tmp_path):
    """Kueue, JobSet and the NCCL plugin of the version that it names (1.0.3 with RxDM 1.0.9)."""
    kubernetes = {"queue": "a3-mega", "nccl_plugin": "1.0.3"}
    found = plan(tmp_path, config("a3-megagpu-8g", "reservation", nodes=64, kubernetes=kubernetes))
    assert {"kueue", "jobset", OWN} == releases(found).keys()
    charts_hold(found, RECIPE_CHARTS)
    values = releases(found)[OWN].values
    assert values["installers"][0]["image"].endswith("gpudirecttcpx-dev:v1.0.3")
    assert "nri-device-injector" in values["deviceInjector"]["image"]


@pytest.mark.parametrize("nodes", [16, 32, 64])
def test_the_recipes_sizes(nodes, tmp_path):
    found = plan(tmp_path, config("a3-megagpu-8g", "reservation", nodes=nodes))
    [pool] = gpu_pools(found).values()
    assert pool["node_count"] == nodes


def test_the_recipes_version_of_gke(tmp_path):
    """1.32.4-gke.1767000 or later: that one is too old for its network stack today, and the error
    says which is not."""
    version = "1.32.4-gke.1767000"
    content = config("a3-megagpu-8g", "reservation", cluster={"version": version})
    with pytest.raises(UserError, match=r"1\.32\.11-gke\.1174000"):
        plan(tmp_path, content)
    found = plan(tmp_path, config("a3-megagpu-8g", "reservation", cluster={"version": "1.32"}))
    assert value(found, f"{CLUSTER}.min_master_version") == "1.32"
