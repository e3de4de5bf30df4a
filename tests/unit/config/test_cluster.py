"""What a cluster.yaml must hold for each platform, and what it must not."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.facts import each_says, says

from drillyard.config.cluster import ClusterConfig
from drillyard.config.load import load_cluster_config, save_resolved
from drillyard.config.platforms import platforms
from drillyard.errors import UserError

GKE = """\
name: b200-flex
platform: gke
location: {project: my-project, region: us-central1, zone: us-central1-b}
machine: a4-highgpu-8g
nodes: 2
consumption: flex-start-queued
storage: {bucket: my-bucket}
image: us-docker.pkg.dev/my-project/drillyard/drillyard:latest
"""
SLURM = """\
name: s
platform: slurm
nodes: 4
slurm: {partition: gpu, account: a, time_limit: 1-12:00:00, login_host: login}
"""
SSH = "name: s\nplatform: ssh\nnodes: 2\nssh: {hosts: [a, b], user: me}\n"
VALID = {
    "local": "name: here\nplatform: local\n",
    "ssh": SSH,
    "slurm": SLURM,
    "kubernetes": (
        "name: k\nplatform: kubernetes\nimage: i:1\nkubernetes: {volume_claim: c, queue: q}\n"
    ),
    "gke": GKE,
    "vertex": (
        GKE.replace("platform: gke", "platform: vertex").replace("flex-start-queued", "flex-start")
    ),
    "gce": (
        "name: g\nplatform: gce\nlocation: {project: p, zone: z}\nmachine: m\nconsumption: spot\n"
    ),
    "nebius": (
        "name: n\nplatform: nebius\nlocation: {project: p, region: r}\nmachine: m\nconsumption:"
        " on-demand\n"
    ),
}


@pytest.fixture(autouse=True)
def in_a_directory_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def load(text: str, *overrides: str) -> ClusterConfig:
    Path("cluster.yaml").write_text(text)
    return load_cluster_config("cluster.yaml", overrides)


def refuse(text: str, *overrides: str) -> list[str]:
    with pytest.raises(UserError) as caught:
        load(text, *overrides)
    return str(caught.value).splitlines()


def test_every_platform_has_a_valid_config_that_survives_saving() -> None:
    assert set(VALID) == set(platforms())
    for text in VALID.values():
        config = load(text)
        save_resolved(config, "saved.yaml")
        assert load_cluster_config("saved.yaml") == config


@pytest.mark.parametrize("platform", sorted(platforms()))
def test_everything_that_a_platform_needs_is_asked_for_at_once(platform: str) -> None:
    text = f"name: x\nplatform: {platform}\n"
    required = platforms()[platform].required
    if not required:
        assert load(text).platform == platform
        return
    message = refuse(text)
    assert [line.split(": ")[1] for line in message] == list(required)
    assert all(f"platform {platform} needs it" in line for line in message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            SSH + "consumption: spot\n",
            "cluster.yaml:5: consumption: ... ssh ... slurm, gke, vertex, gce, nebius",
        ),
        (
            GKE + "slurm: {partition: x}\n",
            "cluster.yaml:9: slurm: ... gke ... slurm",
        ),
        (
            "name: x\nplatform: local\nnodes: 2\n",
            "cluster.yaml:3: nodes: ... 2 ... local ... 1",
        ),
        (
            SSH.replace("nodes: 2", "nodes: 3"),
            "cluster.yaml:3: nodes: ... 3 ... ssh.hosts ... 2 ... nodes: 2",
        ),
        (SSH.replace("[a, b]", "[a, a]"), "cluster.yaml:4: ssh.hosts: 'a' ... once"),
        (SSH.replace("[a, b]", "[]"), "cluster.yaml:4: ssh.hosts: ... 1"),
        (SSH.replace("hosts", "host"), "cluster.yaml:4: ssh.host: ... 'hosts'"),
        (
            VALID["gce"].replace("spot", "flex-start-queued"),
            (
                "cluster.yaml:5: consumption: ... 'flex-start-queued' ... gce ... spot, flex-start,"
                " calendar"
            ),
        ),
        (
            GKE.replace("flex-start-queued", "reservation"),
            "cluster.yaml: reservation: missing: ... reservation",
        ),
        (
            GKE + "reservation: r\n",
            "cluster.yaml:9: reservation: ... reservation ... calendar ... flex-start-queued",
        ),
        (
            GKE.replace("platform: gke", "platform: gek"),
            (
                "cluster.yaml:2: platform: ... 'gek' ... 'local', 'ssh', 'slurm' ... without a"
                " launcher ... gce, nebius"
            ),
        ),
        (
            GKE.replace("platform: gke", "platform: slrum"),
            "cluster.yaml:2: platform: ... 'slrum' ... launcher ... did you mean 'slurm'?",
        ),
        (
            SLURM.replace("1-12:00:00", "12h"),
            "cluster.yaml:4: slurm.time_limit: ... '12h' ... HH:MM:SS ... D-HH:MM:SS",
        ),
    ],
)
def test_what_does_not_belong_together_is_reported(text: str, message: str) -> None:
    assert each_says(refuse(text), [message])


def test_a_time_limit_is_text_even_where_yaml_sees_a_number() -> None:
    config = load(SLURM.replace("1-12:00:00", "12:30:00"))
    assert config.slurm is not None
    assert config.slurm.time_limit == "12:30:00"


@pytest.mark.parametrize(
    ("limit", "seconds"),
    [
        ("90", 5400), ("90:30", 5430), ("12:30:05", 45005), ("2-12", 216_000), ("1-12:30", 131_400),
        ("1-12:00:01", 129_601),
    ],
)  # fmt: skip
def test_a_time_limit_in_seconds(limit: str, seconds: int) -> None:
    slurm = load(SLURM.replace("1-12:00:00", f"'{limit}'")).slurm
    assert slurm is not None and slurm.limit_seconds == seconds


def test_a_slurm_cluster_of_ones_own_machines_may_say_what_they_are() -> None:
    config = load(SLURM + "machine: a3-megagpu-8g\n")
    assert config.machine == "a3-megagpu-8g" and config.has_own_machines


def test_machines_are_ones_own_where_no_cloud_makes_them() -> None:
    assert {platform for platform, text in VALID.items() if load(text).has_own_machines} == {
        "local",
        "ssh",
        "slurm",
        "kubernetes",
    }
    made = "location: {project: p, zone: z}\nmachine: a3-megagpu-8g\nconsumption: spot\n"
    assert not load(SLURM + made).has_own_machines


@pytest.mark.parametrize(
    ("given", "asked_for"),
    [
        ("consumption: spot\n", {"location.project", "location.zone"}),
        ("location: {project: p}\n", {"location.zone", "consumption"}),
    ],
)
def test_a_slurm_cluster_that_is_to_be_made_on_a_cloud_needs_a_place_and_a_way_of_buying(
    given: str, asked_for: set[str]
) -> None:
    message = refuse(SLURM + "machine: a3-megagpu-8g\n" + given)
    assert {line.split(": ")[1] for line in message} == asked_for
    assert all(says(line, "location ... consumption") for line in message)


@pytest.mark.parametrize("platform", sorted(platforms()))
def test_every_platform_takes_a_hardware_file_whose_path_is_relative_to_the_config(
    platform: str,
) -> None:
    assert load(VALID[platform] + "hardware: ../own.yaml\n").hardware == str(
        Path.cwd().parent / "own.yaml"
    )
    assert load(VALID[platform] + "hardware: /etc/own.yaml\n").hardware == "/etc/own.yaml"
    assert load(VALID[platform]).hardware is None
