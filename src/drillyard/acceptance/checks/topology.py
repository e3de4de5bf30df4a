"""How GPUs and NICs of a node are connected: as on all nodes, by NVLink where there is one."""

from __future__ import annotations

import re
from collections.abc import Iterator

from drillyard.acceptance.check import Check, Expected, Level
from drillyard.acceptance.evidence import AcceptanceEvidence
from drillyard.acceptance.gpu_evidence import NodeGpus, gpus_of, not_in_file, without_gpus
from drillyard.acceptance.node_results import (
    majority,
    named,
    node_result,
)
from drillyard.acceptance.parsers.errors import NotThisOutput
from drillyard.acceptance.parsers.nvidia_smi_links import parse_topology
from drillyard.acceptance.results import CheckResult, Status

Matrix = tuple[tuple[str, ...], ...]


def judge(evidence: AcceptanceEvidence, expected: Expected) -> Iterator[CheckResult]:
    """One result per node, and one where nodes differ."""
    matrices: dict[int, Matrix] = {}
    for node in gpus_of(evidence):
        if node.lacks("topology"):
            yield not_in_file(CHECK, node)
            continue
        absent = None if node.recorded else without_gpus(CHECK, node, expected)
        if absent is not None:
            yield absent
            continue
        try:
            devices, rows, _ = parse_topology(node.text_of("topology"))
        except NotThisOutput as error:
            why = f"{node.name}: nvidia-smi topo -m: {error}"
            yield node_result(CHECK, node.rank, Status.incomplete, why, action=node.how_to_record)
            continue
        matrices[node.rank] = tuple((device, *rows[device]) for device in devices)
        yield _judge_node(node, devices, rows, expected)
    common = majority(matrices)
    if len(set(matrices.values())) > 1:
        odd = [rank for rank, matrix in matrices.items() if matrix != common]
        reason = f"{named(evidence, odd)}: GPUs and NICs are connected unlike on the other nodes"
        if common is None:
            reason = f"{named(evidence, odd)}: connect GPUs and NICs in different ways"
        for rank in odd:
            culprits = (rank,) if common is not None else ()
            yield node_result(CHECK, rank, Status.fail, reason, culprits=culprits)


def _judge_node(
    node: NodeGpus, devices: list[str], rows: dict[str, list[str]], expected: Expected
) -> CheckResult:
    gpus = [at for at, device in enumerate(devices) if device.startswith("GPU")]
    nics = [at for at, device in enumerate(devices) if not device.startswith("GPU")]
    row, machine = expected.accelerator, expected.machine
    needed = f"NV{row.gpu_links}" if machine and row and row.gpu_links else None
    for one in gpus:
        for other in gpus:
            link = rows[devices[one]][other]
            if needed is not None and one != other and link != needed:
                pair = f"{devices[one]} and {devices[other]}"
                reason = f"{node.name}: {pair} are connected by {link}; it should be {needed}"
                return node_result(
                    CHECK, node.rank, Status.fail, reason,
                    device=one, observed=link, expected=needed,
                )  # fmt: skip
    nearest = {
        devices[gpu]: ", ".join(f"{devices[nic]} {rows[devices[gpu]][nic]}" for nic in nics)
        for gpu in gpus
    }
    lines = tuple(f"{gpu}: {near}" for gpu, near in nearest.items() if near)
    kinds = sorted({re.sub(r"\d+", "", rows[devices[a]][b]) for a in gpus for b in gpus if a != b})
    reason = f"{node.name}: {len(gpus)} GPUs ({', '.join(kinds) or 'alone'}) and {len(nics)} NICs"
    return node_result(CHECK, node.rank, Status.passed, reason, evidence=lines)


CHECK = Check(
    name="topology",
    title="Connections of GPUs and NICs",
    level=Level.quick,
    probes=("accelerators",),
    seconds=1,
    measures="how GPUs are connected with each other and with NICs",
    how="nvidia-smi topo -m",
    evidence="the whole matrix of every node",
    references="NVLink between all GPUs where the accelerator's row has gpu_links; the same matrix"
    " on all nodes",
    meaning="NCCL chooses slower ways on that node, and all others wait for it",
    action="compare the node's slots, firmware and virtual machine with those of the others",
    judge=judge,
)
