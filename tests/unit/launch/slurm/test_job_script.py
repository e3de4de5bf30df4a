"""job.sbatch and the plan around it: what each setting becomes, and what is refused before anything
is sent."""

from __future__ import annotations

import json
import re
import shlex
import subprocess

import pytest
import yaml
from tests.unit.launch.requests import WORKLOAD, cluster, planned, request

from drillyard.errors import UserError
from drillyard.launch.launcher import launcher_for
from drillyard.launch.plan import Plan, Program
from drillyard.launch.plan_output import plan_text
from drillyard.launch.slurm.job_script import enroot_image

SHARED = {"storage": "{directory: /shared}"}


def made(run: str = WORKLOAD, **settings: str) -> Plan:
    """The plan of a run on a Slurm cluster with these settings."""
    return planned(request(cluster(**(SHARED | settings)), run))


def options(plan: Plan, file: str = "job.sbatch") -> dict[str, str]:
    """The #SBATCH options as sbatch reads them."""
    lines = [line for line in plan.file(file).content.splitlines() if line.startswith("#SBATCH ")]
    words = [word for line in lines for word in shlex.split(line.removeprefix("#SBATCH "))]
    return dict(word.partition("=")[::2] for word in words)


def argv(plan: Plan, stage: str) -> tuple[str, ...]:
    return next(
        step.argv for step in plan.steps if isinstance(step, Program) and step.stage == stage
    )


def test_settings_become_options_of_sbatch():
    slurm = (
        "{partition: a3mega, account: research, qos: high, time_limit: '1-12:00:00', exclude: [n1,"
        " 'n[7-9]'], segment: 16, constraint: 'h100&ib', signal_seconds: 600, arguments:"
        " ['--mail-type=END', '--mail-user=me@example.org']}"
    )
    message = options(made(slurm=slurm, nodes="32"))
    assert (
        message["--partition"] == "a3mega"
        and message["--account"] == "research"
        and message["--qos"] == "high"
    )
    assert (
        message["--nodes"] == "32"
        and message["--ntasks-per-node"] == "1"
        and message["--gpus-per-node"] == "8"
    )
    assert (
        message["--time"] == "1-12:00:00"
        and message["--signal"] == "B:USR1@600"
        and message["--exclude"] == "n1,n[7-9]"
    )
    assert (
        message["--constraint"] == "h100&ib"
        and message["--segment"] == "16"
        and message["--mail-user"] == "me@example.org"
    )
    assert {"--exclusive", "--requeue"} <= message.keys() and message["--mem"] == "0"
    assert message["--comment"] == "slurm://c/nccl" and message["--output"] == "/dev/null"


def test_typed_gpus_take_the_place_of_counted_ones():
    message = options(made(slurm="{gres: 'gpu:nvidia_h100_80gb_hbm3:8', exclusive: false}"))
    assert message["--gres"] == "gpu:nvidia_h100_80gb_hbm3:8" and "--gpus-per-node" not in message
    assert "--exclusive" not in message and "--mem" not in message


def test_every_option_is_explained():
    plan = made(
        slurm="{partition: p, setup: ['module load cuda']}",
        image="nvcr.io/nvidia/pytorch:25.12-py3",
    )
    explained = {field.place.removeprefix("job.sbatch: ") for field in plan.fields}
    assert options(plan).keys() <= explained
    script = plan.file("job.sbatch").content
    assert {"leader", "trap USR1", "max_requeues", "setup", "srun --container-image"} <= explained
    assert "module load cuda" in script and all(
        field.reason and field.source for field in plan.fields
    )


@pytest.mark.parametrize(
    ("slurm", "words"),
    [
        ("{time_limit: '4', signal_seconds: 240}", "would get the signal to stop at once"),
        ("{arguments: ['--nodes=4']}", "use `nodes`"),
        ("{arguments: ['-t 10']}", "use `slurm.time_limit`"),
        ("{arguments: ['mail-type=END']}", "is not an option such as --mail-type=END"),
        ("{arguments: ['--mail-user=\"me']}", "is not an option such as --mail-type=END"),
        ("{arguments: ['-N4']}", "use `nodes`"),
        ("{arguments: ['--mail-type=END --nodes=4']}", "use `nodes`"),
        ("{arguments: ['--ntasks-per-n=8']}", "--ntasks-per-node"),
        ("{arguments: ['--ntasks-per-gpu=1']}", "use `processes_per_node`"),
        ("{arguments: ['--export-file=/tmp/x']}", "use `environment`"),
        ("{arguments: [-W]}", "use launch --wait"),
        ("{arguments: ['-M other']}", "slurm.login_host"),
        ("{arguments: ['--gpus=4']}", "use `slurm.gres`"),
        ("{arguments: ['--oversubscribe']}", "set slurm.exclusive: false"),
        ("{arguments: ['--exclusive=user']}", "set slurm.exclusive: false"),
        ("{arguments: ['--mem=1G', '--mem-per-cpu=1G']}", "--mem and --mem-per-cpu"),
        ("{partition: a, arguments: ['-p b']}", "--partition and slurm.partition"),
        ("{exclude: [n1], arguments: ['-xn2']}", "--exclude and slurm.exclude"),
        ("{arguments: ['--gpus-per-node=4']}", "the GPUs of `machine`"),
        ("{gres: 'gpu:8', arguments: ['--gpus-per-task=8']}", "contradicts slurm.gres"),
        ("{gres: 'gpu:8', arguments: ['--gres=nvme:1']}", "slurm.gres: 'gpu:8,nvme:1'"),
        ("{directory: project}", "is not an absolute path"),
    ],
)
def test_what_would_undo_the_script_is_refused(slurm: str, words: str):
    with pytest.raises(UserError, match=re.escape(words)):
        made(slurm=slurm)


@pytest.mark.parametrize(
    "slurm",
    [
        "{arguments: ['-p b', '-x n2', '--time-min=30', '--nodelist=n[3-9]', '-d singleton']}",
        "{arguments: ['--exclusive', '--mail-type=END --mail-user=me@example.org']}",
        "{exclusive: false, arguments: ['-s', '--mem-per-cpu=4G']}",
        "{exclusive: false, arguments: ['--exclusive=user']}",
        "{arguments: ['--gres=nvme:1', '--wait-all-nodes=1', '--cpus-per-task=8']}",
    ],
)
def test_what_contradicts_nothing_is_written_as_it_is(slurm: str):
    script = made(slurm=slurm).file("job.sbatch").content
    for argument in yaml.safe_load(slurm)["arguments"]:
        assert f"#SBATCH {argument}\n" in script


def test_contradictions_are_named_together_with_their_lines():
    lines = "\n  arguments:\n    - --export=NONE\n    - --nodes=3\n    - --mail-type=END\n    - -s"
    with pytest.raises(UserError) as refused:
        made(slurm=lines)
    places = [line.split(": ")[:2] for line in str(refused.value).splitlines()]
    keys = [(name.rpartition(":")[0], key) for name, key in places]
    assert keys == [("cluster.yaml", f"slurm.arguments.{number}") for number in (0, 1, 3)]


def test_a_dependency_beside_that_of_the_launch_is_refused():
    text = cluster(**SHARED, slurm="{arguments: ['--dependency=singleton']}")
    with pytest.raises(UserError, match="--after"):
        planned(request(text, WORKLOAD, dependency="slurm://c/first"))


@pytest.mark.parametrize(
    ("image", "named"),
    [
        ("docker://nvcr.io/nvidia/pytorch:25.12-py3", "nvcr.io#nvidia/pytorch:25.12-py3"),
        ("us-docker.pkg.dev/p/r/i:1", "us-docker.pkg.dev#p/r/i:1"),
        ("localhost:5000/i", "localhost:5000#i"),
        ("nvcr.io#nvidia/pytorch", "nvcr.io#nvidia/pytorch"),
        ("ubuntu:24.04", "ubuntu:24.04"),
        ("nvidia/cuda:12.8", "nvidia/cuda:12.8"),
        ("/shared/images/run.sqsh", "/shared/images/run.sqsh"),
    ],
)
def test_an_image_is_named_as_enroot_wants_it(image: str, named: str):
    assert enroot_image(image) == named


def test_a_container_sees_the_runs_directories_and_what_is_mounted():
    script = made(image="ubuntu:24.04", mounts="[/data, '/raw:/raw:ro']").file("job.sbatch").content
    (mounts,) = re.findall(r"--container-mounts=(\S+)", script)
    assert {"/shared/runs", "/home/me/project", "/data", "/raw:/raw:ro"} <= set(
        mounts.strip("'").split(",")
    )


def test_the_signal_leaves_less_time_to_the_ranks_than_slurm_leaves_to_the_job():
    job = json.loads(made(slurm="{signal_seconds: 1000}").file("job.json").content)
    assert 120 < job["stop_seconds"] < 1000 and job["join_seconds"] == 0


def test_values_cannot_break_out_of_their_line():
    plan = made(slurm="""{constraint: "a' #&b", arguments: [--prefer=x]}""")
    assert options(plan)["--constraint"] == "a' #&b"
    with pytest.raises(UserError, match="control character"):
        made(slurm='{constraint: "a\\n#SBATCH --nice=0"}')


def test_a_login_node_gets_the_same_commands_by_ssh():
    here, there = (
        made(slurm="{directory: /p}"),
        made(slurm="{directory: /p, login_host: login, config_file: /c}"),
    )
    words = argv(there, "submit")
    assert words[0] == "ssh" and words[words.index("-F") + 1] == "/c" and words[-2] == "login"
    assert shlex.split(words[-1])[5:] == list(argv(here, "submit"))
    message = (
        "submit",
        "--cluster",
        "c",
        "--launch-directory",
        "/shared/runs/nccl/launch",
        "--script",
        "job.sbatch",
    )
    assert argv(here, "submit")[4:] == message


def test_the_plan_begins_with_the_job_script_and_is_one_program():
    plan = made()
    assert plan.files[0].path == "job.sbatch"
    (step,) = plan.steps
    assert isinstance(step, Program) and {file.path for file in plan.files} < set(step.sends)
    lines = plan_text(plan).splitlines()
    assert lines.index("----- job.sbatch (mode 0755)") < 10 and not any(
        "----- job.json" in line for line in lines
    )
    assert lines.index("# 1 step, executed in this order:") > 10 and any(
        line.endswith("  run.yaml") for line in lines
    )


def test_a_run_after_another_asks_slurm_for_its_job():
    plan = planned(request(cluster(**SHARED), WORKLOAD, dependency="slurm://c/first"))
    assert argv(plan, "submit")[-2:] == ("--after", "slurm://c/first")


def test_a_sweep_writes_all_runs_before_one_array_is_submitted():
    asked = [
        request(cluster(**SHARED), WORKLOAD.replace("nccl", f"nccl-{size}"))
        for size in ("8m", "1g", "4g")
    ]
    plans = launcher_for(asked[0].cluster).plan_sweep(asked)
    assert [[step.stage for step in plan.steps] for plan in plans] == [["submit"], [], []]
    assert plans[0].files[0].path == "array.sbatch"
    array = plans[0].file("array.sbatch").content
    assert options(plans[0], "array.sbatch")["--array"] == "0-2"
    for plan in plans[1:]:
        written = plans[0].file(f"points/{plan.handle.run}/job.sbatch").content
        assert written == plan.file("job.sbatch").content
    assert [job.run for job in plans[0].jobs] == ["nccl-8m", "nccl-1g", "nccl-4g"]
    positions = [
        array.index(f"    {launch}\n") for launch in [plan.launch_directory for plan in plans]
    ]
    assert positions == sorted(positions)
    assert {*options(plans[0])} | {"--array"} == {*options(plans[0], "array.sbatch")}
    assert subprocess.run(["bash", "-n"], input=array, text=True).returncode == 0


def test_a_sweep_carries_the_code_once():
    slurm = "{directory: /elsewhere}"
    asked = [
        request(cluster(**SHARED, slurm=slurm), WORKLOAD.replace("nccl", f"r{n}"), sync=True)
        for n in range(3)
    ]
    stages = [
        [step.stage for step in plan.steps]
        for plan in launcher_for(asked[0].cluster).plan_sweep(asked)
    ]
    assert stages == [["carry", "submit"], [], []]
    with pytest.raises(UserError, match="is this directory itself"):
        planned(request(cluster(**SHARED), WORKLOAD, sync=True))


@pytest.mark.parametrize("option", ["--mem", "--mem-per-cpu", "--mem-per-gpu"])
def test_memory_that_the_user_sets_takes_the_place_of_ours(option: str):
    message = options(made(slurm=f"{{arguments: ['{option}=4G']}}"))
    assert {name for name in message if name.startswith("--mem")} == {option}
    assert message[option] == "4G"


def test_a_site_that_exports_nothing_leaves_the_job_its_variables():
    plan = made()
    assert options(plan)["--export"] == "ALL"
    assert "--export=ALL" in plan.file("job.sbatch").content.partition("    srun ")[2]
