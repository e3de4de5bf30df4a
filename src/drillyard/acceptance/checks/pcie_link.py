"""The PCIe link of each GPU: lanes and generation."""

from __future__ import annotations

import re
from collections.abc import Iterator

from drillyard.acceptance.check import Check, Expected, Level
from drillyard.acceptance.evidence import AcceptanceEvidence
from drillyard.acceptance.gpu_evidence import GpuFinding, NodeGpus, judge_gpus, unreadable
from drillyard.acceptance.parsers.nvidia_smi import Gpu
from drillyard.acceptance.results import CheckResult, Status, Threshold
from drillyard.hardware.facts import cited


def judge(evidence: AcceptanceEvidence, expected: Expected) -> Iterator[CheckResult]:
    """One result per GPU with a reduced link, else one per node."""
    row = expected.accelerator
    link = re.fullmatch(r"PCIe (\d+)\.\d x(\d+)", (row.host_link if row else None) or "")
    source = cited(row, "host_link") if row and link else "the GPU's own maximum, by nvidia-smi"

    def judge_gpu(gpu: Gpu, node: NodeGpus) -> GpuFinding:
        if not gpu.has_value("pcie.width"):
            return GpuFinding(Status.skipped, "they show no PCIe link")
        width, width_max = gpu.number("pcie.width"), gpu.number("pcie.width_max")
        if width is None:
            return unreadable(gpu, "pcie.width")
        needed = float(link[2]) if link else width_max
        if needed is None:
            return unreadable(gpu, "pcie.width_max")
        if width < needed:
            threshold = Threshold(needed, "lanes", True, source)
            more = {"metric": "PCIe lanes", "unit": "lanes", "threshold": threshold}
            reason = f"has a PCIe link of x{width:g}; it should be x{needed:g}"
            return GpuFinding(Status.fail, reason, width, more)
        if link is None:
            return GpuFinding(Status.passed, "")
        generation = gpu.number("pcie.generation_max")
        if generation is None:
            return unreadable(gpu, "pcie.generation_max")
        # An idle GPU lowers its generation; what link and GPU can do together stays.
        if generation < float(link[1]):
            threshold = Threshold(float(link[1]), "generation", True, source)
            more = {"metric": "PCIe generation", "threshold": threshold}
            reason = f"is in a slot of PCIe {generation:g}; it should be {link[1]}"
            return GpuFinding(Status.fail, reason, generation, more)
        return GpuFinding(Status.passed, "")

    title = row.host_link if row and link else "full PCIe width"
    return judge_gpus(
        CHECK, evidence, expected, judge_gpu, f"{title}", ("pcie.width", "pcie.width_max")
    )


CHECK = Check(
    name="pcie-link",
    title="PCIe links",
    level=Level.quick,
    probes=("accelerators",),
    seconds=1,
    measures="lanes and generation of each GPU's PCIe link",
    how="nvidia-smi -q: GPU link info",
    evidence="width and generation of every GPU",
    references="the accelerator's row (host_link); without a machine the GPU's own maximum",
    meaning="copies between host and GPU, and to the network, are slower",
    action="reseat the GPU or its riser; restart the node, and have the slot repaired",
    judge=judge,
)
