"""Accelerators of each node: as many as its machine has."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from drillyard.acceptance.check import Check, Expected, Level
from drillyard.acceptance.evidence import AcceptanceEvidence
from drillyard.acceptance.gpu_evidence import NodeGpus, gpus_of, without_gpus
from drillyard.acceptance.node_results import (
    has_gpus,
    node_result,
)
from drillyard.acceptance.parsers.errors import NotThisOutput
from drillyard.acceptance.parsers.nvidia_smi import parse_gpus, short_bus_id
from drillyard.acceptance.results import CheckResult, Status

_LOST = re.compile(
    r"device handle for GPU\s*(?:(?P<index>\d{1,3}): )?"
    r"(?P<bus>[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f])?",
    re.IGNORECASE,
)
"""What nvidia-smi complains of, also where it ends with 0 and shows the other GPUs."""
_ON_THE_BUS = re.compile(r"^(\S+) 030[02]: 10de:", re.MULTILINE)


def judge(evidence: AcceptanceEvidence, expected: Expected) -> Iterator[CheckResult]:
    """One result per node."""
    for node in gpus_of(evidence):
        yield _judge_node(node, expected)


def _judge_node(node: NodeGpus, expected: Expected) -> CheckResult:
    found = _listed(node)
    if expected.machine is None:
        return node_result(
            CHECK,
            node.rank,
            Status.skipped,
            f"{node.name}: the cluster config names no machine",
            observed=found,
        )
    if not has_gpus(expected):
        return node_result(
            CHECK, node.rank, Status.skipped, f"{node.name}: its machine has no GPUs"
        )
    needed = expected.machine.num_accelerators
    more = {"observed": found, "expected": f"{needed} GPUs", "unit": "GPUs"}
    lost = _lost(node)
    if lost or (found is not None and found != needed):
        count = needed - 1 if found is None else found
        reason = f"{node.name} has {count} of {needed} GPUs" + (f"; {lost}" if lost else "")
        return node_result(CHECK, node.rank, Status.fail, reason, **more)
    absent = without_gpus(CHECK, node, expected)
    if absent is not None:
        return absent
    if (listed := _count_of(node, "list")) not in (None, found):
        reason = f"{node.name}: nvidia-smi -q has {found} GPUs, and nvidia-smi -L {listed}"
        return node_result(CHECK, node.rank, Status.incomplete, reason, **more)
    if node.device_files not in (None, 0, needed):
        reason = (
            f"{node.name}: nvidia-smi lists {found} GPUs, and /dev has {node.device_files} of them"
        )
        return node_result(CHECK, node.rank, Status.incomplete, reason, **more)
    return node_result(
        CHECK, node.rank, Status.passed, f"{node.name} has {found} of {needed} GPUs", **more
    )


def _listed(node: NodeGpus) -> int | None:
    """GPUs that nvidia-smi lists, where one of its forms is whole."""
    if node.table is not None:
        return len(node.table.gpus)
    counts = [_count_of(node, tool) for tool in ("query", "list")]
    return next((count for count in counts if count is not None), None)


def _count_of(node: NodeGpus, tool: str) -> int | None:
    try:
        return len(parse_gpus(node.text_of(tool)).gpus)
    except NotThisOutput:
        return None


def _lost(node: NodeGpus) -> str:
    """What names a missing GPU: the driver's complaint, or an address on the PCI bus that the
    driver does not list."""
    for tool in ("query", "list"):
        answer = node.tools.get(tool)
        if not isinstance(answer, Mapping):
            continue
        said = " ".join(str(answer.get(key)) for key in ("error", "complaint", "text"))
        if found := _LOST.search(said):
            index, bus = found["index"], short_bus_id(found["bus"] or "")
            which = f"GPU {index}" if index else "a GPU"
            return f"{which}{f' at {bus}' if bus else ''} does not answer the driver"
    if node.table is None or not node.table.gpus:
        return ""
    try:
        on_bus = {
            short_bus_id(each if each.count(":") == 2 else f"0000:{each}")
            for each in _ON_THE_BUS.findall(node.text_of("pci"))
        }
    except NotThisOutput:
        return ""
    listed = {gpu.bus_id for gpu in node.table.gpus}
    missing = sorted(on_bus - listed)
    # A container sees the whole bus and the GPUs that it was given.
    if not missing or "" in listed or node.device_files == len(listed):
        return ""
    return f"the driver does not list the GPU at {', '.join(missing)}"


CHECK = Check(
    name="accelerator-count",
    title="Accelerators",
    level=Level.quick,
    probes=("accelerators",),
    seconds=1,
    measures="GPUs of each node",
    how="nvidia-smi, device files /dev/nvidia0, /dev/nvidia1, ..., and the PCI bus",
    evidence="nvidia-smi's list from every node, which device files do not contradict",
    references="the machine's row",
    meaning="a GPU is missing: off the bus, or not given to the job",
    action="restart the node; if the count stays, have it repaired",
    judge=judge,
)
