"""NVLink of each GPU: links that are up, their speed, and whether the GPU has joined the fabric."""

from __future__ import annotations

from collections.abc import Iterator

from drillyard.acceptance.check import Check, Expected, Level
from drillyard.acceptance.evidence import AcceptanceEvidence
from drillyard.acceptance.gpu_evidence import NodeGpus, gpus_of, not_in_file, without_gpus
from drillyard.acceptance.node_results import node_result
from drillyard.acceptance.parsers.errors import NotThisOutput
from drillyard.acceptance.parsers.nvidia_smi_links import parse_link_errors, parse_links
from drillyard.acceptance.results import CheckResult, Status, Threshold
from drillyard.hardware.facts import cited

_FABRIC = "restart the fabric manager (systemctl restart nvidia-fabricmanager), then the node"
_SAME_SPEED = 0.99
"""Of the row's speed: nvidia-smi prints rounded figures."""


def judge(evidence: AcceptanceEvidence, expected: Expected) -> Iterator[CheckResult]:
    """One result per GPU with fewer links or outside the fabric, else one per node."""
    for node in gpus_of(evidence):
        if node.lacks("links") and node.lacks("query"):
            yield not_in_file(CHECK, node)
            continue
        absent = None if node.recorded else without_gpus(CHECK, node, expected)
        if absent is not None:
            yield absent
        else:
            yield from _judge_node(node, expected)


def _judge_node(node: NodeGpus, expected: Expected) -> Iterator[CheckResult]:
    gpus = node.table.gpus if node.table is not None else ()
    outside = [gpu for gpu in gpus if gpu.has_value("fabric.state")]
    outside = [gpu for gpu in outside if gpu.texts["fabric.state"] != "Completed"]
    for gpu in outside:
        state = gpu.texts["fabric.state"]
        reason = f"{node.name}: {gpu.title} has not joined the NVLink fabric: {state}"
        yield node_result(
            CHECK, node.rank, Status.fail, reason,
            metric="fabric", device=gpu.index, observed=state, action=_FABRIC,
        )  # fmt: skip
    row, machine = expected.accelerator, expected.machine
    if machine is not None and (row is None or row.gpu_links is None):
        title = row.title if row else machine.name
        why = f"{node.name}: the number of NVLinks of {title} is not known"
        yield node_result(CHECK, node.rank, Status.skipped, why)
        return
    if machine is not None and machine.num_accelerators == 1:
        why = f"{node.name}: has one GPU: no NVLinks to check"
        yield node_result(CHECK, node.rank, Status.skipped, why)
        return
    if node.lacks("links"):
        yield not_in_file(CHECK, node)
        return
    try:
        links = parse_links(node.text_of("links"))
    except NotThisOutput as error:
        # Without a machine it is not known whether there should be any.
        status = Status.skipped if machine is None else Status.incomplete
        reason = f"{node.name}: NVLinks were not read: {error}"
        yield node_result(CHECK, node.rank, status, reason, action=node.how_to_record)
        return
    if machine is None and not any(speed for speeds in links.values() for speed in speeds):
        yield node_result(CHECK, node.rank, Status.skipped, f"{node.name}: has no NVLinks")
        return
    yield from _errors(node)
    yield from _judge_links(node, links, expected, bool(outside))


def _judge_links(
    node: NodeGpus, links: dict[int, list[float | None]], expected: Expected, failed: bool
) -> Iterator[CheckResult]:
    row = expected.accelerator
    gpus = node.table.gpus if node.table is not None else ()
    active = {
        gpu: [speed for speed in speeds if speed is not None] for gpu, speeds in links.items()
    }
    if expected.machine is not None and row is not None and row.gpu_links is not None:
        needed, source = row.gpu_links, cited(row, "gpu_links")
        least = _SAME_SPEED * (row.gpu_link_gb_per_s or 0.0) / 2 / row.gpu_links
    else:
        needed, source = max(len(each) for each in active.values()), "the other GPUs of the node"
        least = 0.0
    for gpu, speeds in active.items():
        common = {"device": gpu, "observed": len(speeds), "unit": "links"}
        if len(speeds) < needed:
            failed = True
            threshold = Threshold(needed, "links", True, source)
            reason = f"{node.name}: GPU {gpu} has {len(speeds)} of {needed} NVLinks up"
            yield node_result(CHECK, node.rank, Status.fail, reason, threshold=threshold, **common)
        elif speeds and min(speeds) < least:
            failed = True
            reason = f"{node.name}: an NVLink of GPU {gpu} runs at {min(speeds):g} GB/s"
            threshold = Threshold(least, "GB/s", True, source)
            yield node_result(
                CHECK, node.rank, Status.fail, reason,
                metric="NVLink speed", device=gpu, observed=min(speeds), unit="GB/s",
                threshold=threshold,
            )  # fmt: skip
    if unseen := [gpu.title for gpu in gpus if gpu.index not in links]:
        reason = f"{node.name}: NVLinks of {', '.join(unseen)} were not listed"
        yield node_result(CHECK, node.rank, Status.incomplete, reason)
    elif not failed:
        reason = f"{node.name}: {needed} NVLinks are up on all {len(links)} GPUs"
        yield node_result(CHECK, node.rank, Status.passed, reason, observed=needed, unit="links")


def _errors(node: NodeGpus) -> Iterator[CheckResult]:
    """Error counters: they count since the driver was loaded, so they are only reported."""
    try:
        found = list(parse_link_errors(node.text_of("link_errors")))
    except NotThisOutput:
        return
    if found:
        lines = tuple(f"GPU {gpu} link {link}: {count} {kind}" for gpu, link, kind, count in found)
        reason = f"{node.name}: NVLink errors since the driver was loaded: {'; '.join(lines[:4])}"
        yield node_result(
            CHECK, node.rank, Status.recorded, reason,
            metric="NVLink errors", observed=sum(each[3] for each in found), unit="errors",
            evidence=lines,
        )  # fmt: skip


CHECK = Check(
    name="nvlink",
    title="NVLink",
    level=Level.quick,
    probes=("accelerators",),
    seconds=1,
    measures="NVLinks of each GPU that are up, their speed, and the state of the fabric",
    how="nvidia-smi nvlink -s and -e, nvidia-smi -q: fabric",
    evidence="the links of every GPU",
    references="the accelerator's row (gpu_links, gpu_link_gb_per_s); without a machine the other"
    " GPUs of the node. Error counters are only reported",
    meaning="traffic between the GPUs of a node is slower, or goes over PCIe",
    action="drain the node; reset its GPUs; if a link stays down, have it repaired",
    judge=judge,
)
