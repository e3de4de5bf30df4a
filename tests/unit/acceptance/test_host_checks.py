"""Checks of hosts: NICs, limits, versions, variables, command lines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.unit.acceptance.host_scenarios import expected, judged, observed

from drillyard.acceptance.checks import (
    environment,
    host_limits,
    kernel_command_line,
    network_interfaces,
    versions,
)
from drillyard.acceptance.evidence import Observation
from drillyard.acceptance.node import probe_host, probe_network_interfaces, probe_software
from drillyard.acceptance.results import CheckResult, Status

GIB = 1 << 30
FAIL, PASS, WARN, INCOMPLETE = Status.fail, Status.passed, Status.warn, Status.incomplete


def failed(results: list[CheckResult]) -> list[CheckResult]:
    return [each for each in results if each.status is FAIL]


# NICs.


def nic(state: str = "up", mtu: str = "8244") -> dict[str, Any]:
    return {"operstate": state, "mtu": mtu, "speed": "200000", "device": "0000:06:00.0"}


def interfaces(count: int = 8, **changed: dict[str, Any]) -> Observation:
    found = {"lo": nic(), "eth0": nic(mtu="1460"), "docker0": nic("down", "1500")}
    found |= {f"eth{at}": nic() for at in range(1, count + 1)}
    return observed("network_interfaces", {"interfaces": {**found, **changed}, "rdma_devices": {}})


def rdma(count: int = 8, **changed: dict[str, str]) -> Observation:
    port = {"state": "4: ACTIVE", "rate": "400 Gb/sec (4X NDR)", "link_layer": "InfiniBand"}
    devices = {f"mlx5_{at}": {"ports": {"1": dict(port)}} for at in range(count)}
    for name, change in changed.items():
        devices[name]["ports"]["1"] |= change
    values = {"interfaces": {"eth0": nic(mtu="1500")}, "rdma_devices": devices}
    return observed("network_interfaces", values)


def test_data_nics_of_a_machine() -> None:
    (result,) = judged(network_interfaces.CHECK, interfaces())
    assert (result.status, result.observed) == (PASS, 8)


@pytest.mark.parametrize("broken", [nic("down"), nic(mtu="1500"), nic(mtu="1460")])
def test_a_data_nic_that_is_down_or_has_a_small_mtu(broken: dict[str, Any]) -> None:
    (result,) = judged(network_interfaces.CHECK, interfaces(eth5=broken))
    assert (result.status, result.observed, result.culprits) == (FAIL, 7, (0,))
    assert "eth5" in result.reason


def test_green_without_the_fast_network() -> None:
    """A node whose pods got no data NIC is not healthy."""
    (result,) = judged(network_interfaces.CHECK, interfaces(0))
    assert (result.status, result.observed) == (FAIL, 0)
    (result,) = judged(network_interfaces.CHECK, rdma(0), at=expected("gpu-h100-sxm"))
    assert (result.status, result.observed) == (FAIL, 0)


def test_rdma_devices_of_a_machine() -> None:
    infiniband = expected("gpu-h100-sxm")
    assert judged(network_interfaces.CHECK, rdma(), at=infiniband)[0].status is PASS
    for change in ({"state": "1: DOWN"}, {"state": "2: INIT"}, {"rate": "200 Gb/sec"}):
        (result,) = judged(network_interfaces.CHECK, rdma(mlx5_3=change), at=infiniband)
        assert (result.status, result.observed) == (FAIL, 7)
        assert "mlx5_3" in result.reason
    unread: dict[str, Any] = {"state": None}
    (result,) = judged(network_interfaces.CHECK, rdma(mlx5_3=unread), at=infiniband)
    assert result.status is INCOMPLETE


def test_a_machine_without_data_nics_needs_one_that_is_up() -> None:
    one = expected("a2-highgpu-1g")
    assert judged(network_interfaces.CHECK, interfaces(0), at=one)[0].status is PASS
    down = interfaces(0, eth0=nic("down"))
    assert judged(network_interfaces.CHECK, down, at=one)[0].status is FAIL
    assert judged(network_interfaces.CHECK, down, at=expected(None))[0].status is Status.skipped


def test_nics_are_read_below_sys(tmp_path: Path) -> None:
    net = tmp_path / "sys/class/net/eth1"
    net.mkdir(parents=True)
    for name, text in {"operstate": "up\n", "mtu": "8244\n", "speed": "-1\n"}.items():
        (net / name).write_text(text)
    port = tmp_path / "sys/class/infiniband/mlx5_0/ports/1"
    (port / "counters").mkdir(parents=True)
    (port / "state").write_text("4: ACTIVE\n")
    (port / "counters/link_downed").write_text("2\n")
    found = probe_network_interfaces.probe({"root": str(tmp_path)})
    assert found["interfaces"]["eth1"]["mtu"] == "8244"
    assert found["rdma_devices"]["mlx5_0"]["ports"]["1"]["state"] == "4: ACTIVE"
    assert found["rdma_devices"]["mlx5_0"]["ports"]["1"]["counters"]["link_downed"] == "2"
    with pytest.raises(OSError):
        probe_network_interfaces.probe({"root": str(tmp_path / "absent")})


# Limits.


def host(rank: int = 0, **changed: Any) -> Observation:
    space = {"size": 100 * GIB, "free": 50 * GIB, "device": 1}
    values = {
        "cores": 208,
        "cores_online": 208,
        "memory": f"MemTotal:       {1850 << 20} kB\nMemFree:  1 kB",
        "swap": "Filename\tType\tSize\tUsed\tPriority",
        "shared_memory": dict(space),
        "disks": {"/": dict(space), "/tmp": dict(space)},
        "limits": {"locked_memory": None, "open_files": 1024},
        "process": "Name:\tpython3\nCapEff:\t0000000000000000",
        "command_line": "BOOT_IMAGE=/vmlinuz root=UUID=1 iommu=pt",
        **changed,
    }
    return observed("host", values, rank)


FULL = {"size": 100 * GIB, "free": 4 * GIB, "device": 1}


def test_a_host_as_its_machine() -> None:
    assert [each.status for each in judged(host_limits.CHECK, host())] == [PASS]


@pytest.mark.parametrize(
    ("changed", "metric"),
    [
        ({"cores_online": 96}, "processors"),
        ({"memory": f"MemTotal: {1700 << 20} kB"}, "memory"),
        ({"swap": "Filename\n/swapfile file 8388604 0 -2"}, "swap"),
        ({"shared_memory": FULL}, "shared memory"),
        ({"shared_memory": {"size": 64 << 20, "free": 64 << 20, "device": 2}}, "shared memory"),
        ({"disks": {"/": FULL}}, "disk"),
    ],
)
def test_a_host_that_is_less_than_its_machine(changed: dict[str, Any], metric: str) -> None:
    (result,) = judged(host_limits.CHECK, host(**changed))
    assert (result.status, result.metric, result.culprits) == (FAIL, metric, (0,))
    assert result.action


@pytest.mark.parametrize(
    "changed",
    [
        {"cores_online": None}, {"cores_online": "208"}, {"memory": None}, {"memory": "MemTotal:"},
        {"swap": None}, {"shared_memory": None}, {"shared_memory": {"size": 1}}, {"disks": {}},
        {"disks": {"/": None}},
    ],
)  # fmt: skip
def test_what_cannot_be_read_of_a_host_does_not_pass(changed: dict[str, Any]) -> None:
    assert [each.status for each in judged(host_limits.CHECK, host(**changed))] == [INCOMPLETE]


def test_simultaneous_multithreading_may_be_off() -> None:
    assert judged(host_limits.CHECK, host(cores_online=104))[0].status is PASS


def test_locked_memory_is_what_rdma_needs() -> None:
    infiniband = expected("gpu-h100-sxm")
    small = host(limits={"locked_memory": 8 << 20})
    (result,) = judged(host_limits.CHECK, small, at=infiniband)
    assert (result.status, result.metric) == (FAIL, "locked memory")
    capable = host(limits={"locked_memory": 8 << 20}, process="CapEff:\t0000000000004000")
    assert judged(host_limits.CHECK, capable, at=infiniband)[0].status is PASS
    assert judged(host_limits.CHECK, small)[0].status is PASS


def test_a_full_dev_shm_is_found_without_a_machine() -> None:
    (result,) = judged(host_limits.CHECK, host(shared_memory=FULL), at=expected(None))
    assert (result.status, result.culprits) == (FAIL, (0,))


def test_this_host_is_read() -> None:
    values = probe_host.probe({})
    found = judged(host_limits.CHECK, observed("host", values), at=expected(None))
    assert INCOMPLETE not in {each.status for each in found}
    assert values["accelerators"] == 0 or isinstance(values["accelerators"], int)


# The command line.


def lines(*texts: str | None) -> list[CheckResult]:
    seen = [host(rank, command_line=text) for rank, text in enumerate(texts)]
    return judged(kernel_command_line.CHECK, *seen, nodes=len(texts))


def test_command_lines_without_what_names_a_node() -> None:
    assert [each.status for each in lines("root=/dev/a iommu=pt", "root=/dev/b iommu=pt")] == [PASS]
    assert [each.status for each in lines("iommu=pt")] == [Status.skipped]


def test_a_command_line_that_differs_warns() -> None:
    (result,) = lines("iommu=pt", "iommu=pt quiet", "iommu=pt")
    assert (result.status, result.nodes, result.culprits, result.observed) == (
        WARN, (1,), (), "quiet",
    )  # fmt: skip
    both = lines("iommu=pt", "iommu=on")
    assert [(each.status, each.nodes) for each in both] == [(WARN, (0,)), (WARN, (1,))]
    assert next(each.status for each in lines("iommu=pt", None)) is INCOMPLETE


# Versions.


def software(rank: int = 0, environment: Any = None, **changed: Any) -> Observation:
    values = {
        "files": {
            "os": 'PRETTY_NAME="Ubuntu 22.04.5 LTS"',
            "driver": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.124.06  Thu",
        },
        "libraries": ["/usr/lib/x86_64-linux-gnu/libnccl.so.2.27.5"],
        "modules": ["nvidia", "nvidia_peermem"],
        "environment": {} if environment is None else environment,
        "kernel": "6.8.0",
        "python": "3.10.12",
        "libc": "glibc 2.35",
        "service_names": ["nvidia-fabricmanager", "nvidia-persistenced"],
        "tools": {
            "services": {"text": "active\nactive\n", "error": None},
            "packages": {"text": "libnccl2 2.27.5-1+cuda12.9 ii \nlibnccl-dev  un \n"},
            **changed.pop("tools", {}),
        },
        **changed,
    }
    return observed("software", values, rank)


def of_versions(*seen: Observation, machine: str | None = None) -> list[CheckResult]:
    return judged(versions.CHECK, *seen, nodes=len(seen), at=expected(machine))


def test_equal_versions_pass() -> None:
    (result,) = of_versions(software(0), software(1))
    assert result.status is PASS and isinstance(result.observed, int) and result.observed > 7


def test_a_driver_that_differs_warns_and_names_the_node() -> None:
    other = {"files": {"driver": "Kernel Module  565.57.01"}}
    (result,) = of_versions(software(0), software(1), software(2, **other))[:1]
    assert (result.metric, result.status, result.nodes, result.culprits) == (
        "driver", WARN, (2,), (),
    )  # fmt: skip


@pytest.mark.parametrize(("nodes", "culprits"), [(2, ()), (3, (1,))])
def test_a_version_that_the_stack_fixes_fails(nodes: int, culprits: tuple[int, ...]) -> None:
    """Of two that differ none is blamed."""
    other = {"libraries": ["/usr/lib/x86_64-linux-gnu/libnccl.so.2.21.5"]}
    seen = [software(rank, **(other if rank == 1 else {})) for rank in range(nodes)]
    (result,) = failed(of_versions(*seen, machine="a3-megagpu-8g"))
    assert (result.metric, result.culprits) == ("NCCL", culprits)
    assert set(result.nodes) == (set(culprits) or {0, 1})


def test_a_service_that_does_not_run_on_one_node() -> None:
    down = {"services": {"text": "inactive\nactive\n", "error": "exit code 3"}}
    (result,) = of_versions(software(0), software(1, tools=down), software(2))
    assert (result.metric, result.observed) == ("service nvidia-fabricmanager", "inactive")


def test_versions_that_the_stack_needs() -> None:
    old = {"files": {"driver": "Kernel Module  550.90.07"}}
    found = failed(of_versions(software(**old), machine="a4-highgpu-8g"))
    assert [(each.metric, each.culprits) for each in found] == [("driver", (0,))]
    # The row's version is for B200.
    assert failed(of_versions(software(**old), machine="a3-ultragpu-8g")) == []


def test_glibc_of_the_nodes() -> None:
    found = failed(of_versions(software(libc="glibc 2.31"), machine="a3-megagpu-8g"))
    assert [each.metric for each in found] == ["libc"]


def images(plugin: str, rxdm: str) -> dict[str, Any]:
    base = "us-docker.pkg.dev/gce-ai-infra/gpudirect-tcpxo"
    text = f"{base}/nccl-plugin-gpudirecttcpx-dev:v{plugin}\n{base}/tcpgpudmarxd-dev:v{rxdm}\n"
    return {"containers": {"text": text, "error": None}}


def test_plugin_and_daemon_belong_together() -> None:
    machine = "a3-megagpu-8g"
    assert failed(of_versions(software(tools=images("1.0.15", "1.0.21")), machine=machine)) == []
    (result,) = failed(of_versions(software(tools=images("1.0.15", "1.0.14")), machine=machine))
    assert (result.metric, result.expected) == ("plugin and rxdm", "1.0.21")


def test_a_version_that_is_not_visible_is_said_and_decides_nothing() -> None:
    found = of_versions(software(), machine="a3-megagpu-8g")
    unseen = [each for each in found if each.status is INCOMPLETE]
    assert [(each.metric, each.required) for each in unseen] == [("plugin and rxdm", False)]


def test_a_node_whose_software_was_not_read_does_not_pass() -> None:
    assert {each.status for each in of_versions(software(0), observed("software", {}, 1))} == {
        INCOMPLETE
    }


def test_software_of_this_host_is_read() -> None:
    values = probe_software.probe({})
    assert of_versions(observed("software", values))[0].status is PASS


# Variables.


def of_variables(
    *variables: dict[str, str], plan: dict[str, str] | None = None, machine: str | None = None
) -> list[CheckResult]:
    seen = [software(rank, each) for rank, each in enumerate(variables)]
    at = expected(machine, environment=plan or {})
    return judged(environment.CHECK, *seen, nodes=len(seen), at=at)


def test_equal_variables_pass() -> None:
    same = {"NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "1"}
    (result,) = of_variables(same, {**same, "OMP_NUM_THREADS": "2"})
    assert (result.status, result.observed) == (PASS, 1)


@pytest.mark.parametrize("odd", [0, 1])
def test_the_plan_says_which_of_two_nodes_is_right(odd: int) -> None:
    """And the blame moves with the fault."""
    nodes = [{"NCCL_DEBUG": "WARN" if rank == odd else "INFO"} for rank in range(2)]
    (result,) = of_variables(*nodes, plan={"NCCL_DEBUG": "INFO"})
    assert (result.status, result.metric, result.culprits) == (FAIL, "NCCL_DEBUG", (odd,))


def test_a_variable_of_the_plan_that_a_node_lacks() -> None:
    (result,) = of_variables({"NCCL_DEBUG": "INFO"}, {}, plan={"NCCL_DEBUG": "INFO"})
    assert (result.culprits, result.observed) == ((1,), "not set")


def test_two_nodes_that_differ_are_both_named_and_none_is_blamed() -> None:
    (result,) = of_variables({"NCCL_ALGO": "Ring"}, {})
    assert (result.status, result.nodes, result.culprits) == (FAIL, (0, 1), ())


def test_the_odd_one_of_three() -> None:
    (result,) = of_variables({}, {"NCCL_ALGO": "Ring"}, {})
    assert (result.status, result.nodes, result.culprits) == (FAIL, (1,), (1,))


def test_a_library_path_that_differs_warns() -> None:
    (result,) = of_variables({"LD_LIBRARY_PATH": "/a"}, {"LD_LIBRARY_PATH": "/b"})
    assert result.status is WARN


def test_values_that_a_shell_fills_in_are_not_compared_with_the_plan() -> None:
    plan = {"NCCL_GPUDIRECTTCPX_UNIX_CLIENT_PREFIX": "/run/tcpx-${SLURM_JOB_ID}"}
    filled = {"NCCL_GPUDIRECTTCPX_UNIX_CLIENT_PREFIX": "/run/tcpx-7"}
    assert of_variables(filled, filled, plan=plan)[0].status is PASS


@pytest.mark.parametrize(
    ("machine", "variables", "status"),
    [
        ("p5.48xlarge", {"NCCL_BUFFSIZE": "8388608"}, FAIL),
        ("a3-megagpu-8g", {"NCCL_NVLSTREE_MAX_CHUNKSIZE": "1"}, FAIL),
        ("a3-megagpu-8g", {"NCCL_NVLSTREE_MAX_CHUNKSIZE": "131072"}, PASS),
        ("a3-megagpu-8g", {"NCCL_ALGO": "Ring"}, WARN),
    ],
)
def test_variables_that_the_stack_does_not_work_with(
    machine: str, variables: dict[str, str], status: Status
) -> None:
    (result,) = of_variables(variables, machine=machine)
    assert result.status is status


def test_a_node_without_an_environment_does_not_pass() -> None:
    seen = [software(0), observed("software", None, 1, error="killed by SIGKILL")]
    results = judged(environment.CHECK, *seen, nodes=2, at=expected(None))
    assert INCOMPLETE in {each.status for each in results}
