"""From a run and a cluster to what the agents of every launcher get."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.launch.requests import TRAINING, cluster, request

from drillyard.errors import UserError
from drillyard.launch.agent.job import Job, read_job
from drillyard.launch.plan import Plan
from drillyard.launch.prepared_run import ClusterPaths, port_of, prepare
from drillyard.launch.run_status import Handle, parse_handle

PLACE = ClusterPaths("/project", "/shared/runs", "/project/.venv/bin/python")
SHARED = cluster(storage="{directory: /shared}")


def prepared(cluster: str = SHARED, run: str = TRAINING, **options) -> Plan:
    return prepare(request(cluster, run, **options), paths=PLACE)


def workload(**settings) -> str:
    return yaml.safe_dump({"name": "w", "workload": {"command": ["train", "--deep"], **settings}})


def test_a_training_run_is_the_trainer_once_per_node_and_the_agents_restart_it():
    job = prepared().job
    words = " ".join(job.command)
    assert words.startswith(
        "/project/.venv/bin/python -m drillyard train {launch_directory}/run.yaml"
    )
    assert "--nproc-per-node 8" in words
    assert "--max-restarts 0" in words
    assert "--nnodes {nodes} --node-rank {node_rank}" in words
    assert "--nnodes" not in " ".join(prepared(cluster(nodes=1)).job.command)


def test_a_newer_checkpoint_is_a_newer_manifest():
    assert prepared().job.checkpoints == "/shared/runs/llama-8b/checkpoints/*/manifest.json"
    assert prepared(run=workload()).job.checkpoints is None
    assert (
        prepared(run=workload(checkpoints="ckpt/*.pt")).job.checkpoints
        == "/shared/runs/w/ckpt/*.pt"
    )


def test_a_workload_is_its_command_with_its_arguments():
    assert prepared(run=workload(arguments=["-x", "{node_rank}"])).job.command == [
        "train",
        "--deep",
        "-x",
        "{node_rank}",
    ]


@pytest.mark.parametrize(
    "command",
    [
        ["python", "a.py", "-x"],
        ["python3", "-m", "pkg"],
        ["./a.out", "-x"],
    ],
)
def test_a_command_per_gpu_is_started_by_torchrun_with_a_pipe_for_each_rank(command):
    run = workload(command=command, per="gpu")
    assert prepared(cluster(image="i:1"), run).job.command[0] == "torchrun"
    words = prepared(run=run).job.command
    assert words[:3] == ["/project/.venv/bin/python", "-m", "torch.distributed.run"]
    assert "--nproc-per-node={processes_per_node}" in words
    assert words[-len(command) - 2 :] == [
        "{launch_directory}/agent/exec_command.py",
        "--rank",
        *command,
    ]
    assert "agent/exec_command.py" in {file.path for file in prepared(run=run).files}


def test_files_of_a_workload_travel_with_the_plan(tmp_path):
    (tmp_path / "go.sh").write_text("echo hi\n")
    (tmp_path / "conf.yaml").write_text("a: 1\n")
    run = yaml.safe_dump(
        {"name": "w", "workload": {"launcher_file": "go.sh", "files": {"conf/a.yaml": "conf.yaml"}}}
    )
    found = prepared(run=run, here=str(tmp_path))
    files = {file.path: file for file in found.files}
    assert files["files/go.sh"].mode == 0o755
    assert files["files/conf/a.yaml"].content == "a: 1\n"
    assert found.job.command == ["bash", "{launch_directory}/files/go.sh"]


@pytest.mark.parametrize(
    ("content", "said"), [(None, "cannot be read"), (b"\xff\xfe\x00", "is not a text file")]
)
def test_a_file_that_cannot_travel_is_named(tmp_path: Path, content, said):
    if content is not None:
        (tmp_path / "f").write_bytes(content)
    with pytest.raises(UserError, match=f"{tmp_path}/f: {said}"):
        prepared(run=workload(files={"f": "f"}), here=str(tmp_path))


def test_settings_of_the_cluster_win_over_the_workloads_and_those_over_the_network_stacks():
    chosen = cluster(environment="{NCCL_SOCKET_IFNAME: mine, A: cluster}")
    environment = prepared(
        chosen, workload(environment={"A": "run", "B": "run", "NCCL_LIB_DIR": "/x"})
    ).job.environment
    assert environment["NCCL_SOCKET_IFNAME"] == "mine"
    assert environment["A"] == "cluster"
    assert (environment["B"], environment["NCCL_LIB_DIR"]) == ("run", "/x")


def test_what_a_config_sets_is_put_back_after_the_stacks_script():
    script = next(
        file
        for file in prepared(cluster(environment="{NCCL_DEBUG: INFO}")).files
        if file.path == "network.sh"
    )
    assert 'export NCCL_DEBUG="$kept_NCCL_DEBUG"' in script.content
    assert "INFO" not in script.content


def test_mounts_are_those_of_run_stack_and_cluster_and_only_a_container_has_them():
    found = prepared(cluster(image="i:1", mounts="[/data, /project]"))
    assert found.mounts == (
        "/shared/runs",
        "/project",
        "/var/lib/tcpxo/lib64",
        "/dev/aperture_devices",
        "/data",
    )
    assert prepared().mounts == ()


def test_the_image_of_a_workload_comes_before_the_clusters():
    assert prepared(cluster(image="i:1"), workload(image="w:1")).image == "w:1"
    assert prepared(cluster(image="i:1"), workload()).image == "i:1"


def test_ranks_per_node_are_as_set_or_the_machines_accelerators():
    assert prepared().job.processes_per_node == 8
    assert prepared(cluster(processes_per_node=4)).job.processes_per_node == 4
    assert prepared(run="processes_per_node: 1\n" + workload()).job.processes_per_node == 1
    with pytest.raises(UserError, match="name the `machine`, or set `processes_per_node`"):
        prepared(cluster(machine=None))


def test_the_saved_configs_are_what_was_asked_for_with_the_output_of_the_cluster():
    files = {file.path: file for file in prepared().files}
    assert yaml.safe_load(files["run.yaml"].content)["output"] == "/shared/runs"
    assert files["run.yaml"].mode == files["cluster.yaml"].mode == 0o600
    assert read_back(files["job.json"].content) == prepared().job


def read_back(text: str) -> Job:
    return Job(**json.loads(text))


def test_a_job_of_another_format_is_refused(tmp_path):
    path = tmp_path / "job.json"
    document = json.loads(prepared().job.as_json())
    path.write_text(json.dumps(document))
    assert read_job(path) == prepared().job
    path.write_text(json.dumps({**document, "format": 99}))
    with pytest.raises(ValueError, match="another version of the agent"):
        read_job(path)
    path.write_text(json.dumps({**document, "surprise": 1}))
    with pytest.raises(ValueError, match="unknown fields: surprise"):
        read_job(path)


def test_warnings_of_the_checks_reach_the_plan():
    assert [
        line
        for line in prepared(cluster()).warnings
        if "the run directory is runs/llama-8b" in line
    ]


def test_a_run_that_does_not_fit_its_ranks_is_refused():
    with pytest.raises(UserError, match="parallelism"):
        prepared(run=TRAINING + "parallelism: {tensor: 3}\n")


NAMES = st.from_regex(r"[a-z]([a-z0-9-]{0,20}[a-z0-9])?", fullmatch=True)
RUNS = st.from_regex(r"[a-z0-9]([a-z0-9._-]{0,40}[a-z0-9])?", fullmatch=True)


@given(st.sampled_from(["local", "ssh", "slurm", "vertex"]), NAMES, RUNS)
def test_a_handle_is_read_as_it_is_written_and_has_a_port_of_its_own(platform, name, run):
    handle = Handle(platform, name, run)
    assert parse_handle(str(handle)) == handle
    assert 20000 <= port_of(handle) < 40000


@pytest.mark.parametrize(
    "text", ["", "slurm://c", "slurm:/c/r", "slurm://c/r/x", "Slurm://c/r", "slurm://c/.r"]
)
def test_what_is_no_handle_is_refused(text):
    with pytest.raises(UserError, match="is not a run's handle"):
        parse_handle(text)


def test_a_plan_of_a_thousand_nodes_is_made_from_the_same_few_files():
    few, many = prepared(cluster(nodes=2)), prepared(cluster(nodes=1000))
    assert [file.path for file in few.files] == [file.path for file in many.files]
