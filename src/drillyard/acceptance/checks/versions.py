"""Versions of drivers, libraries, firmware and services: equal on all nodes, and those that the
network stack needs."""

from __future__ import annotations

import re
from collections.abc import Iterator

from drillyard.acceptance.check import Check, Expected, Level
from drillyard.acceptance.evidence import AcceptanceEvidence, Observation
from drillyard.acceptance.gpu_evidence import gpus_of
from drillyard.acceptance.node_results import (
    difference,
    named,
    node_observations,
    node_result,
    why_not_observed,
)
from drillyard.acceptance.results import CheckResult, Status
from drillyard.acceptance.software import version_tuple, versions_of
from drillyard.hardware.facts import cited
from drillyard.hardware.network_stacks import NetworkStack

PROBE = "software"
_NAMES = {
    "driver": "driver",
    "cuda": "cuda",
    "nccl": "NCCL",
    "glibc": "libc",
    "libfabric": "libfabric",
    "aws-ofi-nccl": "package aws-ofi-nccl",
    "plugin": "plugin",
    "rxdm": "rxdm",
}
"""The names of a stack's row, and those under which nodes show them. Others are requirements of
Kubernetes, which the launch checks."""
_FOR = re.compile(r"(\S+)(?: for (\S+))?")
_ABSENT = "missing"


def judge(evidence: AcceptanceEvidence, expected: Expected) -> Iterator[CheckResult]:
    """One result per version that differs or is too old, else one for all nodes."""
    nodes = list(node_observations(evidence, PROBE))
    versions = _versions(evidence, dict(nodes), expected.stack)
    clean = True
    for rank, seen in nodes:
        if rank not in versions:
            clean = False
            why = f"{evidence.name_of(rank)}: {why_not_observed(seen, PROBE)}"
            yield node_result(CHECK, rank, Status.incomplete, why)
    found = [
        *_differences(evidence, versions, expected.stack),
        *_required(evidence, versions, expected),
        *_coupled(evidence, versions, expected.stack),
    ]
    yield from found
    if versions and clean and not any(each.required for each in found):
        names = {name for each in versions.values() for name in each}
        reason = f"{len(names)} versions are equal on {named(evidence, sorted(versions))}"
        if len(versions) == 1:
            reason = f"{named(evidence, list(versions))}: {len(names)} versions were read"
        figure = {"observed": len(names), "unit": "versions"}
        yield CHECK.result(tuple(sorted(versions)), Status.passed, reason, **figure)


def _versions(
    evidence: AcceptanceEvidence, nodes: dict[int, Observation | None], stack: NetworkStack | None
) -> dict[int, dict[str, str]]:
    gpus = {node.rank: node for node in gpus_of(evidence)}
    nics = dict(node_observations(evidence, "network_interfaces"))
    found = {}
    for rank, seen in nodes.items():
        if seen is not None and seen.values is not None:
            nic = nics.get(rank)
            versions = versions_of(seen.values, gpus.get(rank), nic.values if nic else None, stack)
            if versions:
                found[rank] = versions
    return found


def _differences(
    evidence: AcceptanceEvidence,
    versions: dict[int, dict[str, str]],
    stack: NetworkStack | None,
) -> Iterator[CheckResult]:
    fixed = {_NAMES[key] for key in _fixed(stack) if key in _NAMES}
    for name in sorted({name for each in versions.values() for name in each}):
        values = {rank: each.get(name, _ABSENT) for rank, each in versions.items()}
        if (one := difference(CHECK, evidence, name, values, fails=name in fixed)) is not None:
            yield one


def _fixed(stack: NetworkStack | None) -> set[str]:
    """What the stack's row fixes."""
    if stack is None:
        return set()
    return {
        *stack.versions,
        *stack.requires,
        *(key for row in stack.coupled_versions for key in row),
    }


def _required(
    evidence: AcceptanceEvidence, versions: dict[int, dict[str, str]], expected: Expected
) -> Iterator[CheckResult]:
    """Versions that the stack's row asks for at least."""
    stack = expected.stack
    for key, text in stack.requires.items() if stack else ():
        needed = _FOR.fullmatch(text)
        if stack is None or key not in _NAMES or needed is None:
            continue
        accelerator = expected.accelerator.name if expected.accelerator else ""
        if needed[2] is not None and needed[2].lower() != accelerator:
            continue
        least = version_tuple(needed[1])
        for rank, each in versions.items():
            name, found = evidence.name_of(rank), each.get(_NAMES[key])
            has = version_tuple(found) if found else None
            common = {"metric": _NAMES[key], "expected": f"at least {needed[1]}"}
            if has is None or least is None:
                reason = f"{name}: the version of {key} is not visible; {stack.name} needs {text}"
                yield node_result(CHECK, rank, Status.incomplete, reason, required=False, **common)
            elif has < least:
                reason = f"{name}: has {key} {found}; {stack.name} needs {text}"
                source = (cited(stack, f"requires.{key}"),)
                yield node_result(
                    CHECK, rank, Status.fail, reason, observed=found, evidence=source, **common
                )


def _coupled(
    evidence: AcceptanceEvidence, versions: dict[int, dict[str, str]], stack: NetworkStack | None
) -> Iterator[CheckResult]:
    """A plugin and a daemon that do not work together."""
    if stack is None or not stack.coupled_versions:
        return
    pairs = {(row["plugin"], row["rxdm"]) for row in stack.coupled_versions}
    for rank, each in versions.items():
        name, plugin, rxdm = evidence.name_of(rank), each.get("plugin"), each.get("rxdm")
        if plugin is None or rxdm is None:
            reason = f"{name}: versions of the plugin and its daemon are not visible"
            yield node_result(
                CHECK, rank, Status.incomplete, reason, metric="plugin and rxdm", required=False
            )
        elif (plugin, rxdm) not in pairs:
            works = ", ".join(sorted(one for other, one in pairs if other == plugin))
            reason = f"{name}: plugin {plugin} with rxdm {rxdm}"
            yield node_result(
                CHECK, rank, Status.fail, reason + (f"; it works with {works}" if works else ""),
                metric="plugin and rxdm", observed=f"{plugin}, {rxdm}",
                expected=works, evidence=(cited(stack, "coupled_versions"),),
            )  # fmt: skip


CHECK = Check(
    name="versions",
    title="Versions",
    level=Level.quick,
    probes=("software", "accelerators", "network_interfaces"),
    seconds=1,
    measures="versions of kernel, driver, CUDA, NCCL, network plugin, firmware, and services",
    how="files, packages and tools of each node",
    evidence="what each node shows",
    references="the network stack's row (versions, requires, coupled_versions); for all else what"
    " most nodes have. A difference that the row does not fix warns",
    meaning="nodes were set up at different times; a job may hang or run slowly",
    action="install on the odd node what the others have",
    judge=judge,
)
