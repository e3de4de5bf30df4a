"""The chart `drillyard-cluster` as Helm renders it: for every machine that GKE sells, in every way,
and field by field for the clusters of published documents."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.integration.kubernetes.cluster import ROOT, tool
from tests.unit.provision.chart_plans import chart_values, plan, sold

CHART = ROOT / "charts/drillyard-cluster"
KUEUE = {
    "v1beta1": ("kueue.x-k8s.io/v1beta1", "kueue.x-k8s.io/v1beta1/Topology"),
    "v1beta2": (
        *("kueue.x-k8s.io/v1beta1", "kueue.x-k8s.io/v1beta1/Topology"),
        *("kueue.x-k8s.io/v1beta2", "kueue.x-k8s.io/v1beta2/Topology"),
    ),
}
GKE = (
    "autoscaling.x-k8s.io/v1/ProvisioningRequest",
    "networking.gke.io/v1/Network",
    "networking.gke.io/v1/GKENetworkParamSet",
)
PLACED = "cloud.google.com/gce-topology-"
Objects = dict[tuple[str, str], dict[str, Any]]
"""By kind and name; of those in several namespaces, NAMESPACE/NAME too."""


def helm(
    directory: Path, *words: str, values: dict[str, Any] | None = None, has: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    """Helm on the chart with these values, for a cluster that has these objects."""
    environment = {
        **os.environ,
        **{f"HELM_{name}_HOME": str(directory) for name in ("CACHE", "CONFIG", "DATA")},
    }
    argv = [tool("helm"), *words, str(CHART)]
    if values is not None:
        file = directory / f"values-{abs(hash(json.dumps(values)))}.json"
        file.write_text(json.dumps(values))
        argv += ["--values", str(file)]
    argv += [word for each in has for word in ("--api-versions", each)]
    return subprocess.run(argv, capture_output=True, text=True, env=environment, check=False)


def rendered(
    directory: Path,
    values: dict[str, Any] | None,
    kueue: str = "v1beta2",
    more: tuple[str, ...] = GKE,
) -> Objects:
    """The objects by kind and name."""
    words = ("template", "c", "--kube-version", "1.34")
    done = helm(directory, *words, values=values, has=(*KUEUE[kueue], *more))
    assert done.returncode == 0, done.stderr
    found: Objects = {}
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    for each in filter(None, yaml.load_all(done.stdout, Loader=loader)):
        place = each["metadata"]
        found[each["kind"], place["name"]] = each
        found[each["kind"], f"{place.get('namespace')}/{place['name']}"] = each
    return found


def refusal(
    directory: Path, has: tuple[str, ...] = (*KUEUE["v1beta2"], *GKE), **values: Any
) -> str:
    """Helm's error about these values."""
    done = helm(directory, "template", "c", "--kube-version", "1.34", values=values, has=has)
    assert done.returncode != 0
    return done.stderr


POOL = {"name": "p", "queue": "q", "resources": {"nvidia.com/gpu": 8}}


@pytest.fixture(scope="module")
def every(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Objects]:
    """What is rendered for each machine and way of buying. Pools that differ in size and name alone
    are rendered once."""
    directory = tmp_path_factory.mktemp("charts")
    values = {pair: chart_values(plan(*pair)) for pair in sold()}
    shapes = {pair: _shape(each) for pair, each in values.items()}
    first = {shape: pair for pair, shape in reversed(shapes.items())}
    with ThreadPoolExecutor(2) as pool:
        made = pool.map(lambda pair: rendered(directory, values[pair]), first.values())
        found = dict(zip(first, made, strict=True))
    return {pair: found[shape] for pair, shape in shapes.items()}


def _shape(values: dict[str, Any]) -> str:
    (pool,) = values["pools"]
    kept = {key: pool[key] for key in ("tolerations", "topologyLevels", "provisioningClass")}
    rest = {key: value for key, value in values.items() if key not in ("pools", "namespaces")}
    return json.dumps([kept, rest], sort_keys=True)


def test_every_machine_in_every_way_has_its_queue_and_networks(
    every: dict[tuple[str, str], Objects],
) -> None:
    for (machine, consumption), found in every.items():
        kinds = [kind for kind, name in found if "/" not in name]
        assert kinds.count("ClusterQueue") == kinds.count("ResourceFlavor") == 1
        queued = consumption == "flex-start-queued"
        assert kinds.count("AdmissionCheck") == kinds.count("ProvisioningRequestConfig") == queued
        assert kinds.count("Network") == kinds.count("GKENetworkParamSet")
        made = len(chart_values(plan(machine, consumption))["networks"])
        assert kinds.count("Network") == made
        (queue,) = [each for (kind, _), each in found.items() if kind == "ClusterQueue"][:1]
        (group,) = queue["spec"]["resourceGroups"]
        assert {"cpu", "memory", "nvidia.com/gpu"} <= set(group["coveredResources"])


def test_the_cluster_for_b200s_by_flex_start_has_what_its_tutorial_asks_for(
    every: dict[tuple[str, str], Objects],
) -> None:
    """A4 nodes of eight B200s that Kueue asks the Dynamic Workload Scheduler for, with gIB."""
    found = every["a4-highgpu-8g", "flex-start-queued"]
    name = "c-flex-start-queued"
    config = found["ProvisioningRequestConfig", name]["spec"]
    assert config["provisioningClassName"] == "queued-provisioning.gke.io"
    assert config["managedResources"] == ["nvidia.com/gpu"]
    assert config["podSetMergePolicy"] == "IdenticalWorkloadSchedulingRequirements"
    assert config["retryStrategy"] == {
        "backoffLimitCount": 3,
        "backoffBaseSeconds": 60,
        "backoffMaxSeconds": 1800,
    }
    assert config["podSetUpdates"]["nodeSelector"] == [
        {
            "key": "autoscaling.gke.io/provisioning-request",
            "valueFromProvisioningClassDetail": "ResizeRequestName",
        }
    ]
    check = found["AdmissionCheck", name]["spec"]
    assert check["controllerName"] == "kueue.x-k8s.io/provisioning-request"
    assert check["parameters"]["name"] == name
    queue = found["ClusterQueue", name]["spec"]
    assert queue["admissionChecksStrategy"] == {"admissionChecks": [{"name": name}]}
    assert "admissionChecks" not in queue
    flavor = found["ResourceFlavor", name]["spec"]
    assert flavor["nodeLabels"] == {"cloud.google.com/gke-nodepool": name}
    assert "topologyName" not in flavor
    assert {each["key"] for each in flavor["tolerations"]} == {
        "nvidia.com/gpu",
        "cloud.google.com/gke-queued",
    }
    for namespace in ("runs", "runs-privileged"):
        assert found["LocalQueue", f"{namespace}/{name}"]["spec"] == {"clusterQueue": name}
    assert [found["GKENetworkParamSet", f"rdma-{n}"]["spec"]["deviceMode"] for n in range(8)] == [
        "RDMA"
    ] * 8
    assert found["Network", "rdma-7"]["spec"] == {
        "type": "Device",
        "parametersRef": {
            "group": "networking.gke.io",
            "kind": "GKENetworkParamSet",
            "name": "rdma-7",
        },
    }
    pod = found["DaemonSet", "kube-system/nccl-rdma-installer"]["spec"]["template"]["spec"]
    (install,) = [each for each in pod["initContainers"] if each["name"] == "install"]
    assert install["image"].endswith("/nccl-plugin-gib:v1.1.1")
    assert "/scripts/container_entry.sh install" in install["args"][0]
    paths = {each["name"]: each["hostPath"]["path"] for each in pod["volumes"]}
    assert set(paths.values()) == {
        "/home/kubernetes/bin/nvidia/lib64",
        "/home/kubernetes/bin/gib",
    }
    for mount in install["volumeMounts"]:
        assert f"{mount['mountPath']}\n" in f"{install['args'][0]}\n"
    assert nodes_of(pod) == {"cloud.google.com/gke-accelerator": ["nvidia-b200"], **AMD64}
    assert (pod["hostNetwork"], pod["hostPID"]) == (True, True)
    assert pod["priorityClassName"] == "system-node-critical"
    assert pod["tolerations"] == [{"operator": "Exists"}]


AMD64 = {"kubernetes.io/arch": ["amd64"]}


def nodes_of(pod: dict[str, Any]) -> dict[str, list[str]]:
    required = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    (term,) = required["nodeSelectorTerms"]
    return {each["key"]: each["values"] for each in term["matchExpressions"]}


def test_the_cluster_for_a3_mega_is_placed_by_topology_and_has_tcpxo(
    every: dict[tuple[str, str], Objects],
) -> None:
    """A reservation of A3 Mega nodes with a queue that Kueue places by topology."""
    found = every["a3-megagpu-8g", "reservation"]
    name = "c-reservation"
    assert found["Topology", name]["spec"]["levels"] == [
        {"nodeLabel": f"{PLACED}block"},
        {"nodeLabel": f"{PLACED}subblock"},
        {"nodeLabel": f"{PLACED}host"},
        {"nodeLabel": "kubernetes.io/hostname"},
    ]
    assert found["ResourceFlavor", name]["spec"]["topologyName"] == name
    assert [f"vpc{n}" for n in range(1, 9)] == sorted(
        name for kind, name in found if kind == "Network" and "/" not in name
    )
    modes = {each["spec"]["deviceMode"] for (kind, _), each in found.items() if "Param" in kind}
    assert modes == {"NetDevice"}
    pod = found["DaemonSet", "nccl-tcpxo-installer"]["spec"]["template"]["spec"]
    prepare, install = pod["initContainers"]
    assert prepare["command"][:4] == ["nsenter", "--all", "--target", "1"]
    for step in ("modprobe import-helper", "iptables", "/dev/aperture_devices", "1ae0:0084"):
        assert step in prepare["args"][0]
    assert install["image"].endswith("/nccl-plugin-gpudirecttcpx-dev:v1.0.15")
    assert {each["mountPath"] for each in install["volumeMounts"]} == {"/var/lib", "/usr/local"}
    injector = found["DaemonSet", "device-injector"]["spec"]["template"]["spec"]
    assert "@sha256:" in injector["containers"][0]["image"]
    assert nodes_of(injector) == {"cloud.google.com/gke-accelerator": ["nvidia-h100-mega-80gb"]}
    assert nodes_of(pod) == {**nodes_of(injector), **AMD64}


def test_tcpx_has_four_networks_an_installer_and_the_injector(
    every: dict[tuple[str, str], Objects],
) -> None:
    found = every["a3-highgpu-8g", "spot"]
    assert {name for kind, name in found if kind == "Network" and "/" not in name} == {
        f"vpc{n}" for n in range(1, 5)
    }
    pod = found["DaemonSet", "nccl-tcpx-installer"]["spec"]["template"]["spec"]
    assert [each["name"] for each in pod["initContainers"]] == ["install"]
    assert ("DaemonSet", "device-injector") in found


def test_arm_nodes_get_the_installer_of_their_own(every: dict[tuple[str, str], Objects]) -> None:
    found = every["a4x-highgpu-4g", "reservation"]
    pod = found["DaemonSet", "nccl-rdma-installer-arm64"]["spec"]["template"]["spec"]
    assert nodes_of(pod) == {
        "cloud.google.com/gke-accelerator": ["nvidia-gb200"],
        "kubernetes.io/arch": ["arm64"],
    }
    assert ("ResourceQuota", "nvidia-dra-driver-gpu/system-priorities") in found


@pytest.mark.parametrize("version", KUEUE)
def test_kueues_objects_are_of_the_version_that_the_cluster_has(
    version: str, tmp_path: Path
) -> None:
    found = rendered(tmp_path, chart_values(plan("a3-megagpu-8g", "reservation")), version)
    versions = {
        each["apiVersion"] for each in found.values() if each["apiVersion"].startswith("kueue")
    }
    assert versions == {f"kueue.x-k8s.io/{version}"}


def test_without_values_there_are_namespaces_with_an_account_and_a_role(tmp_path: Path) -> None:
    found = rendered(tmp_path, None, more=())
    assert {kind for kind, _ in found} == {"Namespace", "ServiceAccount", "Role"}
    label = "pod-security.kubernetes.io/enforce"
    for name, level in (("runs", "restricted"), ("runs-privileged", "privileged")):
        metadata = found["Namespace", name]["metadata"]
        assert metadata["labels"][label] == level
        assert metadata["annotations"] == {"helm.sh/resource-policy": "keep"}
        assert ("ServiceAccount", f"{name}/trainer") in found


def test_the_chart_passes_lint_with_and_without_values(tmp_path: Path) -> None:
    for values in (None, {"users": [{"kind": "User", "name": "a@example.com"}]}):
        done = helm(tmp_path, "lint", "--strict", values=values)
        assert done.returncode == 0, done.stdout


def test_users_may_do_what_launch_needs_in_each_namespace(tmp_path: Path) -> None:
    users = [
        {"kind": "User", "name": "a@example.com"},
        {"kind": "ServiceAccount", "name": "ci", "namespace": "tools"},
    ]
    found = rendered(tmp_path, {"users": users})
    subjects = found["RoleBinding", "runs/drillyard"]["subjects"]
    assert [(each["kind"], each.get("namespace")) for each in subjects] == [
        ("User", None),
        ("ServiceAccount", "tools"),
    ]


MISSING = [
    ({"pools": [POOL]}, GKE, "has no Kueue"),
    ({"pools": [POOL]}, ("kueue.x-k8s.io/v1beta1",), "older than 0.14"),
    ({"pools": [{**POOL, "provisioningClass": "x"}]}, KUEUE["v1beta2"], "no ProvisioningRequest"),
    (
        {"networks": [{"name": "n", "vpc": "v", "subnet": "s", "deviceMode": "RDMA"}]},
        KUEUE["v1beta2"],
        "--enable-multi-networking",
    ),
]


@pytest.mark.parametrize(("values", "has", "words"), MISSING)
def test_no_object_is_made_whose_definition_the_cluster_lacks(
    values: dict[str, Any], has: tuple[str, ...], words: str, tmp_path: Path
) -> None:
    assert words in refusal(tmp_path, has, **values)


NETWORK = {"name": "n", "vpc": "v", "subnet": "s", "deviceMode": "RDMA"}
WRONG = [
    ({"pools": [POOL, {**POOL, "queue": "r"}]}, "two are called p"),
    ({"pools": [POOL, {**POOL, "name": "r"}]}, "the same queue"),
    ({"pools": [{**POOL, "topologyLevels": ["a"]}]}, "no nodeLabels"),
    ({"pools": [{**POOL, "resources": {}}]}, "resources"),
    ({"pools": [{**POOL, "gpus": 8}]}, "gpus"),
    ({"networks": [NETWORK, {**NETWORK, "name": "m"}]}, "subnet v/s"),
    ({"networks": [{**NETWORK, "deviceMode": "Other"}]}, "deviceMode"),
    ({"installers": [{"stack": "tcpxo", "image": "i:1", "accelerators": ["a"]}]}, "injector"),
    ({"installers": [{"stack": "efa", "image": "i:1", "accelerators": ["a"]}]}, "stack"),
    ({"installers": [{"stack": "gib", "image": "i:1", "accelerators": ["a"]}] * 2}, "twice"),
    ({"deviceInjector": {"image": "i:1"}}, "accelerators"),
    ({"users": [{"kind": "ServiceAccount", "name": "ci"}]}, "namespace"),
    ({"namespaces": []}, "namespaces"),
]


@pytest.mark.parametrize(("values", "words"), WRONG)
def test_values_that_contradict_each_other_are_refused(
    values: dict[str, Any], words: str, tmp_path: Path
) -> None:
    assert words in refusal(tmp_path, **values)


def examples() -> Iterator[dict[str, Any]]:
    text = (CHART / "README.md").read_text()
    for each in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL):
        yield yaml.safe_load(each)


def test_the_values_of_the_readme_are_a_cluster(tmp_path: Path) -> None:
    (values,) = examples()
    found = rendered(tmp_path, values)
    assert ("ClusterQueue", "gpus") in found


def test_an_account_that_is_there_is_not_made(tmp_path: Path) -> None:
    for account in ({"name": "default"}, {"name": "own", "create": False}):
        found = rendered(tmp_path, {"serviceAccount": account}, more=())
        assert {kind for kind, _ in found} == {"Namespace", "Role"}
