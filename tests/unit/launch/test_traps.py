"""Traps that real launchers fell into, and that plans for slurm, ssh, vertex and local must not.

Not covered here, because nothing of these four launchers can meet them: how Kueue and JobSet read
annotations, admission checks and gangs, container 0 of a pod, restart policies of Jobs, generated
JSON of pod annotations (rules of tests/integration/kubernetes/manifest_rules.py, for every
machine); reservation affinity of node pools, networks that outlive their cluster, empty groups of
instances, calendar requests that cannot be cancelled (provisioning). Sparse peaks and prices of 0
are refused in hardware and estimate. Nodes that the scheduler set down for good are the Slurm
launcher's states.
"""

from __future__ import annotations

import json
import re

import pytest
from tests.unit.launch.requests import TRAINING, cluster, request

from drillyard.errors import UserError
from drillyard.hardware import catalog
from drillyard.launch.launcher import launcher_for
from drillyard.launch.plan import Call, Plan

IMAGE = {"image": "nvcr.io/nvidia/pytorch:25.12-py3"}
GPU_SCRIPT = "name: w\nworkload: {per: gpu, command: [python, train.py]}\n"


def plan(text: str, run: str = TRAINING, **options) -> Plan:
    asked = request(text, run, **options)
    return launcher_for(asked.cluster).plan(asked)


def everything(of: Plan) -> str:
    """All that would be written or sent, without the agent's own source."""
    files = [file.content for file in of.files if not file.path.startswith("agent/")]
    return "\n".join([*files, *(str(step) for step in of.steps)])


def sbatch(text: str, **options) -> str:
    return plan(text, **options).file("job.sbatch").content


def job(of: Plan) -> dict:
    return json.loads(of.file("job.json").content)


# What the network stacks enforce.


@pytest.mark.parametrize("platform", ["slurm", "ssh", "vertex"])
def test_the_settings_that_tcpxo_enforces_are_sourced_and_never_copied(platform):
    sent = plan(cluster(platform))
    stack = catalog().network_stack("tcpxo")
    copied = set(stack.profile_environment) - set(stack.host_environment)
    assert copied
    assert not [name for name in copied if re.search(rf"\b{name}\b", everything(sent))]
    lines = sent.file("network.sh").content.splitlines()
    assert [line for line in lines if re.fullmatch(r"\. /\S+/nccl-env-profile\.sh", line)]
    assert job(sent)["profile_script"].endswith("/launch/network.sh")


@pytest.mark.parametrize("machine", ["a3-ultragpu-8g", "a4-highgpu-8g"])
@pytest.mark.parametrize("platform", ["slurm", "vertex"])
def test_gib_takes_its_settings_from_its_own_script(platform, machine):
    bought = {"consumption": "spot"} if platform == "vertex" else {}
    script = plan(cluster(platform, machine, **bought)).file("network.sh").content
    assert ". /usr/local/gib/scripts/set_nccl_env.sh\n" in script
    assert "NCCL_IB_TC" not in script


def test_settings_of_two_versions_of_tcpxo_are_never_mixed():
    stack = catalog().network_stack("tcpxo")
    assert not set(stack.superseded) & {
        *stack.environment,
        *stack.host_environment,
        *stack.profile_environment,
    }
    for platform in ("slurm", "vertex"):
        assert not [
            name for name in stack.superseded if name in everything(plan(cluster(platform)))
        ]


def test_a_plan_pins_no_version_of_plugin_or_daemon_beside_the_one_on_the_nodes():
    for platform in ("slurm", "ssh", "vertex"):
        text = everything(plan(cluster(platform)))
        for word in ("nccl-plugin-gpudirecttcpx", "tcpgpudmarxd", "--num_nics", "--uid="):
            assert word not in text


def test_interfaces_are_named_as_the_place_has_them():
    hosts, pods = job(plan(cluster("slurm"))), job(plan(cluster("vertex")))
    assert hosts["environment"]["NCCL_FASTRAK_IFNAME"].startswith("enp6s0,")
    assert not re.search(r"\beth\d", json.dumps(hosts))
    assert "enp" not in json.dumps(pods)


def test_a_setting_that_tcpxo_checks_and_ends_the_job_over_is_refused_beforehand():
    with pytest.raises(UserError, match="tcpxo ends a job where it is not 131072"):
        plan(cluster(environment="{NCCL_NVLSTREE_MAX_CHUNKSIZE: '65536'}"))


# How ranks find each other.


@pytest.mark.parametrize("platform", ["slurm", "ssh", "vertex"])
def test_rendezvous_is_static_so_no_node_has_to_recognise_its_own_name(platform):
    for run in (TRAINING, GPU_SCRIPT):
        command = " ".join(job(plan(cluster(platform), run))["command"])
        assert "rdzv" not in command
        assert re.search(r"--node-rank[ =]\{node_rank\}", command)
        assert re.search(r"--master-addr[ =]\{master_addr\}", command)


def test_the_leader_is_a_name_of_the_allocation_and_not_one_of_several_addresses():
    made = plan(cluster())
    programs = [each.content for each in made.files if each.path.startswith("agent/")]
    for text in (sbatch(cluster()), *programs):
        assert "--ip-address" not in text and "hostname -I" not in text


def test_nodes_wait_for_the_leader_whose_name_may_not_resolve_yet():
    waiting = job(plan(cluster("vertex")))
    assert waiting["join_seconds"] >= 300


def test_ports_differ_between_runs_and_repeat_with_a_plan():
    ports = {
        job(plan(cluster(), TRAINING.replace("llama-8b", f"run-{n}")))["port"] for n in range(20)
    }
    assert len(ports) > 15
    assert job(plan(cluster()))["port"] == job(plan(cluster()))["port"]
    assert all(1024 < port < 65536 - 16 for port in ports)


# Slurm.


@pytest.mark.parametrize("image", [{}, IMAGE])
def test_the_job_is_queued_again_from_the_host_since_containers_have_no_scontrol(image):
    made = plan(cluster(**image))
    of_job, of_srun = made.file("job.sbatch").content.split("    srun ")
    assert 'agent" slurm-job ' in of_job and "--container" not in of_job
    assert ("--container" in of_srun) == bool(image)
    # On nodes only the job's program asks for it.
    asking = [each.path for each in made.files if '"requeue"' in each.content]
    assert asking == ["agent/slurm_job.py"]


def test_the_signal_before_the_limit_goes_to_the_batch_shell_and_not_to_the_ranks():
    script = sbatch(cluster(slurm='{time_limit: "2:00:00", signal_seconds: 240}'))
    assert "#SBATCH --signal=B:USR1@240\n" in script
    assert not re.search(r"scancel.*USR1", script)


def test_what_is_to_be_saved_has_less_time_than_slurm_gives_until_it_kills():
    for seconds in (30, 300, 3000):
        made = job(plan(cluster(slurm=f"{{signal_seconds: {seconds}}}")))
        assert 0 < made["stop_seconds"] < seconds


def test_a_requeued_job_keeps_the_log_of_its_first_start():
    assert 'exec >>"$launch/slurm-$job.log" 2>&1\n' in sbatch(cluster())


def test_gpus_are_asked_for_as_the_cluster_types_them():
    untyped = sbatch(cluster())
    assert "#SBATCH --gpus-per-node=8\n" in untyped
    typed = sbatch(cluster(machine="gpu-h100-sxm", slurm='{gres: "gpu:nvidia_h100_80gb_hbm3:8"}'))
    assert "#SBATCH --gres=gpu:nvidia_h100_80gb_hbm3:8\n" in typed
    assert "--gpus-per-node" not in typed


def test_one_agent_per_node_and_not_one_launcher_per_gpu():
    assert "#SBATCH --ntasks-per-node=1\n" in sbatch(cluster())


# Sizes, names and time.


def test_twelve_ranks_are_not_rounded_down_to_one_node_of_eight():
    with pytest.raises(UserError, match="12 ranks, but a3-megagpu-8g has 8"):
        plan(cluster(nodes=1, processes_per_node=12))


@pytest.mark.parametrize("platform", ["slurm", "ssh", "vertex"])
def test_names_are_the_runs_own_without_chance_or_clock(platform):
    first, second = plan(cluster(platform)), plan(cluster(platform))
    assert first == second
    assert not re.search(r"\b20\d\d-\d\d-\d\dT\d\d:\d\d", everything(first))


def test_flex_start_never_asks_for_more_than_seven_days():
    bought = {"location": "{project: p, zone: z}", "consumption": "flex-start"}
    with pytest.raises(UserError, match="7-00:00:00 or less"):
        plan(cluster(**bought, slurm='{time_limit: "8-0"}'))
    with pytest.raises(UserError, match="7 days"):
        plan(cluster("vertex", consumption="flex-start", vertex="{timeout_hours: 169}"))


def test_the_first_worker_pool_of_vertex_is_the_chief_alone():
    (call,) = [
        step
        for step in plan(cluster("vertex", nodes=4)).steps
        if isinstance(step, Call) and "jobSpec" in step.body
    ]
    pools = call.body["jobSpec"]["workerPoolSpecs"]
    assert [int(pool["replicaCount"]) for pool in pools] == [1, 3]


@pytest.mark.parametrize("platform", ["slurm", "ssh", "vertex"])
def test_a_secret_of_the_environment_stands_nowhere_in_a_plan(platform, monkeypatch):
    monkeypatch.setenv("HUB_TOKEN", "hf_very_secret")
    sent = plan(cluster(platform, environment='{HF_TOKEN: "${env:HUB_TOKEN}"}'))
    assert "hf_very_secret" not in everything(sent)
    assert job(sent)["environment"]["HF_TOKEN"] == "${env:HUB_TOKEN}"
