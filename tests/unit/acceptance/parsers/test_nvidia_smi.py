from __future__ import annotations

import re
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.acceptance.host_scenarios import (
    H100,
    bus_of,
    expected,
    judged,
    observed,
    smi_links,
    smi_list,
    smi_topology,
    smi_xml,
)

from drillyard.acceptance.check import Check
from drillyard.acceptance.checks import (
    accelerator_count,
    accelerator_model,
    ecc,
    foreign_processes,
    gpu_limits,
    nvlink,
    pcie_link,
    remapped_rows,
    throttling,
    topology,
)
from drillyard.acceptance.evidence import Observation
from drillyard.acceptance.parsers.errors import NotThisOutput
from drillyard.acceptance.parsers.nvidia_smi import parse_gpus, recognise
from drillyard.acceptance.parsers.nvidia_smi_links import (
    parse_link_errors,
    parse_links,
    parse_topology,
)
from drillyard.acceptance.results import Status

GPU_CHECKS = (
    accelerator_count, accelerator_model, ecc, foreign_processes, gpu_limits, pcie_link,
    remapped_rows, throttling,
)  # fmt: skip


def recorded(text: str) -> Observation:
    seen = recognise(text)
    assert seen is not None
    return seen.model_copy(update={"source": "file.txt"})


def status(check: Check, text: str, machine: str | None = "a3-megagpu-8g") -> Status:
    results = judged(check, recorded(text), at=expected(machine))
    return max((each.status for each in results), key=list(Status).index)


# The same facts in three forms.

TEXT_GPU = """GPU {bus}
    Product Name                              : NVIDIA H100 80GB HBM3
    Persistence Mode                          : Enabled
    MIG Mode
        Current                               : Disabled
        Pending                               : Disabled
    GPU UUID                                  : GPU-0000000{at}
    GPU Recovery Action                       : None
    PCI
        Bus                                   : 0x05
        GPU Link Info
            PCIe Generation
                Max                           : 5
                Current                       : 5
            Link Width
                Max                           : 16x
                Current                       : {width}
    Clocks Event Reasons
        Idle                                  : Active
        HW Slowdown                           : Not Active
            HW Thermal Slowdown               : Not Active
            HW Power Brake Slowdown           : Not Active
        Sync Boost                            : Not Active
        SW Thermal Slowdown                   : Not Active
    FB Memory Usage
        Total                                 : 81559 MiB
        Reserved                              : 500 MiB
        Used                                  : 1 MiB
    ECC Mode
        Current                               : Enabled
    ECC Errors
        Volatile
            SRAM Correctable                  : 0
            SRAM Uncorrectable Parity         : 0
            SRAM Uncorrectable SEC-DED        : {secded}
            DRAM Correctable                  : 3
            DRAM Uncorrectable                : 0
        Aggregate
            SRAM Uncorrectable Parity         : 0
            SRAM Uncorrectable SEC-DED        : 0
            DRAM Uncorrectable                : 0
            SRAM Threshold Exceeded           : No
    Retired Pages
        Pending Page Blacklist                : N/A
    Remapped Rows
        Correctable Error                     : 0
        Uncorrectable Error                   : 0
        Pending                               : {pending}
        Remapping Failure Occurred            : No
    Temperature
        GPU Current Temp                      : 30 C
        GPU T.Limit Temp                      : 57 C
    GPU Power Readings
        Current Power Limit                   : {watts}
        Default Power Limit                   : 700.00 W
    Processes                                 : None

"""


def smi_text(gpus: int = 8, **change: str) -> str:
    values = {"width": "16x", "secded": "0", "pending": "No", "watts": "700.00 W"}
    head = f"""
==============NVSMI LOG==============

Timestamp                                 : Sat Nov 28 10:00:00 2026
Driver Version                            : 570.124.06
CUDA Version                              : 12.8

Attached GPUs                             : {gpus}
"""
    parts = [
        TEXT_GPU.format(bus=bus_of(at), at=at, **{**values, **(change if at == 2 else {})})
        for at in range(gpus)
    ]
    return head + "".join(parts)


COLUMNS = (
    "index, name, uuid, pci.bus_id, memory.total [MiB], memory.used [MiB],"
    " ecc.errors.uncorrected.volatile.total, remapped_rows.pending, remapped_rows.failure,"
    " pcie.link.width.current, pcie.link.width.max, pcie.link.gen.max"
)


def smi_csv(gpus: int = 8, header: str = COLUMNS, **change: str) -> str:
    values = {"name": H100, "total": "81559 MiB", "errors": "0", "pending": "No", "width": "16"}
    rows = [header]
    for at in range(gpus):
        of = {**values, **(change if at == 2 else {})}
        rows.append(
            f"{at}, {of['name']}, GPU-0000000{at}, {bus_of(at)}, {of['total']}, 1 MiB,"
            f" {of['errors']}, {of['pending']}, No, {of['width']}, 16, 5"
        )
    return "\n".join(rows) + "\n"


@pytest.mark.parametrize("text", [smi_xml(8), smi_text(8)])
def test_a_whole_output_passes_all_checks(text: str) -> None:
    assert {module.__name__: status(module.CHECK, text) for module in GPU_CHECKS} == dict.fromkeys(
        (module.__name__ for module in GPU_CHECKS), Status.passed
    )


@pytest.mark.parametrize(
    ("module", "change", "value"),
    [
        (pcie_link, {"width": "8x"}, 8),
        (ecc, {"secded": "1"}, 1),
        (ecc, {"secded": "1e+00"}, 1),
        (remapped_rows, {"pending": "Yes"}, "pending"),
        (gpu_limits, {"watts": "500.00 W"}, 500),
    ],
)
def test_faults_in_the_text_form(module: Any, change: dict[str, str], value: object) -> None:
    (result,) = judged(module.CHECK, recorded(smi_text(8, **change)))
    assert (result.status, result.device, result.observed) == (Status.fail, 2, value)


@pytest.mark.parametrize("value", ["N/A", "", "many", "-", "1 or 2", "0x0", "nan"])
def test_a_counter_that_is_not_a_number_does_not_pass(value: str) -> None:
    assert status(ecc.CHECK, smi_text(8, secded=value)) is Status.incomplete
    xml = smi_xml(8, {2: {"volatile_dram": value}})
    assert status(ecc.CHECK, xml) is Status.incomplete


def test_ecc_that_is_off_does_not_pass() -> None:
    off = {"current_ecc": "Disabled", "volatile_sram": "N/A", "volatile_dram": "N/A"}
    text = smi_xml(8, dict.fromkeys(range(8), off))
    assert status(ecc.CHECK, text) is Status.incomplete
    assert status(ecc.CHECK, text, None) is Status.skipped


def test_a_csv_says_what_its_columns_are() -> None:
    assert status(accelerator_count.CHECK, smi_csv()) is Status.passed
    assert status(ecc.CHECK, smi_csv()) is Status.passed
    assert status(pcie_link.CHECK, smi_csv(width="8")) is Status.fail
    assert status(ecc.CHECK, smi_csv(errors="2")) is Status.fail
    # What was not asked for is not judged.
    assert status(gpu_limits.CHECK, smi_csv()) is Status.skipped


@pytest.mark.parametrize(
    "text",
    [
        smi_csv(header=COLUMNS.replace("uuid, ", "")),
        smi_csv(header="uuid, " + COLUMNS.replace(", uuid", "")),
        smi_csv(name="81559 MiB"),
        smi_csv(total=H100),
        smi_csv().replace(", 5\n", "\n", 1),
        smi_csv()[:-30],
    ],
)
def test_shifted_columns_does_not_pass(text: str) -> None:
    for module in (accelerator_count, ecc, pcie_link):
        assert status(module.CHECK, text) is Status.incomplete


def test_a_list_counts_and_names_no_more() -> None:
    assert status(accelerator_count.CHECK, smi_list(8)) is Status.passed
    assert status(accelerator_count.CHECK, smi_list(7)) is Status.fail
    assert status(accelerator_model.CHECK, smi_list(8, "NVIDIA H200")) is Status.fail
    assert status(ecc.CHECK, smi_list(8)) is Status.skipped


def test_texts_of_other_tools_are_not_recognised() -> None:
    for text in ("", "a, b\n1, 2\n", "{}", "# nccl-tests\n", "[    1.0] Linux\n"):
        assert recognise(text) is None
    tools = [recorded(text).values for text in (smi_links(2), smi_topology(2), smi_csv(2))]
    names = [next(iter(values["tools"])) for values in tools if values]
    assert names == ["links", "topology", "query"]


def test_blank_lines_cost_no_more_than_their_number() -> None:
    begin = time.process_time()
    assert recognise("x" + "\n" * 200_000 + "y") is None
    assert time.process_time() - begin < 5


def test_older_names_of_drivers() -> None:
    text = smi_xml(1).replace("clocks_event_reason", "clocks_throttle_reason")
    text = text.replace("gpu_power_readings", "power_readings")
    text = text.replace("current_power_limit", "enforced_power_limit")
    text = re.sub(
        r"<sram_uncorrectable_parity>0</sram_uncorrectable_parity>"
        r"<sram_uncorrectable_secded>0</sram_uncorrectable_secded>",
        "<sram_uncorrectable>7</sram_uncorrectable>",
        text,
    )
    (gpu,) = parse_gpus(text).gpus
    assert gpu.number("ecc.volatile.sram") == 7
    assert gpu.flag("throttle.hw_slowdown") is False
    assert gpu.number("power.limit_w") == 700


@pytest.mark.parametrize(
    ("module", "changes"),
    [
        (accelerator_model, {"product_name": "NVIDIA H200"}),
        (accelerator_model, {"total": "40000 MiB"}),
        (accelerator_model, {"current_mig": "Enabled"}),
        (throttling, {"hw_power_brake_slowdown": "Active"}),
        (throttling, {"gpu_temp_tlimit": "-1 C"}),
        (foreign_processes, {"used": "900 MiB"}),
        (remapped_rows, {"remapped_row_failure": "Yes"}),
        (remapped_rows, {"remapped_row_unc": "512"}),
        (ecc, {"aggregate_sram": "5"}),
        (pcie_link, {"max_link_gen": "3"}),
    ],
)
def test_faults_of_a_gpu_name_it(module: Any, changes: dict[str, str]) -> None:
    (result,) = judged(module.CHECK, recorded(smi_xml(8, {5: changes})))
    assert (result.status, result.device, result.culprits) == (Status.fail, 5, (0,))
    assert result.action and result.reason.startswith("n0: GPU 5 (0000:16:00)")


def test_a_foreign_program_is_named() -> None:
    info = (
        "<process_info><pid>99</pid><type>C</type><process_name>python</process_name>"
        "<used_memory>900 MiB</used_memory></process_info>"
    )
    (result,) = judged(foreign_processes.CHECK, recorded(smi_xml(8, {1: {"processes": info}})))
    assert result.status is Status.fail and "python (99)" in result.reason


def test_a_gpu_of_an_unknown_name_does_not_pass() -> None:
    text = smi_xml(8, name="NVIDIA H100 Special")
    assert status(accelerator_model.CHECK, text) is Status.incomplete


NEEDED = {
    ecc: ("volatile_sram", "volatile_dram"),
    remapped_rows: ("remapped_row_pending",),
    pcie_link: ("current_link_width",),
    throttling: ("hw_slowdown", "sw_thermal_slowdown"),
    foreign_processes: ("used",),
    gpu_limits: ("current_power_limit",),
    accelerator_model: ("product_name",),
}


@pytest.mark.parametrize("module", NEEDED)
def test_what_is_left_out_does_not_pass(module: Any) -> None:
    text = smi_xml(8, leave_out=NEEDED[module])
    if module is remapped_rows:
        text = text.replace("<pending_retirement>N/A</pending_retirement>", "")
    assert status(module.CHECK, text) is Status.incomplete


@pytest.mark.parametrize("text", [smi_xml(2), smi_text(2)])
def test_no_cut_passes(text: str) -> None:
    whole = text.rstrip()
    for cut in range(1, len(whole) - 200, max(1, len(whole) // 40)):
        part = whole[:-cut]
        seen = recognise(part)
        if seen is None:
            continue
        for module in (accelerator_count, ecc):
            results = judged(module.CHECK, seen, at=expected("a2-highgpu-2g"))
            assert Status.passed not in {each.status for each in results}, cut


@settings(max_examples=60, deadline=None)
@given(st.integers(0, len(smi_xml(2)) - 1), st.characters(codec="ascii", exclude_characters="0"))
def test_no_changed_character_hides_an_error(at: int, character: str) -> None:
    """Of an output with errors: whatever is changed, it is not a pass, unless the error itself
    was."""
    text = smi_xml(2, {1: {"volatile_dram": "21"}})
    place = text.index(">21<") + 1
    if place <= at < place + 2:
        return
    changed = text[:at] + character + text[at + 1 :]
    seen = recognise(changed)
    if seen is None:
        return
    results = judged(ecc.CHECK, seen, at=expected("a2-highgpu-2g"))
    assert Status.passed not in {each.status for each in results}


# Links and topology.


def test_links_of_each_gpu() -> None:
    assert parse_links(smi_links(2, {1: 1}, links=2)) == {0: [26.562, 26.562], 1: [None, 26.562]}
    text = "GPU 0: L4 (UUID: GPU-1)\nNVML: Unable to ...: all links are inActive\n"
    assert parse_links(text) == {0: []}
    for broken in ("", smi_links(1).replace("Link 3", "Link 4"), smi_links(1) + "what\n"):
        with pytest.raises(NotThisOutput):
            parse_links(broken)


def test_gpus_whose_links_are_all_inactive_and_no_machine() -> None:
    (result,) = judged(
        nvlink.CHECK, recorded(smi_links(2, {0: 2, 1: 2}, links=2)), at=expected(None)
    )
    assert result.status is Status.skipped


def test_a_slow_link_and_a_gpu_that_is_not_listed() -> None:
    slow = smi_links(8).replace("26.562", "13.281", 1)
    (result,) = judged(nvlink.CHECK, recorded(slow))
    assert (result.status, result.device, result.metric) == (Status.fail, 0, "NVLink speed")
    listed = {"query": {"text": smi_xml(8), "error": None}, "links": {"text": smi_links(7)}}
    (result,) = judged(nvlink.CHECK, observed("accelerators", {"tools": listed}))
    assert result.status is Status.incomplete


def test_a_gpu_outside_the_fabric() -> None:
    text = smi_xml(8, {3: {"fabric_state": "In Progress"}})
    tools = {"query": {"text": text, "error": None}, "links": {"text": smi_links(8)}}
    (result,) = judged(nvlink.CHECK, observed("accelerators", {"tools": tools}))
    assert (result.status, result.device) == (Status.fail, 3)
    assert "fabricmanager" in result.action


def test_link_errors_are_counted_where_there_are_some() -> None:
    text = "GPU 0: H100 (UUID: GPU-1)\n\t Link 0: Replay Errors: 0\n\t Link 1: CRC Errors: 4\n"
    assert list(parse_link_errors(text)) == [(0, 1, "CRC", 4)]


def test_topology_is_read_with_colours_and_refused_when_cut() -> None:
    text = "\x1b[4m" + smi_topology(2, 1).replace("CPU Affinity", "CPU Affinity\x1b[0m")
    devices, rows, _ = parse_topology(text)
    assert devices == ["GPU0", "GPU1", "NIC0"]
    assert rows["GPU1"] == ["NV18", "X", "PIX"]
    for broken in ("", smi_topology(2, 1)[:60], smi_topology(2, 1).replace("X\tNV18", "NV18\tX")):
        with pytest.raises(NotThisOutput):
            parse_topology(broken)


def test_gpus_that_are_not_joined_by_nvlink() -> None:
    (result,) = judged(topology.CHECK, recorded(smi_topology(link="SYS")))
    assert (result.status, result.observed, result.expected) == (Status.fail, "SYS", "NV18")


@pytest.mark.parametrize(("nodes", "blamed"), [(2, []), (3, [1])])
def test_the_node_that_is_connected_otherwise(nodes: int, blamed: list[int]) -> None:
    seen = [
        recorded(smi_topology(near="NODE" if rank == 1 else "PIX")).model_copy(
            update={"nodes": (rank,)}
        )
        for rank in range(nodes)
    ]
    results = judged(topology.CHECK, *seen, nodes=nodes)
    failed = [each for each in results if each.status is Status.fail]
    assert [rank for each in failed for rank in each.culprits] == blamed
    assert {rank for each in failed for rank in each.nodes} == ({1} if blamed else {0, 1})


def test_a_group_without_a_value() -> None:
    """GPUs without row remapping show the group alone."""
    start, end = "    Remapped Rows\n", "    Temperature\n"
    text = smi_text(2)
    for _ in range(2):
        head, _, rest = text.partition(start)
        text = (
            f"{head}    Remapped Rows                             : N/A\n{end}"
            + (rest.partition(end)[2])
        )
    gpus = parse_gpus(text).gpus
    assert [gpu.has_value("remapped.failure") for gpu in gpus] == [False, False]
    assert all("remapped.failure" in gpu for gpu in gpus)
    assert status(remapped_rows.CHECK, text, "a2-highgpu-2g") is Status.incomplete
    assert status(remapped_rows.CHECK, text, None) is Status.skipped
