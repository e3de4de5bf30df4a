"""The GPUs of each node as observed, and how a check of GPUs goes through them: a node passes only
where the value that the check needs was read of every GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from drillyard.acceptance.check import Check, Expected
from drillyard.acceptance.evidence import AcceptanceEvidence, Observation
from drillyard.acceptance.node_results import (
    has_gpus,
    node_observations,
    node_result,
    why_not_observed,
)
from drillyard.acceptance.parsers.errors import NotThisOutput
from drillyard.acceptance.parsers.nvidia_smi import Gpu, GpuTable, parse_gpus
from drillyard.acceptance.results import CheckResult, Status

PROBE = "accelerators"


@dataclass(frozen=True)
class NodeGpus:
    """A node and what nvidia-smi says of its GPUs. `table` None: there is none, and `why` says so.

    `installed` False: the node has no nvidia-smi. `tools`: the answers of all tools by name.
    """

    rank: int
    name: str
    table: GpuTable | None
    why: str = ""
    installed: bool = True
    tools: Mapping[str, Any] = field(default_factory=dict)
    device_files: int | None = None
    recorded: bool = False
    """From files: what they do not hold was not asked for."""

    @property
    def how_to_record(self) -> str:
        """What to do where a recorded output cannot be read."""
        return "give the whole output of each tool in a file of its own" if self.recorded else ""

    def lacks(self, tool: str) -> bool:
        """Whether no file was given with what a tool prints."""
        return self.recorded and tool not in self.tools

    def text_of(self, tool: str) -> str:
        """What a tool printed. Raises NotThisOutput where that is not all of it."""
        answer = self.tools.get(tool)
        if not isinstance(answer, Mapping):
            raise NotThisOutput(f"{tool} was not asked for")
        if answer.get("error"):
            raise NotThisOutput(str(answer["error"]))
        return str(answer.get("text", ""))


@dataclass(frozen=True)
class GpuFinding:
    """What a check says of one GPU."""

    status: Status
    reason: str
    observed: float | str | None = None
    more: Mapping[str, Any] = field(default_factory=dict)


GpuJudge = Callable[[Gpu, NodeGpus], GpuFinding | None]
"""The finding of a GPU; None: the output has nothing about it."""


def gpus_of(evidence: AcceptanceEvidence) -> Iterator[NodeGpus]:
    """The GPUs of every node that joined."""
    recorded = evidence.recorded
    # Of recorded evidence each tool's output is a file, and an observation, of its own.
    tools: dict[int, dict[str, Any]] = {}
    for each in evidence.of(PROBE):
        found = None if each.error else (each.values or {}).get("tools")
        if isinstance(found, Mapping):
            for rank in each.nodes:
                tools.setdefault(rank, {}).update(found)
    for rank, seen in node_observations(evidence, PROBE):
        node = _node_gpus(rank, evidence.name_of(rank), seen, tools.get(rank, {}))
        yield replace(node, recorded=recorded)


def _node_gpus(
    rank: int, name: str, seen: Observation | None, tools: Mapping[str, Any]
) -> NodeGpus:
    if seen is None or seen.values is None:
        return NodeGpus(rank, name, None, why_not_observed(seen, PROBE))
    files = seen.values.get("device_files")
    answer = tools.get("query")
    if not isinstance(answer, Mapping):
        return NodeGpus(rank, name, None, "nvidia-smi was not asked", tools=tools)
    installed = answer.get("installed") is not False
    table, why = None, ""
    try:
        table = parse_gpus(str(answer.get("text", "")))
    except NotThisOutput as error:
        why = f"the output of nvidia-smi {error}"
    if answer.get("error"):
        # Its table may be good; but what it did not do is not known.
        why = str(answer["error"])
        no_devices = table is not None and not table.gpus
        table = table if no_devices else None
    count = files if isinstance(files, int) else None
    return NodeGpus(rank, name, table, why, installed, tools, count)


def judge_gpus(
    check: Check,
    evidence: AcceptanceEvidence,
    expected: Expected,
    judge: GpuJudge,
    healthy: str,
    keys: tuple[str, ...] = (),
) -> Iterator[CheckResult]:
    """Results of a check of each GPU: one per GPU that does not pass, else one per node, with
    `healthy` as its reason.

    `keys`: what must have been read (each one of its alternatives, joined by |); `judge` is called
    for GPUs that have it.
    """
    for node in gpus_of(evidence):
        absent = without_gpus(check, node, expected)
        if absent is not None:
            yield absent
            continue
        assert node.table is not None
        yield from _judge_node(check, node, node.table, judge, healthy, keys)


def _judge_node(
    check: Check,
    node: NodeGpus,
    table: GpuTable,
    judge: GpuJudge,
    healthy: str,
    keys: tuple[str, ...],
) -> Iterator[CheckResult]:
    alternatives = [key.split("|") for key in keys]
    missing = [
        gpu for gpu in table.gpus if not all(any(k in gpu for k in some) for some in alternatives)
    ]
    if table.is_part and len(missing) == len(table.gpus):
        yield not_in_file(check, node)
        return
    findings = [(gpu, unread(gpu, alternatives) or judge(gpu, node)) for gpu in table.gpus]
    shown = [(gpu, each) for gpu, each in findings if each and each.status is not Status.skipped]
    for gpu, finding in shown:
        if finding.status is not Status.passed:
            yield node_result(
                check,
                node.rank,
                finding.status,
                f"{node.name}: {gpu.title} {finding.reason}",
                device=gpu.index,
                observed=finding.observed,
                **finding.more,
            )
    good = [each for _, each in shown if each.status in (Status.passed, Status.recorded)]
    if not shown:
        why = next((each.reason for _, each in findings if each), "their driver does not show it")
        yield node_result(check, node.rank, Status.skipped, f"{node.name}: its GPUs: {why}")
    elif len(shown) < len(table.gpus):
        silent = ", ".join(
            gpu.title for gpu, each in findings if each is None or (gpu, each) not in shown
        )
        why = f"{node.name}: no value of {silent}, unlike its other GPUs"
        yield node_result(check, node.rank, Status.incomplete, why)
    elif len(good) == len(table.gpus):
        yield node_result(
            check,
            node.rank,
            Status.passed,
            f"{node.name}: {healthy} on all {len(good)} GPUs",
            observed=len(good),
            unit="GPUs",
        )


def unread(gpu: Gpu, alternatives: list[list[str]]) -> GpuFinding | None:
    """The finding where a needed value is missing or is not what it should be."""
    if gpu.lost:
        return GpuFinding(Status.incomplete, f"does not answer the driver: {gpu.lost}", gpu.lost)
    for some in alternatives:
        if not any(key in gpu for key in some):
            return GpuFinding(Status.incomplete, f"has no {some[0]} in the output of nvidia-smi")
    return None


def unreadable(gpu: Gpu, key: str) -> GpuFinding:
    """The finding of a value that is not what it should be."""
    text = gpu.texts.get(key, "")
    return GpuFinding(Status.incomplete, f"has {key} '{text[:40]}', which cannot be judged", text)


def not_in_file(check: Check, node: NodeGpus) -> CheckResult:
    """The result of a node whose files do not show what the check needs."""
    return node_result(check, node.rank, Status.skipped, f"{node.name}: its files do not show this")


def without_gpus(check: Check, node: NodeGpus, expected: Expected) -> CheckResult | None:
    """The result of a node without a usable table; None: it has one."""
    if node.table is not None and node.table.gpus:
        return None
    if node.lacks("query"):
        return not_in_file(check, node)
    if not node.installed and not has_gpus(expected):
        why = f"{node.name}: nvidia-smi is not installed, and the cluster config names no GPUs"
        return node_result(check, node.rank, Status.skipped, why)
    if node.table is not None and not has_gpus(expected):
        why = f"{node.name}: has no GPUs, and the cluster config names none"
        return node_result(check, node.rank, Status.skipped, why)
    why = node.why or "nvidia-smi lists no GPU"
    return node_result(
        check,
        node.rank,
        Status.incomplete,
        f"{node.name}: {why}",
        action="run nvidia-smi -q on the node; restart it if that hangs or fails",
    )
