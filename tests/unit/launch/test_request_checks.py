"""What is found in a run and a cluster before anything is sent: all of it at once, where it stands,
with a way out."""

from __future__ import annotations

import re

import pytest
from tests.unit.launch.requests import TRAINING, WORKLOAD, cluster, request

from drillyard.errors import UserError
from drillyard.hardware import catalog
from drillyard.launch.request import LaunchRequest
from drillyard.launch.request_checks import mount_parts, require_launchable
from drillyard.launch.slurm import rules as slurm_rules
from drillyard.launch.slurm.rules import gpus_of_gres
from drillyard.launch.submission import plan_requests
from drillyard.launch.vertex import rules as vertex_rules

HOPPER, BLACKWELL, MEGA = "a3-ultragpu-8g", "a4-highgpu-8g", "a3-megagpu-8g"
OWN = {"slurm": [slurm_rules.findings], "vertex": [vertex_rules.findings]}


def checked(asked: LaunchRequest) -> tuple[str, ...]:
    """The warnings of all checks, the platform's own included."""
    return require_launchable(asked, *OWN.get(asked.cluster.platform, ()))


def mistakes(cluster: str, run: str = TRAINING, **options) -> list[str]:
    """The lines of the error, or none."""
    asked = request(cluster, run, **options)
    try:
        checked(asked)
    except UserError as refused:
        return str(refused).splitlines()
    return []


def warnings(cluster: str, run: str = TRAINING, **options) -> list[str]:
    return list(checked(request(cluster, run, **options)))


def workload(**settings: str) -> str:
    body = {"command": "[train]", **settings}
    return "name: w\nworkload:\n" + "".join(
        f"  {key}: {value}\n" for key, value in body.items() if value
    )


def training(**data: str) -> str:
    body = {"source": "org/documents", "sequence_length": "4096", **data}
    inner = ", ".join(f"{key}: {value}" for key, value in body.items())
    return (
        f"name: t\nmodel: {{id: org/m}}\ndata: {{{inner}}}\n"
        + TRAINING[TRAINING.index("training:") :]
    )


@pytest.mark.parametrize("machine", [MEGA, HOPPER, BLACKWELL, "gpu-h100-sxm", "p5.48xlarge", None])
@pytest.mark.parametrize("platform", ["slurm", "ssh"])
def test_nothing_is_wrong_with_a_plain_run_on_two_nodes(machine, platform):
    assert warnings(cluster(platform, machine, storage="{directory: /shared}")) == []


def test_every_mistake_of_both_files_is_reported_at_once_in_the_order_of_their_lines():
    message = mistakes(
        cluster(mounts="[/data]", slurm='{gres: "gpu:h100:4", segment: 3}'),
        workload(launcher_file="go.sh", files="{../x: y}"),
    )
    places = [re.match(r"(\S+?:\d+): ([\w./]+)", line).groups() for line in message]
    assert places == [
        ("run.yaml:4", "workload.launcher_file"),
        ("run.yaml:5", "workload.files.../x"),
        ("cluster.yaml:5", "mounts"),
        ("cluster.yaml:6", "slurm.gres"),
        ("cluster.yaml:6", "slurm.segment"),
    ]


def test_a_config_that_was_never_a_file_is_named_in_words():
    asked = request(cluster(mounts="[/data]"))
    made_here = asked.cluster.__class__.model_validate(asked.cluster.model_dump())
    with pytest.raises(UserError, match=r"^cluster config: mounts: "):
        require_launchable(
            asked.__class__(asked.run, made_here, asked.facts, asked.here, asked.python)
        )


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"machine": "a3-mega-8g"},
            r"machine: machine 'a3-mega-8g' is not known; did you mean a3-megagpu-8g",
        ),
        (
            {"platform": "vertex", "machine": "a4x-highgpu-4g"},
            r"consumption: a4x-highgpu-4g cannot be had by 'on-demand'",
        ),
        (
            {"network_stack": "gib"},
            r"network_stack: a3-megagpu-8g has no 'gib' .*; remove it, or write tcpxo",
        ),
        (
            {"processes_per_node": 12},
            r"processes_per_node: 12 ranks, but a3-megagpu-8g has 8 accelerators",
        ),
        (
            {"slurm": '{gres: "gpu:h100:4"}'},
            r"slurm.gres: asks for 4 GPUs per node, for 8 ranks: write gpu:TYPE:8",
        ),
        (
            {"slurm": '{gres: "gpu:16"}'},
            r"slurm.gres: asks for 16 GPUs per node; a3-megagpu-8g has 8",
        ),
        ({"slurm": '{gres: "gpu:4", exclusive: false}', "processes_per_node": 4}, None),
        ({"slurm": '{gres: "nic:1"}'}, r"slurm.gres: .* names no gpu"),
        (
            {"nodes": 6, "slurm": "{segment: 4}"},
            r"slurm.segment: 6 nodes are no multiple of segments of 4",
        ),
        ({"mounts": "[/data]"}, r"mounts: are for containers, and the run has no `image`"),
        (
            {"image": "i:1", "mounts": "[/a:/x, /b:/x:ro]"},
            r"mounts.1: /x in the container is already /a of the node",
        ),
        (
            {"slurm": '{time_limit: "5"}'},
            r"slurm.time_limit: 5 \(300 s\) is not longer than slurm.signal_seconds: 300",
        ),
        ({"slurm": "{signal_seconds: 70000}"}, r"slurm.signal_seconds: at most 65535"),
        ({"environment": "{MASTER_ADDR: n1}"}, r"environment.MASTER_ADDR: is set by the launcher"),
        ({"environment": "{RANK: '0'}"}, r"environment.RANK: is set by the launcher"),
        (
            {"machine": "p5.48xlarge", "environment": "{NCCL_BUFFSIZE: '1'}"},
            r"NCCL_BUFFSIZE: must not be set .* efa",
        ),
        (
            {"environment": "{NCCL_NVLSTREE_MAX_CHUNKSIZE: '1'}"},
            r"tcpxo ends a job where it is not 131072",
        ),
        ({"platform": "local", "nodes": 1, "machine": None, "processes_per_node": 1}, None),
    ],
)
def test_what_a_cluster_cannot_do_is_refused_with_the_rule_and_the_fix(settings, said):
    message = mistakes(cluster(**settings))
    assert len(message) == (said is not None) + (settings.get("platform") == "vertex"), message
    if said is not None:
        assert re.search(said, message[0]), message[0]


def test_flex_start_ends_after_seven_days():
    bought = {"location": "{project: p, zone: z}", "consumption": "flex-start"}
    assert mistakes(cluster(**bought, slurm='{time_limit: "7-00:00:00"}')) == []
    (message,) = mistakes(cluster(**bought, slurm='{time_limit: "7-00:00:01"}'))
    assert "slurm.time_limit: is more than flex-start gives" in message
    assert "write 7-00:00:00 or less" in message
    assert mistakes(cluster(slurm='{time_limit: "30-0"}')) == []


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"command": "", "arguments": "[x]"},
            "workload: has neither `command` nor `launcher_file`",
        ),
        ({"launcher_file": "go.sh"}, "workload.launcher_file: and `command` are both given"),
        ({"command": "['']"}, "workload.command: its first item is empty"),
        ({"files": "{/etc/x: y}"}, "is not a path below the run's launch directory"),
        ({"files": "{a/../../x: y}"}, "is not a path below the run's launch directory"),
        (
            {"command": "", "launcher_file": "a/go.sh", "files": "{go.sh: y}"},
            "would overwrite `files` go.sh",
        ),
        ({"environment": "{NNODES: '1'}"}, "workload.environment.NNODES: is set by the launcher"),
        (
            {"environment": "{DRILLYARD_SUBMISSION: a}"},
            "environment.DRILLYARD_SUBMISSION: is set by the launcher",
        ),
        (
            {"environment": "{DRILLYARD_RANK_PIPES: /tmp}"},
            "environment.DRILLYARD_RANK_PIPES: is set by the launcher",
        ),
        ({"environment": "{RANK: '{node_rank}'}"}, None),
    ],
)
def test_what_a_workload_cannot_be_is_refused(settings, said):
    message = mistakes(cluster(), workload(**settings))
    assert len(message) == (said is not None), message
    if said is not None:
        assert said in message[0]


def test_a_capability_that_the_platform_lacks_is_refused_with_those_that_have_it():
    local = cluster("local", None, 1, processes_per_node=2)
    (image,) = mistakes(local, workload(image="i:1"))
    assert re.search(r"run.yaml:\d+: workload.image: .*platform local cannot .*slurm", image)
    with pytest.raises(UserError, match=r"--sync: platform vertex cannot .*these can: ssh, slurm"):
        plan_requests([request(cluster("vertex"), sync=True)])
    with pytest.raises(UserError, match=r"--after: .*these can: slurm"):
        plan_requests([request(cluster("ssh"), dependency="slurm://c/r")])


@pytest.mark.parametrize(
    ("machine", "image", "said"),
    [
        (
            MEGA,
            "nvcr.io/nvidia/pytorch:23.04-py3",
            "has glibc 2.31 .* needs glibc >= 2.35 .*: take a later tag",
        ),
        (MEGA, "docker://nvcr.io#nvidia/pytorch:23.05-py3", None),
        (MEGA, "nvidia/cuda:12.4.1-devel-ubuntu20.04", "has glibc 2.31"),
        (MEGA, "nvidia/cuda:12.4.1-devel-ubuntu22.04", None),
        (
            BLACKWELL,
            "nvcr.io/nvidia/pytorch:24.12-py3",
            "has CUDA 12.6 .*NVIDIA B200 needs CUDA >= 12.8",
        ),
        (BLACKWELL, "pytorch/pytorch:2.6.0-cuda12.6-cudnn9-runtime", "has CUDA 12.6"),
        (BLACKWELL, "pytorch/pytorch:2.7.0-cuda12.8-cudnn9-runtime", None),
        (HOPPER, "pytorch/pytorch:2.6.0-cuda12.6-cudnn9-runtime", None),
    ],
)
def test_an_image_is_judged_by_what_its_tag_tells(machine, image, said):
    for message in (
        mistakes(cluster(machine=machine, image=f"'{image}'")),
        mistakes(cluster(machine=machine), workload(image=f"'{image}'")),
    ):
        assert len(message) == (said is not None), message
        assert said is None or re.search(said, message[0]), message


def test_an_image_that_tells_nothing_is_no_mistake_but_says_how_to_look():
    (glibc,) = [line for line in warnings(cluster(image="/images/mine.sqsh")) if "glibc" in line]
    assert "run in the image: ldd --version" in glibc
    (cuda,) = [
        line
        for line in warnings(cluster(machine=BLACKWELL, image="me/mine:latest"))
        if "CUDA" in line
    ]
    assert "torch.version.cuda" in cuda
    assert not [
        line for line in warnings(cluster(nodes=1, image="me/mine:latest")) if "glibc" in line
    ]


def test_the_images_of_a_network_stack_are_made_for_its_machines():
    image = catalog().network_stack("gib").images["diagnostic"]
    assert (
        warnings(cluster(machine=BLACKWELL, storage="{directory: /s}"), workload(image=image)) == []
    )


def test_settings_of_an_earlier_tcpxo_are_warned_of():
    (message,) = [
        line for line in warnings(cluster(environment="{NCCL_ALGO: Ring}")) if "NCCL_ALGO" in line
    ]
    assert "cluster.yaml" in message
    assert "earlier settings of tcpxo" in message


def test_gpus_that_nobody_uses_are_warned_of():
    assert [
        line
        for line in warnings(cluster(processes_per_node=4))
        if "4 of the 8 accelerators" in line
    ]
    assert not [
        line for line in warnings(cluster(processes_per_node=4), workload()) if "idle" in line
    ]


def test_a_time_limit_just_above_the_signal_is_warned_of():
    (message,) = [
        line
        for line in warnings(cluster(slurm='{time_limit: "6", signal_seconds: 320}'))
        if "time_limit" in line
    ]
    assert "less than a minute of work" in message


@pytest.mark.parametrize(
    ("settings", "source", "said"),
    [
        ({}, "/data/rows.jsonl", "is looked for on every node, not on this machine"),
        ({"storage": "{directory: /data}"}, "/data/rows.jsonl", None),
        ({"storage": "{directory: /data}"}, "/database/rows.jsonl", "on every node"),
        ({}, "/home/me/project/rows.jsonl", None),
        ({"slurm": "{directory: /work}"}, "/home/me/project/rows.jsonl", "on every node"),
        ({"image": "i:1"}, "/data/rows.jsonl", "is looked for in the container"),
        ({"image": "i:1", "mounts": "[/raw:/data:ro]"}, "/data/rows.jsonl", None),
        ({}, "rows.jsonl", None),
        (
            {"slurm": "{login_host: l}"},
            "rows.jsonl",
            "below the project's directory on the cluster; --sync copies it there",
        ),
        ({"slurm": "{directory: /work}"}, "rows.jsonl", "--sync copies it there"),
        ({"platform": "ssh"}, "rows.jsonl", "--sync copies it there"),
        ({}, "org/data", None),
        ({}, "builtin:text-to-sql", None),
        ({"platform": "vertex"}, "/gcs/my-bucket/rows.jsonl", None),
        (
            {"platform": "vertex"},
            "/data/rows.jsonl",
            "put it on the bucket, which the nodes see as /gcs/my-bucket",
        ),
        ({"platform": "vertex"}, "/home/me/project/rows.jsonl", "put it on the bucket"),
        ({"platform": "vertex"}, "rows.jsonl", "is looked for in the image"),
    ],
)
def test_data_are_looked_for_on_the_nodes_and_not_here(settings, source, said):
    message = [
        line
        for line in warnings(cluster(**settings), training(source=source))
        if "data.source" in line
    ]
    assert len(message) == (said is not None), message
    assert said is None or said in message[0]


def test_all_paths_of_a_run_are_looked_at():
    run = training(
        source="[/a.jsonl, {path: /b}]",
        tokenizer="/t",
        chat_template="/own/chat.jinja",
        held_out="{source: /h}",
    ).replace("org/m", "/m")
    message = " ".join(warnings(cluster(), run))
    for key in (
        "data.source.0",
        "data.source.1",
        "data.tokenizer",
        "data.chat_template",
        "data.held_out.source",
        "model.id",
    ):
        assert f" {key}: " in message


def test_carried_data_need_no_warning():
    message = warnings(cluster("ssh"), training(source="rows.jsonl"), sync=True)
    assert not [line for line in message if "data.source" in line]


def test_where_a_relative_output_lies_is_said_where_nodes_must_share_it():
    (output,) = [line for line in warnings(cluster()) if " output: " in line]
    assert "the run directory is runs/llama-8b below the project's directory" in output
    for alone in ({"nodes": 1}, {"storage": "{directory: /shared}"}, {"platform": "vertex"}):
        assert not [line for line in warnings(cluster(**alone)) if " output: " in line]
    assert not [
        line
        for line in warnings(cluster(), TRAINING + "output: /shared/runs\n")
        if " output: " in line
    ]


def test_a_workload_brings_no_rules_of_the_trainer():
    assert warnings(cluster(storage="{directory: /s}"), WORKLOAD) == []


def test_finding_nothing_reads_nothing_but_the_request(monkeypatch):
    asked = request(cluster())
    checked(asked)
    monkeypatch.setattr("builtins.open", lambda *_, **__: pytest.fail("a rule opened a file"))
    first = checked(asked)
    assert first == checked(asked)


@pytest.mark.parametrize(
    ("gres", "count"),
    [
        ("gpu:8", 8),
        ("gpu:nvidia_h100_80gb_hbm3:8", 8),
        ("gpu", 1),
        ("gpu:h100", 1),
        ("gpu:a:4,gpu:b:4", 8),
        ("nic:2,gpu:8(S:0-1)", 8),
        ("nic:2", None),
    ],
)
def test_gpus_of_gres(gres, count):
    assert gpus_of_gres(gres) == count


@pytest.mark.parametrize(
    ("mount", "parts"),
    [
        ("/a", ("/a", "/a")),
        ("/a:/b", ("/a", "/b")),
        ("/a:/b:ro", ("/a", "/b")),
        ("/a:ro", ("/a", "/a")),
    ],
)
def test_parts_of_a_mount(mount, parts):
    assert mount_parts(mount) == parts


def test_directories_of_a_launched_run_are_written_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNS", "/shared/runs")
    output = mistakes(
        cluster(storage="{directory: '${env:RUNS}/a'}"), "output: ${env:RUNS}/x\n" + TRAINING
    )
    assert [re.match(r"\S+?:\d+: ([\w.]+)", line).group(1) for line in output] == [
        "output",
        "storage.directory",
    ]
