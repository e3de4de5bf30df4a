"""The plan of a run on Kubernetes: the chart's values field by field, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.unit.launch.requests import TRAINING, WORKLOAD, planned, request

from drillyard.errors import UserError
from drillyard.launch.kubernetes.release import VALUES, expanded, rights_for
from drillyard.launch.kubernetes.rules import longest_name

CLUSTER = """
name: c
platform: kubernetes
nodes: 2
processes_per_node: 4
image: example.com/train:1
storage: {directory: /data}
kubernetes: {namespace: team, queue: gpus, volume_claim: shared}
"""
MEGA = """
name: mega
platform: gke
machine: a3-megagpu-8g
nodes: 2
consumption: flex-start-queued
location: {project: p, region: r}
storage: {bucket: my-bucket}
image: example.com/train:1
kubernetes: {namespace: team, {}, queue: q}
"""
CPU = TRAINING.replace("training: {", "training: {device: cpu, ")


def cluster(**more: str) -> str:
    return CLUSTER.replace(
        "volume_claim: shared",
        "volume_claim: shared, " + ", ".join(f"{k}: {v}" for k, v in more.items()),
    )


def values(text: str = CLUSTER, run: str = CPU, **options: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(planned(request(text, run, **options)).file(VALUES).content)
    return found


EXPECTED = {
    "nodes": 2,
    "processesPerNode": 4,
    "image": "example.com/train:1",
    "masterPort": 29500,
    "controller": "jobset",
    "maxRestarts": 3,
    "gracePeriodSeconds": 120,
    "lostNodeSeconds": 60,
    "queue": "gpus",
    "maxRunSeconds": 0,
    "volumeClaim": {"name": "shared", "mountPath": "/data"},
    "topology": {"mode": "none", "level": ""},
    "resources": {},
    "labels": {"drillyard/cluster": "c", "drillyard/run": "llama-8b"},
    "annotations": {"drillyard/run-directory": "/data/runs/llama-8b"},
    "workingDir": "",
    "networkScript": "",
}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_value_of_the_chart_is(name: str) -> None:
    assert values()[name] == EXPECTED[name]


def test_the_first_process_is_the_trainer_without_an_agent() -> None:
    plan = planned(request(CLUSTER, CPU))
    command = values()["command"]
    assert command[:5] == ["python3", "-m", "drillyard", "train", "/etc/drillyard/run.yaml"]
    assert command[command.index("--node-rank") + 1] == "$(NODE_RANK)"
    assert command[command.index("--master-addr") + 1] == "$(MASTER_ADDR)"
    assert not [
        file.path
        for file in plan.files
        if file.path.startswith("agent/") or file.path == "job.json"
    ]


def test_the_step_is_one_installation_that_reads_only_files_of_the_plan() -> None:
    plan = planned(request(CLUSTER, CPU))
    (install,) = plan.steps
    assert install.argv[:4] == ("helm", "install", "llama-8b", "chart/drillyard-run")
    assert install.argv[install.argv.index("--namespace") + 1] == "team"
    assert set(install.reads) == {file.path for file in plan.files}
    assert "chart/drillyard-run/templates/run.yaml" in install.reads


def test_a_command_per_gpu_is_started_by_torchrun_which_marks_the_lines_of_each_rank() -> None:
    command = values(
        run="name: w\nworkload: {per: gpu, command: [python, train.py], arguments: [a=1]}\n"
    )["command"]
    assert command[0] == "torchrun"
    assert "--nproc-per-node=$(NPROC_PER_NODE)" in command and "--node-rank=$(NODE_RANK)" in command
    assert command[command.index("--tee=3") :] == [
        "--tee=3",
        "--no-python",
        "python",
        "-u",
        "train.py",
        "a=1",
    ]


def test_settings_of_the_section_become_values() -> None:
    found = values(
        cluster(max_run_hours="2", topology="{required: block}", secrets="{HF_TOKEN: hf/token}")
    )
    assert found["maxRunSeconds"] == 7200
    assert found["topology"] == {"mode": "required", "level": "block"}
    assert found["secrets"] == {"HF_TOKEN": {"secret": "hf", "key": "token"}}


def test_a_job_has_its_own_time_limit_and_the_plan_says_that_nothing_restarts_it() -> None:
    text = cluster(controller="job", max_run_hours="2").replace("queue: gpus, ", "")
    plan = planned(request(text, CPU))
    found = json.loads(plan.file(VALUES).content)
    assert (found["controller"], found["maxRunSeconds"]) == ("job", 7200)
    assert any("nothing restarts the run" in line for line in plan.warnings)
    assert {("create", "", "services"), ("delete", "", "services")} <= set(rights_for(found))
    assert not any("nothing restarts" in line for line in planned(request(CLUSTER, CPU)).warnings)


def test_resources_are_laid_beside_the_gpus() -> None:
    asked = "{requests: {cpu: 64, memory: 512Gi}, limits: {cpu: 128}}"
    found = values(cluster(resources=asked))["resources"]
    assert found == {"requests": {"cpu": "64", "memory": "512Gi"}, "limits": {"cpu": "128"}}
    section = f"resources: {asked}, daemon_resources: {{requests: {{cpu: 500m}}}}"
    found = values(MEGA.replace("{}", section), WORKLOAD)
    assert found["resources"]["limits"] == {"nvidia.com/gpu": 8, "cpu": "128"}
    assert found["network"]["sidecar"]["resources"] == {"requests": {"cpu": "500m"}}


def test_a_job_without_a_queue_asks_for_no_provisioning() -> None:
    text = cluster(controller="job", max_run_hours="2").replace("queue: gpus, ", "")
    assert values(text)["provisioning"] == {"maxRunSeconds": 0}


GB300 = (
    MEGA.replace("a3-megagpu-8g", "a4x-maxgpu-4g-metal")
    .replace("flex-start-queued", "reservation\nreservation: mine")
    .replace("{}", "PODS")
)


def test_gb300_gets_its_nics_by_dranet_and_libraries_in_the_image() -> None:
    plan = planned(request(GB300.replace("PODS, ", ""), WORKLOAD))
    found = json.loads(plan.file(VALUES).content)
    assert found["network"]["deviceClaim"] == {"class": "mrdma.google.com", "count": 8}
    assert "interfaces" not in found["network"]
    assert [each["hostPath"] for each in found["hostPaths"]] == ["/home/kubernetes/bin/nvidia"]
    labels = found["nodeSelector"]
    assert labels["gke.networks.io/accelerator-network-profile"] == "auto"
    assert labels["cloud.google.com/gke-networking-dra-driver"] == "true"
    fields = {field.place: field.value for field in plan.fields}
    assert "installer" not in fields and fields["DaemonSet"] == "asapd-lite"
    assert any("the image must bring" in line for line in plan.warnings)


def test_the_first_versions_of_gke_are_those_of_stack_machine_and_pod_network() -> None:
    found = {}
    for machine, network in (
        ("a3-megagpu-8g", ""),
        ("a4-highgpu-8g", ""),
        ("a3-ultragpu-8g", ""),
        ("a4-highgpu-8g", "pod_network: dranet, "),
        ("a4x-maxgpu-4g-metal", ""),
    ):
        text = GB300.replace("a4x-maxgpu-4g-metal", machine).replace("PODS, ", network)
        fields = {each.place: each.value for each in planned(request(text, WORKLOAD)).fields}
        found[machine, network] = fields["GKE"]
    assert [*found.values()] == [
        "1.28.15-gke.3163000, 1.29.15-gke.2467000, 1.30.14-gke.1922000, 1.31.14-gke.1243000 or"
        " 1.32.11-gke.1174000",
        "1.32.2-gke.1475000",
        "1.31.4-gke.1183000",
        "1.34.1-gke.1829001",
        "1.34.3-gke.1318000 or 1.35.0-gke.2745000",
    ]


def test_a_block_of_a_reservation_selects_the_nodes_of_the_reservation() -> None:
    text = GB300.replace("PODS, ", "").replace("mine", "mine/reservationBlocks/b")
    labels = values(text)["nodeSelector"]
    assert labels["cloud.google.com/reservation-name"] == "mine"


def test_an_arm_machine_gets_the_installer_for_arm() -> None:
    for machine, image in (("a4x-highgpu-4g", "gib-arm64:"), ("a4-highgpu-8g", "plugin-gib:")):
        text = GB300.replace("a4x-maxgpu-4g-metal", machine).replace("PODS, ", "")
        fields = {each.place: each.value for each in planned(request(text, WORKLOAD)).fields}
        assert image in fields["installer"]


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("--node={node_rank}", "--node=$(NODE_RANK)"),
        ("$(date)", "$$(date)"),
        ("{other} {nodes}", "{other} $(NNODES)"),
        ("$HOME", "$HOME"),
    ],
)
def test_a_placeholder_becomes_a_variable_of_the_pod_and_other_text_stays(
    text: str, result: str
) -> None:
    assert expanded(text, {"node_rank": "$(NODE_RANK)", "nodes": "$(NNODES)"}) == result


@pytest.mark.parametrize("nodes", [1, 10, 11, 1000])
def test_the_longest_name_leaves_room_for_the_longest_pod_name(nodes: int) -> None:
    assert len("n" * longest_name(nodes) + f"-w-0-{nodes - 1}-abcde") == 63


@pytest.mark.parametrize(
    ("text", "run", "key"),
    [
        (CLUSTER, CPU.replace("llama-8b", "8b"), "run.yaml:1: name"),
        (CLUSTER, CPU.replace("llama-8b", "a" * 60), "run.yaml:1: name"),
        (
            CLUSTER.replace(", volume_claim: shared", ""),
            CPU,
            "cluster.yaml:7: kubernetes.volume_claim",
        ),
        (
            CLUSTER.replace("storage: {directory: /data}", "storage: {bucket: bkt}"),
            CPU,
            "kubernetes.volume_claim",
        ),
        (CLUSTER + "environment: {A: '${env:A}'}\n", CPU, "environment.A"),
        (CLUSTER + "network_stack: tcpxo\n", WORKLOAD, "machine"),
        (CLUSTER, CPU + "output: /scratch\n", "run.yaml:5: output"),
        (CLUSTER, CPU + "output: ../scratch\n", "run.yaml:5: output"),
        (MEGA.replace("{}", "pod_network: dranet"), WORKLOAD, "kubernetes.pod_network"),
        (MEGA.replace("{}", "network_libraries: image"), WORKLOAD, "kubernetes.network_libraries"),
        (MEGA.replace("{}", "nccl_plugin: 1.0.4"), WORKLOAD, "kubernetes.nccl_plugin"),
        (GB300.replace("PODS", "pod_network: interfaces"), WORKLOAD, "kubernetes.pod_network"),
        (GB300.replace("PODS", "pod_network: host"), WORKLOAD, "kubernetes.pod_network"),
        (
            GB300.replace("PODS", "network_libraries: node"),
            WORKLOAD,
            "kubernetes.network_libraries",
        ),
        (
            cluster(daemon_resources="{limits: {cpu: 1}}"),
            CPU,
            "kubernetes.daemon_resources",
        ),
        (
            cluster(resources="{requests: {memory: 2Gi}, limits: {memory: 1900M}}"),
            CPU,
            "kubernetes.resources.requests.memory",
        ),
        (cluster(resources="{requests: {cpu: many}}"), CPU, "kubernetes.resources.requests.cpu"),
        (CLUSTER.replace("train:1", "train 1"), CPU, "cluster.yaml:5: image"),
        (cluster(labels="{'a b': c}"), CPU, "kubernetes.labels.a b"),
        (cluster(labels="{a..b/c: d}"), CPU, "kubernetes.labels.a..b/c"),
        (cluster(labels="{drillyard/run: x}"), CPU, "kubernetes.labels.drillyard/run"),
        (
            cluster(labels="{kueue.x-k8s.io/queue-name: x}"),
            CPU,
            "kubernetes.labels.kueue.x-k8s.io/queue-name",
        ),
        (cluster(node_selector="{'a b': c}"), CPU, "kubernetes.node_selector.a b"),
        (cluster(tolerations="[{kind: a}]"), CPU, "kubernetes.tolerations"),
        (cluster(secrets="{NNODES: s/k}"), CPU, "kubernetes.secrets.NNODES"),
        (CLUSTER + "environment: {NNODES: '2'}\n", CPU, "environment.NNODES"),
        (
            CLUSTER + "environment: {DRILLYARD_RESTARTED_BY: x}\n",
            CPU,
            "environment.DRILLYARD_RESTARTED_BY",
        ),
        *(
            (CLUSTER + f"mounts: ['/mnt:{path}']\n", CPU, "mounts.0")
            for path in ("/", "/etc", "/etc/drillyard/x", "/dev", "/dev/shm", "/data", "/data/runs")
        ),
        (CLUSTER + "mounts: [/mnt, /mnt]\n", CPU, "mounts.1"),
        (
            CLUSTER.replace("{namespace", "{nccl_plugin: 1.0.3, namespace"),
            WORKLOAD,
            "kubernetes.nccl_plugin",
        ),
        (MEGA.replace("{}, queue: q", "labels: {a: b}"), WORKLOAD, "kubernetes.queue"),
        (MEGA.replace("{}", "max_run_hours: 169"), WORKLOAD, "kubernetes.max_run_hours"),
        (
            MEGA.replace("{}, ", "").replace("flex-start-queued", "reservation\nreservation: a/b"),
            WORKLOAD,
            "cluster.yaml:6: reservation",
        ),
    ],
)
def test_a_broken_rule_is_refused_at_its_key(text: str, run: str, key: str) -> None:
    with pytest.raises(UserError) as refused:
        planned(request(text, run))
    assert key in str(refused.value)


def test_a_secret_in_the_run_config_needs_a_secret_of_the_namespace() -> None:
    run = WORKLOAD.replace("command: [all_reduce_perf", "command: ['${env:TOKEN}'")
    with pytest.raises(UserError, match="kubectl -n team create secret"):
        planned(request(CLUSTER, run))
    assert values(cluster(secrets="{TOKEN: s/k}"), run)["secrets"] == {
        "TOKEN": {"secret": "s", "key": "k"}
    }
