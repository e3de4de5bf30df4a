"""The releases of a cluster and their values, from its config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.unit.launch.requests import WORKLOAD, planned, request
from tests.unit.provision.chart_plans import GKE, chart_values, gke, plan, sold

from drillyard.errors import UserError
from drillyard.hardware import catalog
from drillyard.launch.kubernetes import submission_checks
from drillyard.launch.kubernetes.created_cluster import PRIVILEGED, RESTRICTED
from drillyard.launch.kubernetes.pod_network import privileges
from drillyard.launch.kubernetes.release import VALUES, rights_for
from drillyard.provision import cluster_chart
from drillyard.provision.provisioner import plan_cluster

CHART = Path(__file__).parents[3] / "charts/drillyard-cluster"


def launched(machine: str, consumption: str, more: str = "") -> dict[str, Any]:
    """The values of a run on the cluster, launched with the file that made it."""
    text = GKE.format(machine=machine, consumption=consumption)
    if consumption in ("reservation", "calendar"):
        text += "reservation: r\n"
    found = planned(request(f"{text}image: i:1\n{more}", WORKLOAD)).file(VALUES).content
    values: dict[str, Any] = yaml.safe_load(found)
    return values


@pytest.mark.parametrize(("machine", "consumption"), list(sold()))
def test_a_run_launched_with_the_same_file_meets_what_the_chart_makes(
    machine: str, consumption: str
) -> None:
    """Of every machine that GKE sells, in every way: queue, account, networks, plugin, level."""
    made, run = chart_values(plan(machine, consumption)), launched(machine, consumption)
    (pool,) = made["pools"]
    assert run["queue"] == pool["queue"] == pool["name"]
    assert run["serviceAccount"] == made["serviceAccount"]["name"] == "trainer"
    settings = plan(machine, consumption).launch_settings
    assert settings is not None
    namespace = settings["kubernetes"]["namespace"]
    assert namespace == (PRIVILEGED if privileges(run) else RESTRICTED)
    networks = {each["name"] for each in made["networks"]}
    used = {each["network"] for each in run.get("network", {}).get("interfaces", [])}
    assert used - {"default"} <= networks
    asked = {**run["resources"].get("limits", {}), **run["resources"].get("requests", {})}
    assert set(asked) <= set(pool["resources"])
    assert {"cpu", "memory"} <= set(pool["resources"])
    on_node = {each["hostPath"] for each in run.get("hostPaths", [])}
    installed = {each["stack"] for each in made["installers"]}
    assert bool(installed) == any(path.startswith("/home/kubernetes/bin/") for path in on_node) or (
        catalog().machine(machine).pods is not None
    )
    if devices := run.get("network", {}).get("sidecar", {}).get("devices"):
        assert "/dev/nvidia0" in devices
        assert made["deviceInjector"]["image"]
    assert (pool["provisioningClass"] != "") == (consumption == "flex-start-queued")


def test_releases_come_in_the_order_in_which_they_need_each_other() -> None:
    found = plan("a4-highgpu-8g", "flex-start-queued").releases
    assert [each.name for each in found] == ["jobset", "kueue", "drillyard-cluster"]
    assert found[0].version == submission_checks.JOBSET_VERSION
    config = yaml.safe_load(found[1].values["managerConfig"]["controllerManagerConfigYaml"])
    assert config["integrations"]["frameworks"] == ["batch/job", "jobset.x-k8s.io/jobset"]


def test_only_machines_in_an_nvlink_domain_get_the_driver_of_compute_domains() -> None:
    found = plan("a4x-highgpu-4g", "reservation")
    driver = found.releases[-1]
    assert driver.name == driver.namespace == "nvidia-dra-driver-gpu"
    assert chart_values(found)["systemNamespaces"] == [driver.namespace]
    assert chart_values(plan("a3-ultragpu-8g", "spot"))["systemNamespaces"] == []


def test_the_installer_of_arm_nodes_is_another_image() -> None:
    (installer,) = chart_values(plan("a4x-highgpu-4g", "reservation"))["installers"]
    assert installer["architecture"] == "arm64" and "gib-arm64" in installer["image"]
    assert installer["accelerators"] == ["nvidia-gb200"]


def test_machines_that_have_the_libraries_in_the_image_get_no_installer() -> None:
    assert chart_values(plan("a4x-maxgpu-4g-metal", "reservation"))["installers"] == []
    image = "kubernetes: {network_libraries: image, pod_network: dranet}\ncluster: {}\n"
    assert chart_values(plan("a4-highgpu-8g", "spot", image))["installers"] == []


def test_the_installer_has_the_plugin_whose_daemon_launch_starts() -> None:
    older = "cluster: {}\nkubernetes: {nccl_plugin: 1.0.14}\n"
    (installer,) = chart_values(plan("a3-megagpu-8g", "spot", older))["installers"]
    assert installer["image"].endswith(":v1.0.14")
    sidecar = launched("a3-megagpu-8g", "spot", older)["network"]["sidecar"]
    assert sidecar["image"].endswith(":v1.0.20")


@pytest.mark.parametrize("stack", ["tcpx", "tcpxo"])
def test_the_pair_without_a_setting_is_a_known_one(stack: str) -> None:
    facts = catalog().network_stack(stack)
    plugin = facts.images["installer"].rpartition(":v")[2]
    daemon = facts.daemon_of(plugin)
    assert daemon is not None and facts.images["sidecar"].endswith(f":v{daemon['rxdm']}")


def test_a_plugin_without_a_known_daemon_is_refused() -> None:
    with pytest.raises(UserError, match=r"kubernetes\.nccl_plugin: .*9\.9\.9.*1\.0\.15"):
        plan("a3-megagpu-8g", "spot", "cluster: {}\nkubernetes: {nccl_plugin: 9.9.9}\n")


def test_pools_of_one_cluster_have_a_queue_each() -> None:
    more = (
        "cluster: {pools: [{consumption: spot, nodes: 3}, {name: x, consumption: spot, nodes: 1}]}"
    )
    first, spot, named = chart_values(plan("a4-highgpu-8g", "flex-start-queued", more))["pools"]
    assert [each["queue"] for each in (first, spot, named)] == [
        "c-flex-start-queued",
        "c-spot",
        "x",
    ]
    assert spot["resources"]["nvidia.com/gpu"] == "24"
    assert {each["key"] for each in spot["tolerations"]} == {
        "nvidia.com/gpu",
        "cloud.google.com/gke-spot",
    }


def test_the_first_pools_queue_is_the_one_that_the_config_names_unless_it_is_anothers() -> None:
    pools = "cluster: {pools: [{consumption: spot, nodes: 3}]}\n"
    own = plan("a4-highgpu-8g", "flex-start-queued", f"{pools}kubernetes: {{queue: dws}}\n")
    assert [each["queue"] for each in chart_values(own)["pools"]] == ["dws", "c-spot"]
    other = plan("a4-highgpu-8g", "flex-start-queued", f"{pools}kubernetes: {{queue: c-spot}}\n")
    queues = [each["queue"] for each in chart_values(other)["pools"]]
    assert queues == ["c-flex-start-queued", "c-spot"]


def test_only_dense_pools_are_placed_by_topology() -> None:
    """Kueue puts nothing on a node without the labels, which only dense placement gives."""
    levels = {
        (machine, consumption): chart_values(plan(machine, consumption))["pools"][0][
            "topologyLevels"
        ]
        for machine, consumption in (
            ("a3-megagpu-8g", "reservation"),
            ("a3-megagpu-8g", "spot"),
            ("a4-highgpu-8g", "flex-start-queued"),
            ("g2-standard-96", "reservation"),
        )
    }
    assert [len(each) for each in levels.values()] == [4, 0, 0, 0]
    assert levels["a3-megagpu-8g", "reservation"][-1] == "kubernetes.io/hostname"


def test_namespaces_have_a_quota_of_what_costs() -> None:
    found = chart_values(plan("a4-highgpu-8g", "spot"))["namespaces"]
    assert {each["name"]: each["level"] for each in found} == {
        "runs": "restricted",
        "runs-privileged": "privileged",
    }
    for each in found:
        assert each["quota"] == {"requests.nvidia.com/gpu": "16", "services.loadbalancers": "0"}


def test_the_role_of_the_chart_has_the_rights_that_launch_needs() -> None:
    every = {"controller": "job", "network": {"deviceClaim": {}, "computeDomainNodes": 2}}
    text = (CHART / "templates/namespaces.yaml").read_text()
    rules = [
        yaml.safe_load(line[2:]) for line in text.splitlines() if line.startswith("- {apiGroups: ")
    ]
    granted = {
        (verb, group, resource)
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    from drillyard.launch.kubernetes.release import READS

    assert granted == {*rights_for(every), *READS}


def test_the_version_of_the_chart_is_the_one_that_is_planned() -> None:
    found = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (found["name"], found["version"]) == (
        cluster_chart.OWN_CHART,
        cluster_chart.OWN_VERSION,
    )


EXISTING = """
name: team-a
platform: kubernetes
nodes: 4
machine: {machine}
storage: {{directory: /data}}
kubernetes: {{volume_claim: shared{more}}}
"""


def existing(machine: str = "a4-highgpu-8g", more: str = "") -> Any:
    return plan_cluster(request(EXISTING.format(machine=machine, more=more)).cluster)


def test_an_existing_cluster_gets_charts_and_nothing_of_a_cloud() -> None:
    found = existing()
    assert (found.terraform, found.resources, found.pools) == ({}, (), ())
    assert [each.name for each in found.releases] == ["jobset", "kueue", "drillyard-cluster"]
    (pool,) = chart_values(found)["pools"]
    assert (pool["queue"], pool["resources"]["nvidia.com/gpu"]) == ("team-a", "32")
    assert found.launch_settings == {
        "kubernetes": {
            "namespace": "runs-privileged",
            "queue": "team-a",
            "service_account": "trainer",
        }
    }


def test_a_namespace_and_queue_that_the_file_names_are_used_and_the_namespace_is_not_made() -> None:
    found = existing(more=", namespace: team, queue: gpus, node_selector: {pool: a}")
    values = chart_values(found)
    assert [(each["name"], each["create"]) for each in values["namespaces"]] == [("team", False)]
    assert values["pools"][0]["queue"] == "gpus"
    assert values["pools"][0]["nodeLabels"] == {"pool": "a"}


def test_the_queue_of_an_existing_cluster_covers_the_devices_of_its_stack() -> None:
    (pool,) = chart_values(existing("p5.48xlarge"))["pools"]
    assert pool["resources"]["vpc.amazonaws.com/efa"] == "128"


def test_launch_needs_an_image_and_the_plan_of_a_cluster_does_not() -> None:
    gke("a4-highgpu-8g", "spot")
    text = GKE.format(machine="a4-highgpu-8g", consumption="spot")
    with pytest.raises(UserError, match=r"image: missing.* us-central1-docker\.pkg\.dev/p/c/"):
        planned(request(text, WORKLOAD))
    own = WORKLOAD.replace("{command", "{image: own:1, command")
    assert planned(request(text, own)).image == "own:1"


def test_a_file_with_settings_and_without_a_section_cluster_gets_the_names_too() -> None:
    """`up` writes them into it, since `launch` takes such a file for another cluster's."""
    found = plan("a4-highgpu-8g", "spot", "kubernetes: {grace_seconds: 5}\n").launch_settings
    assert found is not None
    assert found["kubernetes"]["namespace"] == PRIVILEGED
    assert found["kubernetes"]["queue"] == "c-spot"
    assert found["kubernetes"]["context"] == "gke_p_us-central1_c"


@pytest.mark.parametrize(
    ("namespace", "machine", "level", "create"),
    [
        ("team", "a4-highgpu-8g", "privileged", True),
        ("team", "g2-standard-96", "restricted", True),
        ("default", "g2-standard-96", "restricted", False),
    ],
)
def test_a_namespace_that_the_file_names_gets_the_queues_too(
    namespace: str, machine: str, level: str, create: bool
) -> None:
    found = plan(machine, "spot", f"cluster: {{}}\nkubernetes: {{namespace: {namespace}}}\n")
    own = chart_values(found)["namespaces"][-1]
    assert (own["name"], own["level"], own["create"]) == (namespace, level, create)


def test_an_account_that_the_file_of_an_existing_cluster_names_is_not_made() -> None:
    account = chart_values(existing(more=", service_account: own"))["serviceAccount"]
    assert account == {"name": "own", "create": False}
    assert chart_values(existing())["serviceAccount"] == {"name": "trainer", "create": True}


def test_a_further_pool_keeps_its_machines_network_stack() -> None:
    """`network_stack` is that of the file's own machine, in the charts as in the networks."""
    pools = "cluster: {pools: [{name: m, machine: a3-megagpu-8g, consumption: spot, nodes: 3}]}\n"
    found = plan("a4-highgpu-8g", "spot", f"{pools}network_stack: ethernet\n")
    values = chart_values(found)
    assert [each["stack"] for each in values["installers"]] == ["tcpxo"]
    assert [each["name"] for each in values["networks"]] == [f"vpc{n}" for n in range(1, 9)]
