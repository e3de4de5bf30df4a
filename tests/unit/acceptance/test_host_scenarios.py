"""Nodes with fake tools on PATH: probe, parser, check and verdict together."""

from __future__ import annotations

import time

import pytest
from tests.unit.acceptance.host_scenarios import (
    FakeTools,
    bus_of,
    dcgm_3,
    dcgm_4,
    evidence,
    expected,
    judged,
    lspci,
    observed,
    smi_links,
    smi_list,
    smi_topology,
    smi_xml,
    tools,
)

from drillyard.acceptance.checks import (
    accelerator_count,
    dcgm,
    ecc,
    gpu_recovery,
    nvlink,
    pcie_link,
    remapped_rows,
    topology,
    xids,
)
from drillyard.acceptance.judgement import judge
from drillyard.acceptance.results import CheckResult, Status

__all__ = ["tools"]
OF_GPUS = [
    "accelerator-count", "accelerator-model", "gpu-recovery", "xids", "ecc", "remapped-rows",
    "throttling", "gpu-limits", "pcie-link", "nvlink", "topology", "foreign-processes",
    "kernel-log", "dcgm",
]  # fmt: skip
FAIL, PASS, INCOMPLETE = Status.fail, Status.passed, Status.incomplete


def only(results: list[CheckResult]) -> CheckResult:
    (result,) = results
    return result


def test_7_of_8_gpus_name_the_node_and_the_lost_gpu(tools: FakeTools) -> None:
    tools.gpus(7)
    tools.add("lspci -n -d 10de:", lspci(8))
    result = only(judged(accelerator_count.CHECK, tools.accelerators()))
    assert (result.status, result.culprits, result.observed) == (FAIL, (0,), 7)
    assert "n0" in result.reason and "0000:18:00" in result.reason and result.action


def test_a_gpu_that_is_lost_is_named_by_the_driver(tools: FakeTools) -> None:
    lost = "Unable to determine the device handle for GPU0000:06:00.0: GPU is lost."
    tools.add("nvidia-smi -q -x", "", code=15, error=lost)
    tools.add("nvidia-smi -L", smi_list(7), code=15, error=lost)
    result = only(judged(accelerator_count.CHECK, tools.accelerators()))
    assert (result.status, result.culprits) == (FAIL, (0,))
    assert "0000:06:00" in result.reason


def test_a_machine_of_4_gpus_passes_with_4(tools: FakeTools) -> None:
    """A check that compares with 8 whatever the machine marks every one of them as broken."""
    tools.gpus(4)
    seen = tools.accelerators()
    four = expected("a3-highgpu-4g")
    found = only(judged(accelerator_count.CHECK, seen, at=four))
    assert (found.status, found.observed) == (PASS, 4)
    results = judge(evidence(seen), four).results
    wrong = [each for each in results if each.status in (FAIL, Status.warn)]
    assert not wrong


def test_a_healthy_node_passes_every_check_of_gpus(tools: FakeTools) -> None:
    tools.gpus(8)
    tools.add("dcgmi diag -r 1 -j", dcgm_4(8))
    log = tools.kernel_log("[    1.000000] NVRM: loading NVIDIA UNIX x86_64 Kernel Module\n")
    found = judge(evidence(tools.accelerators(), tools.dcgm(), log), expected()).results
    by_name = {each.check: each.status for each in found}
    assert {name: by_name[name] for name in OF_GPUS} == dict.fromkeys(OF_GPUS, PASS)


def test_xid_79_is_the_nodes_and_says_restart(tools: FakeTools) -> None:
    tools.gpus(8)
    line = (
        "[ 4242.100000] NVRM: Xid (PCI:0000:06:00): 79, pid='<unknown>', name=<unknown>,"
        " GPU has fallen off the bus."
    )
    result = only(judged(xids.CHECK, tools.accelerators(), tools.kernel_log(line)))
    assert (result.status, result.culprits, result.device) == (FAIL, (0,), 1)
    assert "RESTART_BM" in result.action and "0000:06:00" in result.reason
    assert line.partition("] ")[2] in result.evidence


def test_xid_31_is_the_applications(tools: FakeTools) -> None:
    tools.gpus(8)
    line = "[ 4242.100000] NVRM: Xid (PCI:0000:06:00): 31, pid=7, name=python, Ch 00000008"
    recorded, passed = judged(xids.CHECK, tools.accelerators(), tools.kernel_log(line))
    assert (recorded.status, recorded.culprits, recorded.device) == (Status.recorded, (), 1)
    assert "RESTART_APP" in recorded.action and not recorded.required
    assert passed.status is PASS


SEVERITIES = {0: FAIL, 1: Status.warn, 2: FAIL, 3: FAIL, 4: FAIL, 5: FAIL, 6: FAIL}


@pytest.mark.parametrize("document", [dcgm_3, dcgm_4])
@pytest.mark.parametrize("severity", range(7))
def test_dcgm_at_each_severity(tools: FakeTools, document: object, severity: int) -> None:
    tools.gpus(8)
    assert callable(document)
    tools.add("dcgmi diag -r 1 -j", document(8, gpu=5, severity=severity), code=205)
    result = only(judged(dcgm.CHECK, tools.accelerators(), tools.dcgm()))
    assert (result.status, result.device) == (SEVERITIES[severity], 5)
    assert result.culprits == ((0,) if result.status is FAIL else ())
    assert result.action
    names = ["NONE", "MONITOR", "ISOLATE", "UNKNOWN", "TRIAGE", "CONFIG", "RESET"]
    assert result.observed == names[severity]


@pytest.mark.parametrize("severity", [2, 4, 5, 6])
def test_a_pass_of_dcgm_beside_a_severe_warning_is_a_failure(
    tools: FakeTools, severity: int
) -> None:
    tools.add("dcgmi diag -r 1 -j", dcgm_4(8, gpu=0, status="Pass", severity=severity))
    assert only(judged(dcgm.CHECK, tools.dcgm())).status is FAIL


def test_a_row_that_waits_for_a_reset(tools: FakeTools) -> None:
    tools.gpus(8, smi_xml(8, {3: {"remapped_row_pending": "Yes"}}))
    result = only(judged(remapped_rows.CHECK, tools.accelerators()))
    assert (result.status, result.device, result.culprits) == (FAIL, 3, (0,))
    assert "reset" in result.action


def test_uncorrected_memory_errors_name_the_gpu(tools: FakeTools) -> None:
    tools.gpus(8, smi_xml(8, {6: {"volatile_dram": "2"}}))
    result = only(judged(ecc.CHECK, tools.accelerators()))
    assert (result.status, result.device, result.observed) == (FAIL, 6, 2)


def test_a_link_of_8_lanes(tools: FakeTools) -> None:
    tools.gpus(8, smi_xml(8, {2: {"current_link_width": "8x", "max_link_width": "8x"}}))
    result = only(judged(pcie_link.CHECK, tools.accelerators()))
    assert (result.status, result.device, result.observed) == (FAIL, 2, 8)
    assert result.threshold is not None and result.threshold.value == 16


def test_a_tool_that_hangs_leaves_the_others(tools: FakeTools) -> None:
    tools.gpus(8)
    tools.add("nvidia-smi topo -m", hangs=True)
    began = time.monotonic()
    seen = tools.accelerators(seconds=0.5)
    assert time.monotonic() - began < 20
    assert only(judged(accelerator_count.CHECK, seen)).status is PASS
    hung = only(judged(topology.CHECK, seen))
    assert hung.status is INCOMPLETE and "did not end" in hung.reason


def test_nvidia_smi_that_hangs_is_incomplete_and_says_so(tools: FakeTools) -> None:
    tools.add("nvidia-smi -q -x", hangs=True)
    tools.add("nvidia-smi -L", hangs=True)
    result = only(judged(accelerator_count.CHECK, tools.accelerators(seconds=0.3)))
    assert result.status is INCOMPLETE and "did not end" in result.reason


def test_an_exit_code_under_a_good_table_does_not_pass(tools: FakeTools) -> None:
    """As of a checker that is called with `|| true`."""
    tools.add("nvidia-smi -q -x", smi_xml(8), code=14)
    tools.add("nvidia-smi -L", smi_list(8))
    tools.add("dcgmi diag -r 1 -j", dcgm_4(8), code=1)
    seen = tools.accelerators()
    for check in (accelerator_count.CHECK, ecc.CHECK, pcie_link.CHECK):
        result = only(judged(check, seen))
        assert result.status is INCOMPLETE and "exit code 14" in result.reason
    assert only(judged(dcgm.CHECK, tools.dcgm())).status is INCOMPLETE


@pytest.mark.parametrize("version", ["5.0.0", "2", "unknown", "3.3.5"])
def test_dcgm_of_an_unknown_version(tools: FakeTools, version: str) -> None:
    tools.add("dcgmi diag -r 1 -j", dcgm_4(8, version=version))
    assert only(judged(dcgm.CHECK, tools.dcgm())).status is INCOMPLETE


@pytest.mark.parametrize(
    "text",
    [
        "",
        smi_xml(8)[:4000],
        smi_xml(8).rpartition("</nvidia_smi_log>")[0],
        smi_xml(7, attached=8),
        "Failed to initialize NVML: Driver/library version mismatch\n",
        "<html><body>404</body></html>",
    ],
)
def test_a_text_that_is_not_whole_never_passes(tools: FakeTools, text: str) -> None:
    tools.add("nvidia-smi -q -x", text)
    tools.add("nvidia-smi -L", text)
    tools.add("nvidia-smi nvlink -s", smi_links()[:300])
    tools.add("nvidia-smi topo -m", smi_topology()[:200])
    results = judge(evidence(tools.accelerators()), expected()).results
    of_gpus = [each for each in results if each.check in ("accelerator-count", "ecc", "topology")]
    assert {each.status for each in of_gpus} == {INCOMPLETE}


def test_links_that_are_down_name_the_gpu(tools: FakeTools) -> None:
    tools.gpus(8, down={4: 2})
    result = only(judged(nvlink.CHECK, tools.accelerators()))
    assert (result.status, result.device, result.observed) == (FAIL, 4, 16)


def test_the_drivers_own_recovery_action(tools: FakeTools) -> None:
    tools.gpus(8, smi_xml(8, {7: {"gpu_recovery_action": "Reboot"}}))
    result = only(judged(gpu_recovery.CHECK, tools.accelerators()))
    assert (result.status, result.device) == (FAIL, 7)
    assert "restart" in result.action


def test_without_tools_it_is_skipped_and_with_a_machine_incomplete(tools: FakeTools) -> None:
    seen = tools.accelerators()
    for check in (accelerator_count.CHECK, ecc.CHECK, nvlink.CHECK, topology.CHECK):
        assert only(judged(check, seen, at=expected(None))).status is Status.skipped
        assert only(judged(check, seen)).status is INCOMPLETE
    assert only(judged(dcgm.CHECK, tools.dcgm())).status is Status.skipped


def test_a_node_that_was_not_observed_does_not_pass(tools: FakeTools) -> None:
    """A loop over what was found judges nothing where nothing was found."""
    tools.gpus(8)
    results = judged(accelerator_count.CHECK, tools.accelerators(), nodes=2)
    assert [each.status for each in results] == [PASS, INCOMPLETE]


def test_a_probe_that_failed_does_not_pass() -> None:
    """A runner that ends with `except Exception: sys.exit(0)` passes what it did not look at."""
    seen = observed("accelerators", None, error="exit code 1: FileNotFoundError")
    result = only(judged(ecc.CHECK, seen))
    assert result.status is INCOMPLETE and "FileNotFoundError" in result.reason


def test_bus_addresses_of_the_samples() -> None:
    assert [bus_of(at) for at in (0, 1, 7)] == [
        "00000000:05:00.0",
        "00000000:06:00.0",
        "00000000:18:00.0",
    ]


@pytest.mark.parametrize(
    ("complaint", "named"),
    [
        ("Unable to determine the device handle for GPU3: 0000:08:00.0: Unknown Error", "GPU 3"),
        ("Unable to determine the device handle for GPU0000:08:00.0: Unknown Error", "0000:08:00"),
        ("Unable to determine the device handle for GPU 0000:08:00.0: Not Found", "0000:08:00"),
        ("Unable to determine the device handle for GPU3: Unknown Error", "GPU 3"),
    ],
)
def test_a_lost_gpu_beside_exit_code_0(tools: FakeTools, complaint: str, named: str) -> None:
    tools.gpus(8)
    tools.add("nvidia-smi -q -x", smi_xml(7), error=complaint)
    result = only(judged(accelerator_count.CHECK, tools.accelerators()))
    assert (result.status, result.culprits) == (FAIL, (0,)) and named in result.reason
    tools.add("nvidia-smi -q -x", complaint + "\n" + smi_xml(7, attached=8))
    result = only(judged(accelerator_count.CHECK, tools.accelerators()))
    assert result.status is FAIL and named in result.reason


def test_a_list_that_contradicts_the_query_does_not_pass(tools: FakeTools) -> None:
    tools.gpus(8)
    tools.add("nvidia-smi -L", smi_list(7))
    assert only(judged(accelerator_count.CHECK, tools.accelerators())).status is INCOMPLETE
