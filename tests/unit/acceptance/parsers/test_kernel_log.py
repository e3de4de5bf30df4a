from __future__ import annotations

import pytest
from tests.unit.acceptance.host_scenarios import expected, judged, observed

from drillyard.acceptance.checks import kernel_log as check
from drillyard.acceptance.checks import xids
from drillyard.acceptance.parsers.kernel_log import host_events, parsed_lines, recognise, xid_events
from drillyard.acceptance.results import Status

HARMLESS = [
    "NCCL INFO NCCL_IB_TIMEOUT set by environment to 23.",
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC=600",
    "no Xid errors found",
    "ECC uncorrectable errors: 0",
    "nvidia-nvswitch: SXid reporting enabled",
    "NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  570.124.06",
    "pods0: port 2(veth) entered disabled state",
    "Buffer I/O error on dev loop1, logical block 2329, lost async page write",
    "EXT4-fs (loop1): Remounting filesystem read-only",
    "nfs: server files not responding, still trying\n[   20.000000] nfs: server files OK",
]


def log(*lines: str, second: float = 10.0, **more: object) -> dict[str, object]:
    texts = [f"[{second:12.6f}] {line}" for line in lines]
    every = "\n".join(texts).splitlines()
    return {
        "source": "dmesg", "lines": every, "total_lines": max(1, len(every)), "first_second": 0.0,
        "now": 1_700_000_000.0, "uptime": 1000.0, **more,
    }  # fmt: skip


@pytest.mark.parametrize("line", HARMLESS)
def test_words_do_not_match(line: str) -> None:
    lines = parsed_lines(log(line)["lines"])  # type: ignore[arg-type]
    assert list(xid_events(lines)) == []
    assert [rule.name for rule, _, counts in host_events(lines, 1000.0) if counts] == []


FAULTS = {
    "soft-lockup": "watchdog: BUG: soft lockup - CPU#7 stuck for 22s! [python:99]",
    "hung-task": "INFO: task python:4242 blocked for more than 120 seconds.",
    "io-error": "I/O error, dev nvme3n1, sector 2048 op 0x0:(READ)",
    "nvme-timeout": "nvme nvme2: I/O 17 (I/O Cmd) QID 4 timeout, reset controller",
    "read-only": "EXT4-fs (nvme0n1p1): Remounting filesystem read-only",
    "raid": "md/raid10:md0: Disk failure on nvme1n1, disabling device.",
    "memory-error": "EDAC MC0: 1 UE memory read error on CPU_SrcID#0",
    "slot-power": "mlx5_core 0000:86:00.0: Detected insufficient power on the PCIe slot (27W).",
    "port-temperature": "mlx5_core 0000:86:00.0: Port module event[error]: module 0, Cable error,"
    " High Temperature",
    "nfs": "nfs: server files not responding, timed out",
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_of_the_host_name_the_node(name: str) -> None:
    seen = observed("kernel_log", log(FAULTS[name]))
    (result,) = judged(check.CHECK, seen)
    assert (result.status, result.metric, result.culprits) == (Status.fail, name, (0,))
    assert result.action and result.evidence


def test_faults_of_another_day_are_reported_alone() -> None:
    seen = observed("kernel_log", log(FAULTS["hung-task"], uptime=200_000.0))
    recorded, passed = judged(check.CHECK, seen)
    assert (recorded.status, recorded.required) == (Status.recorded, False)
    assert passed.status is Status.passed


@pytest.mark.parametrize(("flaps", "status"), [(4, Status.recorded), (5, Status.fail)])
def test_a_link_that_comes_and_goes(flaps: int, status: Status) -> None:
    lines = ["mlx5_core 0000:86:00.0 eth4: Link is Down"] * flaps
    assert judged(check.CHECK, observed("kernel_log", log(*lines)))[0].status is status


def test_a_job_that_ran_out_of_memory_is_not_the_nodes_fault() -> None:
    line = "Memory cgroup out of memory: Killed process 7 (python) total-vm:1kB"
    recorded, passed = judged(check.CHECK, observed("kernel_log", log(line)))
    assert (recorded.status, passed.status) == (Status.recorded, Status.passed)


def test_a_log_that_cannot_be_read_does_not_pass() -> None:
    refused = {"source": None, "lines": [], "tried": {"dmesg": "Operation not permitted"}}
    seen = observed("kernel_log", refused)
    for each in (check.CHECK, xids.CHECK):
        (result,) = judged(each, seen)
        assert result.status is Status.incomplete and "not permitted" in result.reason
        (result,) = judged(each, seen, at=expected(None))
        assert result.status is Status.skipped


@pytest.mark.parametrize("broken", [{"lines": None}, {"total_lines": 0}, {"lines": [1]}])
def test_a_log_that_contradicts_itself_does_not_pass(broken: dict[str, object]) -> None:
    seen = observed("kernel_log", log("made up", **broken))
    assert judged(check.CHECK, seen)[0].status is Status.incomplete


# Xids.


def xid(text: str, **more: object) -> list[tuple[Status, str]]:
    results = judged(xids.CHECK, observed("kernel_log", log(text)), **more)  # type: ignore[arg-type]
    return [(each.status, each.action.partition(":")[0]) for each in results]


@pytest.mark.parametrize("number", [13, 31, 43, 45, 94])
def test_xids_of_applications_blame_nobody(number: int) -> None:
    (status, _), last = xid(f"NVRM: Xid (PCI:0000:05:00): {number}, pid=7, made up")
    assert (status, last) == (Status.recorded, (Status.passed, ""))


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("NVRM: Xid (PCI:0000:05:00): 48, pid=7, DBE", "RESET_GPU"),
        ("NVRM: Xid (PCI:0000:05:00): 54, made up", "CHECK_MECHANICALS"),
        ("NVRM: Xid (PCI:0000:05:00): 119, Timeout waiting for RPC from GSP", "RESET_GPU"),
        ("NVRM: Xid (PCI:0000:05:00): 151, made up", "RESTART_VM"),
        (
            "NVRM: Xid (PCI:0000:05:00): 154, GPU recovery action changed from 0x0 (None) to 0x2"
            " (Node Reboot Required)",
            "RESTART_BM",
        ),
        ("NVRM: Xid (PCI:0000:05:00): 149, NETIR_LINK_EVT Fatal Link 08", "RESET_GPU"),
        ("nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 20034, Fatal, Link 30 LTSSM", "RESTART_BM"),
        ("NVRM: Xid (0000:05:00): 79, an old driver's form", "RESTART_BM"),
    ],
)
def test_xids_of_the_node_say_what_to_do(text: str, action: str) -> None:
    assert xid(text) == [(Status.fail, action)]


@pytest.mark.parametrize(
    "text",
    [
        "NVRM: Xid (PCI:0000:05:00): 154, GPU recovery action changed from 0x1 (GPU Reset"
        " Required) to 0x0 (None)",
        "NVRM: Xid (PCI:0000:05:00): 149, NETIR_LINK_EVT Nonfatal Link 08",
        "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 28006, Non-fatal, Link 46 MC TS",
        "NVRM: Xid (PCI:0000:05:00): 63, Row Remapper: New row marked for remapping",
    ],
)
def test_xids_that_are_information(text: str) -> None:
    assert [status for status, _ in xid(text)] == [Status.recorded, Status.passed]


def test_an_xid_that_is_not_known_does_not_pass() -> None:
    assert [status for status, _ in xid("NVRM: Xid (PCI:0000:05:00): 999, new")] == [
        Status.incomplete
    ]


def test_a_row_that_was_not_remapped_needs_a_restart_on_a100() -> None:
    text = "NVRM: Xid (PCI:0000:05:00): 64, made up"
    assert xid(text) == [(Status.fail, "RESET_GPU")]
    assert xid(text, at=expected("a2-ultragpu-8g")) == [(Status.fail, "RESTART_BM")]


def test_the_time_of_an_xid() -> None:
    (result,) = judged(
        xids.CHECK, observed("kernel_log", log("NVRM: Xid (PCI:0000:05:00): 79, x", second=500.0))
    )
    assert "2023-11-14 22:05:00 UTC" in result.reason


def test_forms_of_lines() -> None:
    forms = [
        "[    5.140900] NVRM: Xid (PCI:0000:05:00): 79, x",
        "<3>[5.140900] NVRM: Xid (PCI:0000:05:00): 79, x",
        "[    5.140900] host kernel: NVRM: Xid (PCI:0000:05:00): 79, x",
        "NVRM: Xid (PCI:0000:05:00): 79, x",
    ]
    events = list(xid_events(parsed_lines(forms)))
    assert [event.number for event in events] == [79] * 4
    assert [event.second for event in events] == [5.1409, 5.1409, 5.1409, None]


def test_logs_are_recognised() -> None:
    seen = recognise(
        "[    1.000000] Linux version 6.8\n[    5.140900] NVRM: Xid (PCI:0000:05:00): 79, x"
    )
    assert seen is not None and judged(xids.CHECK, seen)[0].status is Status.fail
    assert recognise("GPU 0: NVIDIA H100") is None


@pytest.mark.parametrize(
    "stamp",
    [
        "[Wed Jun 12 07:58:43 2024] ",
        "Nov  8 10:00:00 node7 kernel: ",
        "2026-11-28T10:00:00.123456+00:00 node7 kernel: ",
        "Nov 28 10:00:00 node7 kernel: [ 5140.900000] ",
    ],
)
def test_logs_with_dates_are_recognised(stamp: str) -> None:
    seen = recognise(f"{stamp}NVRM: Xid (PCI:0000:05:00): 79, x\n")
    assert seen is not None
    (result,) = judged(xids.CHECK, seen)
    assert result.status is Status.fail and stamp.strip() in result.evidence[0]
