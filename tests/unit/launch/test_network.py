"""A run's network stack: which variables, mounts and scripts its nodes get, from facts, each with
its source."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from tests.unit.launch.requests import cluster, request

from drillyard.errors import UserError
from drillyard.hardware import catalog
from drillyard.launch.network import NetworkSetup, network_of

GOOGLE = [
    name
    for name, machine in catalog().machines.items()
    if machine.cloud == "gcp" and machine.data_nics.count
]


SCRIPT = "/var/lib/tcpxo/lib64/nccl-env-profile.sh"


def network(configured=(), **settings) -> NetworkSetup:
    asked = request(cluster(**settings))
    return network_of(asked.cluster, asked.facts, image=asked.cluster.image, configured=configured)


def test_pods_and_hosts_of_one_machine_name_their_interfaces_differently():
    pods, hosts = network(platform="vertex"), network(platform="slurm")
    assert pods.environment["NCCL_LIB_DIR"] == "/usr/local/nvidia/lib64"
    assert "\n. /usr/local/nvidia/lib64/nccl-env-profile.sh\n" in pods.file.content
    assert "NCCL_FASTRAK_CTRL_DEV" not in pods.environment
    assert hosts.environment["NCCL_LIB_DIR"] == "/var/lib/tcpxo/lib64"
    assert f"\n. {SCRIPT}\n" in hosts.file.content
    assert (
        hosts.environment["NCCL_FASTRAK_CTRL_DEV"]
        == hosts.environment["NCCL_SOCKET_IFNAME"]
        == "enp0s12"
    )
    assert len(hosts.environment["NCCL_FASTRAK_IFNAME"].split(",")) == 8


def test_a_container_on_a_host_mounts_what_the_stack_needs_and_none_is_mounted_without_one():
    assert network(image="i:1").mounts == ("/var/lib/tcpxo/lib64", "/dev/aperture_devices")
    assert network(image="i:1", machine="a4-highgpu-8g").mounts == ("/usr/local/gib",)
    assert network().mounts == network(platform="vertex").mounts == ()


def test_settings_of_gib_depend_on_the_machine():
    ultra, a4 = network(machine="a3-ultragpu-8g"), network(machine="a4-highgpu-8g")
    assert (
        ultra.environment["NCCL_TUNER_CONFIG_PATH"]
        == "/usr/local/gib/configs/tuner_config_a3u.txtpb"
    )
    assert (
        a4.environment["NCCL_TUNER_CONFIG_PATH"] == "/usr/local/gib/configs/tuner_config_a4.txtpb"
    )
    assert ultra.environment["NCCL_SOCKET_IFNAME"] == "enp0s19,enp192s20"
    assert "\n. /usr/local/gib/scripts/set_nccl_env.sh\n" in ultra.file.content


def test_infiniband_and_efa_are_variables_alone():
    infiniband = network(machine="gpu-h100-sxm")
    assert infiniband.environment["NCCL_IB_HCA"] == "mlx5"
    efa = network(machine="p5.48xlarge")
    assert efa.environment["FI_EFA_USE_HUGE_PAGE"] == "0"
    assert infiniband.file is efa.file is None


def test_no_machine_and_no_stack_is_no_network():
    assert network(machine=None) == NetworkSetup()
    assert network(machine=None, network_stack="infiniband").fields[0].value == "infiniband"


def test_one_node_needs_no_data_nics_and_the_plan_says_so():
    alone = network(nodes=1)
    assert not alone.environment
    assert "one node" in alone.fields[0].reason


@pytest.mark.parametrize("name", GOOGLE)
@pytest.mark.parametrize("platform", ["slurm", "vertex"])
def test_every_setting_is_reported_with_its_reason_and_source(name, platform):
    bought = {"consumption": "reservation", "reservation": "r"} if platform == "vertex" else {}
    asked = request(cluster(platform=platform, machine=name, **bought))
    found = network_of(asked.cluster, asked.facts, image="i:1")
    message = {field.place: field for field in found.fields}
    expanded = re.findall(
        r'^export (?!LD_LIBRARY_PATH)(\w+)="(?!\$kept_)',
        found.file.content if found.file else "",
        re.M,
    )
    wanted = {f"environment: {key}" for key in (*found.environment, *expanded)}
    assert wanted | {f"mount: {path}" for path in found.mounts} <= set(message)
    assert all(field.reason and field.source for field in found.fields)
    assert all(
        message[f"environment: {key}"].value == value for key, value in found.environment.items()
    )


def test_ethernet_can_be_asked_for_anywhere_and_keeps_nccl_off_what_else_is_there():
    found = network(machine="a3-ultragpu-8g", network_stack="ethernet")
    assert found.environment == {"NCCL_SOCKET_IFNAME": "^lo,docker", "NCCL_NET": "Socket"}
    assert found.fields[0].source == "cluster.yaml: network_stack"


def test_tcpx_needs_the_daemon_that_a_slurm_job_has():
    slurm = network(machine="a3-highgpu-8g").file
    assert 'NCCL_GPUDIRECTTCPX_UNIX_CLIENT_PREFIX="/run/tcpx-${SLURM_JOB_ID}"' in slurm.content
    with pytest.raises(
        UserError, match=r"prolog(.|\n)*run on one of: slurm, kubernetes, gke, vertex$"
    ):
        network(platform="ssh", machine="a3-highgpu-8g")


def sourced(profile: Path, environment: dict[str, str], shell: str = "bash") -> dict[str, str]:
    """The variables of a command that is started as the agent starts it, with `profile` as the
    stack's script."""
    script = profile.parent / "network.sh"
    script.write_text(network(environment).file.content.replace(SCRIPT, str(profile)))
    start = [shell, "-c", '. "$0" && exec "$@"', str(script), "env", "-0"]
    ended = subprocess.run(
        start, env={"PATH": "/usr/bin:/bin", **environment}, capture_output=True, text=True
    )
    if ended.returncode:
        return {"exit": str(ended.returncode), "error": ended.stderr}
    return dict(line.split("=", 1) for line in ended.stdout.split("\0") if line)


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    """What the nodes of a3-megagpu-8g have, written for pods as Google's is."""
    path = tmp_path / "nccl-env-profile.sh"
    path.write_text(
        "export NCCL_FASTRAK_CTRL_DEV=eth0 NCCL_SOCKET_IFNAME=eth0 NCCL_DEBUG=WARN\n"
        'export NCCL_TUNER_CONFIG_PATH="$NCCL_LIB_DIR/a3plus_tuner_config.textproto"\n'
        'export LD_LIBRARY_PATH="/from/profile:$LD_LIBRARY_PATH"\n'
    )
    return path


@pytest.mark.parametrize("shell", ["bash", "sh"])
def test_the_script_is_sourced_and_does_not_undo_what_plan_and_configs_set(profile, shell):
    environment = {
        **network().environment,
        "NCCL_DEBUG": "a 'b' \"c\" $d\nsecond line",
        "LD_LIBRARY_PATH": "/mine",
    }
    assert "second line" not in network(environment).file.content
    seen = sourced(profile, environment, shell)
    assert seen["NCCL_TUNER_CONFIG_PATH"] == "/var/lib/tcpxo/lib64/a3plus_tuner_config.textproto"
    assert seen["NCCL_FASTRAK_CTRL_DEV"] == seen["NCCL_SOCKET_IFNAME"] == "enp0s12"
    assert seen["NCCL_DEBUG"] == environment["NCCL_DEBUG"]
    assert seen["LD_LIBRARY_PATH"] == "/from/profile:/var/lib/tcpxo/lib64:/mine"
    assert not [name for name in seen if name.startswith("kept_")]


@pytest.mark.parametrize("others", [{}, {"LD_LIBRARY_PATH": ""}])
def test_a_library_path_without_another_has_no_empty_part(profile, others):
    # An empty part of LD_LIBRARY_PATH is the working directory.
    profile.write_text("")
    assert (
        sourced(profile, {**network().environment, **others})["LD_LIBRARY_PATH"]
        == "/var/lib/tcpxo/lib64"
    )


def test_a_node_without_the_stack_ends_the_run_for_good_and_says_what_is_missing(profile):
    profile.unlink()
    ended = sourced(profile, dict(network().environment))
    assert ended["exit"] == "2"
    assert "network stack tcpxo" in ended["error"]
    assert "set network_stack: ethernet" in ended["error"]
