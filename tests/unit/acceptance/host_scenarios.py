"""Made-up nodes: fake `nvidia-smi`, `dcgmi`, `dmesg` and `lspci` on PATH that replay small texts,
and the observations that the probes make of them."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from drillyard.acceptance.check import Check, Expected
from drillyard.acceptance.evidence import AcceptanceEvidence, NodeIdentity, Observation
from drillyard.acceptance.node import probe_accelerators, probe_dcgm, probe_kernel_log
from drillyard.acceptance.results import CheckResult
from drillyard.hardware import load_catalog

H100 = "NVIDIA H100 80GB HBM3"


def expected(machine: str | None = "a3-megagpu-8g", **more: Any) -> Expected:
    """What a cluster config with this machine says."""
    facts = load_catalog(None)
    row = None if machine is None else facts.machine(machine)
    return Expected(
        catalog=facts,
        machine=row,
        accelerator=None if row is None else facts.accelerators[row.accelerator],
        stack=None if row is None else facts.network_stacks[row.network_stack],
        **more,
    )


def evidence(*observations: Observation, nodes: int = 1) -> AcceptanceEvidence:
    return AcceptanceEvidence(
        level="quick",
        expected_nodes=nodes,
        processes_per_node=1,
        nodes=tuple(NodeIdentity(rank=rank, name=f"n{rank}") for rank in range(nodes)),
        observations=observations,
        recorded=bool(observations) and all(each.source for each in observations),
    )


def observed(probe: str, values: dict[str, Any] | None, rank: int = 0, **more: Any) -> Observation:
    return Observation(probe=probe, scope="node", nodes=(rank,), values=values, **more)


def judged(
    check: Check, *observations: Observation, nodes: int = 1, at: Expected | None = None
) -> list[CheckResult]:
    found = list(check.judge(evidence(*observations, nodes=nodes), at or expected()))
    assert found
    return found


# The tools.


def smi_xml(
    gpus: int = 8,
    changes: Mapping[int, Mapping[str, str]] | None = None,
    *,
    name: str = H100,
    memory: int = 81559,
    attached: int | None = None,
    leave_out: Sequence[str] = (),
) -> str:
    """`nvidia-smi -q -x` of a healthy node; `changes`: other texts of a GPU, by tag."""
    parts = [
        '<?xml version="1.0" ?>\n<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">',
        "<nvidia_smi_log><driver_version>570.124.06</driver_version><cuda_version>12.8</cuda_version>",
        f"<attached_gpus>{gpus if attached is None else attached}</attached_gpus>",
    ]
    for index in range(gpus):
        parts.append(_gpu_xml(index, (changes or {}).get(index, {}), name, memory, leave_out))
    return "\n".join([*parts, "</nvidia_smi_log>\n"])


def bus_of(index: int) -> str:
    return f"00000000:{5 + 16 * (index // 4) + index % 4:02X}:00.0"


def _gpu_xml(
    index: int, changes: Mapping[str, str], name: str, memory: int, leave_out: Sequence[str]
) -> str:
    values = {
        "product_name": name,
        "persistence_mode": "Enabled",
        "current_mig": "Disabled",
        "uuid": f"GPU-0000000{index}",
        "vbios_version": "96.00.01",
        "gpu_recovery_action": "None",
        "pci_bus_id": bus_of(index),
        "max_link_gen": "5",
        "current_link_gen": "5",
        "max_link_width": "16x",
        "current_link_width": "16x",
        "hw_slowdown": "Not Active",
        "hw_thermal_slowdown": "Not Active",
        "hw_power_brake_slowdown": "Not Active",
        "sync_boost": "Not Active",
        "sw_thermal_slowdown": "Not Active",
        "total": f"{memory} MiB",
        "used": "1 MiB",
        "current_ecc": "Enabled",
        "volatile_sram": "0",
        "volatile_dram": "0",
        "aggregate_sram": "0",
        "aggregate_dram": "0",
        "remapped_row_unc": "0",
        "remapped_row_pending": "No",
        "remapped_row_failure": "No",
        "gpu_temp": "35 C",
        "gpu_temp_tlimit": "52 C",
        "current_power_limit": "700.00 W",
        "default_power_limit": "700.00 W",
        "fabric_state": "Completed",
        "processes": "",
        **changes,
    }

    def tag(tag_name: str, key: str | None = None) -> str:
        key = key or tag_name
        return "" if key in leave_out else f"<{tag_name}>{values[key]}</{tag_name}>"

    def period(title: str) -> str:
        return (
            f"<{title}>"
            + tag("sram_uncorrectable_parity", f"{title}_sram")
            + (
                ""
                if f"{title}_sram" in leave_out
                else "<sram_uncorrectable_secded>0</sram_uncorrectable_secded>"
            )
            + tag("dram_uncorrectable", f"{title}_dram")
            + f"</{title}>"
        )

    reasons = "".join(
        tag(f"clocks_event_reason_{each}", each)
        for each in (
            "hw_slowdown",
            "hw_thermal_slowdown",
            "hw_power_brake_slowdown",
            "sync_boost",
            "sw_thermal_slowdown",
        )
    )
    return (
        f'<gpu id="{bus_of(index)}">'
        + "".join(tag(each) for each in ("product_name", "persistence_mode"))
        + f"<mig_mode>{tag('current_mig')}</mig_mode>"
        + "".join(tag(each) for each in ("uuid", "vbios_version", "gpu_recovery_action"))
        + f"<pci>{tag('pci_bus_id')}<pci_gpu_link_info><pcie_gen>{tag('max_link_gen')}"
        + f"{tag('current_link_gen')}</pcie_gen><link_widths>{tag('max_link_width')}"
        + f"{tag('current_link_width')}</link_widths></pci_gpu_link_info></pci>"
        + f"<clocks_event_reasons>{reasons}</clocks_event_reasons>"
        + f"<fb_memory_usage>{tag('total')}{tag('used')}</fb_memory_usage>"
        + f"<ecc_mode>{tag('current_ecc')}</ecc_mode>"
        + f"<ecc_errors>{period('volatile')}{period('aggregate')}</ecc_errors>"
        + "<retired_pages><pending_retirement>N/A</pending_retirement></retired_pages>"
        + f"<remapped_rows>{tag('remapped_row_unc')}{tag('remapped_row_pending')}"
        + f"{tag('remapped_row_failure')}</remapped_rows>"
        + f"<temperature>{tag('gpu_temp')}{tag('gpu_temp_tlimit')}</temperature>"
        + f"<gpu_power_readings>{tag('current_power_limit')}{tag('default_power_limit')}"
        + f"</gpu_power_readings><fabric><state>{values['fabric_state']}</state></fabric>"
        + f"<processes>{values['processes']}</processes></gpu>"
    )


def smi_list(gpus: int = 8, name: str = H100) -> str:
    return "".join(f"GPU {at}: {name} (UUID: GPU-0000000{at})\n" for at in range(gpus))


def smi_links(gpus: int = 8, down: Mapping[int, int] | None = None, links: int = 18) -> str:
    lines = []
    for gpu in range(gpus):
        lines.append(f"GPU {gpu}: {H100} (UUID: GPU-0000000{gpu})")
        lost = (down or {}).get(gpu, 0)
        for link in range(links):
            lines.append(f"\t Link {link}: {'<inactive>' if link < lost else '26.562 GB/s'}")
    return "\n".join(lines) + "\n"


def smi_topology(gpus: int = 8, nics: int = 2, link: str = "NV18", near: str = "PIX") -> str:
    names = [*(f"GPU{at}" for at in range(gpus)), *(f"NIC{at}" for at in range(nics))]
    lines = ["\t" + "\t".join([*names, "CPU Affinity", "NUMA Affinity"])]
    for row in names:
        cells = []
        for column in names:
            both = row[:3], column[:3]
            cells.append("X" if row == column else link if both == ("GPU", "GPU") else near)
        lines.append("\t".join([row, *cells, *(["0-51", "0"] if row.startswith("GPU") else [])]))
    return "\n".join([*lines, "", "Legend:", "", "  X    = Self", ""])


def lspci(gpus: int = 8) -> str:
    return "".join(f"{bus_of(at)[9:].lower()} 0302: 10de:2330 (rev a1)\n" for at in range(gpus))


class FakeTools:
    """A directory of PATH with tools that replay texts."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.directory = directory / "bin"
        self.directory.mkdir()
        monkeypatch.setenv("PATH", f"{self.directory}:/usr/bin:/bin")
        self._answers: dict[str, list[str]] = {}

    def add(
        self, command: str, text: str = "", *, code: int = 0, error: str = "", hangs: bool = False
    ) -> None:
        """The tool's answer to a command line."""
        name, *words = shlex.split(command)
        answers = self._answers.setdefault(name, [])
        file = self.directory / f"{name}.{len(answers)}.txt"
        file.write_text(text, encoding="utf-8")
        does = f"echo {shlex.quote(error)} >&2; " if error else ""
        does += "sleep 60; " if hangs else f"cat {shlex.quote(str(file))}; "
        answers.append(f"{shlex.quote(' '.join(words))}) {does}exit {code};;")
        script = self.directory / name
        script.write_text(
            '#!/bin/sh\ncase "$*" in\n' + "\n".join(reversed(answers)) + "\n*) exit 9;; esac\n",
            encoding="utf-8",
        )
        script.chmod(0o755)

    def gpus(self, count: int = 8, xml: str | None = None, **links: Any) -> None:
        """A node of so many GPUs, healthy but for what `xml` says."""
        self.add("nvidia-smi -q -x", smi_xml(count) if xml is None else xml)
        self.add("nvidia-smi -L", smi_list(count))
        self.add("nvidia-smi nvlink -s", smi_links(count, **links))
        self.add("nvidia-smi nvlink -e", "")
        self.add("nvidia-smi topo -m", smi_topology(count))
        self.add("lspci -n -d 10de:", lspci(count))

    def accelerators(self, rank: int = 0, seconds: float = 10.0) -> Observation:
        """What the probe makes of them."""
        return observed("accelerators", probe_accelerators.probe({"seconds": seconds}), rank)

    def dcgm(self, seconds: float = 10.0) -> Observation:
        return observed("dcgm", probe_dcgm.probe({"run": 1, "seconds": seconds}))

    def kernel_log(self, text: str, rank: int = 0) -> Observation:
        self.add("dmesg", text)
        return observed("kernel_log", probe_kernel_log.probe({}), rank)


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeTools:
    return FakeTools(tmp_path, monkeypatch)


# DCGM's documents.


def dcgm_4(
    gpus: int = 8,
    *,
    status: str = "Fail",
    gpu: int | None = None,
    severity: int | None = None,
    version: str = "4.2.3",
    summary: dict[str, Any] | None = None,
) -> str:
    """A report of DCGM 4 in which one test of one GPU is as given; None: all pass."""
    results: list[dict[str, Any]] = []
    for each in range(gpus):
        result: dict[str, Any] = {"entity_group": "GPU", "entity_group_id": 1, "entity_id": each}
        result["status"] = status if each == gpu else "Pass"
        if each == gpu and severity is not None:
            warning = {"warning": "made up", "error_id": 1, "error_category": 1}
            result["warnings"] = [{**warning, "error_severity": severity}]
        results.append(result)
    worst = "Pass" if gpu is None else status
    test = {"name": "memory", "results": results, "test_summary": summary or {"status": worst}}
    body = {"test_categories": [{"category": "Hardware", "tests": [test]}]}
    return json.dumps({"DCGM Diagnostic": body, "metadata": {"version": version}})


def dcgm_3(
    gpus: int = 8, *, status: str = "Fail", gpu: int | None = None, severity: int | None = None
) -> str:
    """The same of DCGM 3."""
    results: list[dict[str, Any]] = []
    for each in range(gpus):
        result: dict[str, Any] = {"gpu_id": str(each), "info": ["made up"]}
        result["status"] = status if each == gpu else "Pass"
        if each == gpu and severity is not None:
            result["warnings"] = [{"warning": "made up", "error_id": 1, "error_severity": severity}]
        results.append(result)
    body = {
        "test_categories": [
            {"category": "Hardware", "tests": [{"name": "Memory", "results": results}]}
        ]
    }
    return json.dumps({"DCGM GPU Diagnostic": {**body, "version": "3.3.5"}})
