"""Variables of the network (`NCCL_*` and the like) as a training run gets them on each node."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from drillyard.acceptance.check import Check, Expected, Level
from drillyard.acceptance.evidence import AcceptanceEvidence
from drillyard.acceptance.node_results import (
    difference,
    named,
    node_observations,
    node_result,
    why_not_observed,
)
from drillyard.acceptance.results import CheckResult, Status
from drillyard.hardware.facts import cited

PROBE = "software"
_COMPARED = re.compile(r"(NCCL|TORCH_NCCL|GLOO|UCX|FI|OFI|RDMAV)_\w+|LD_LIBRARY_PATH")
_OWN = {"NCCL_HOSTID"}
"""Different on each node by their meaning."""
_UNSET = "not set"


def judge(evidence: AcceptanceEvidence, expected: Expected) -> Iterator[CheckResult]:
    """One result per variable that differs or must not be, else one for all nodes."""
    variables: dict[int, dict[str, str]] = {}
    for rank, seen in node_observations(evidence, PROBE):
        found = (seen.values or {}).get("environment") if seen else None
        if isinstance(found, Mapping):
            variables[rank] = {
                str(name): str(value)
                for name, value in found.items()
                if _COMPARED.fullmatch(str(name)) and name not in _OWN
            }
        else:
            why = f"{evidence.name_of(rank)}: {why_not_observed(seen, PROBE)}"
            yield node_result(CHECK, rank, Status.incomplete, why)
    found_results = [
        *_planned(evidence, variables, expected),
        *_differences(evidence, variables, expected),
        *_stack(evidence, variables, expected),
    ]
    yield from found_results
    if variables and not found_results:
        names = {name for each in variables.values() for name in each}
        ranks = sorted(variables)
        where = f"equal on {named(evidence, ranks)}" if len(ranks) > 1 else "as planned"
        reason = f"{len(names)} variables are {where}"
        figure = {"observed": len(names), "unit": "variables"}
        yield CHECK.result(tuple(ranks), Status.passed, reason, **figure)


def _plan(expected: Expected) -> dict[str, str]:
    """What the plan sets; values that a shell fills in are left out."""
    return {
        name: value
        for name, value in expected.environment.items()
        if _COMPARED.fullmatch(name) and name != "LD_LIBRARY_PATH" and not set("${") & set(value)
    }


def _planned(
    evidence: AcceptanceEvidence, variables: dict[int, dict[str, str]], expected: Expected
) -> Iterator[CheckResult]:
    """Nodes with another value than the launch plan sets."""
    for name, value in _plan(expected).items():
        for rank, each in variables.items():
            if (has := each.get(name, _UNSET)) != value:
                reason = f"{evidence.name_of(rank)}: {name} is {has}; the plan sets {value}"
                yield node_result(
                    CHECK, rank, Status.fail, reason, metric=name, observed=has, expected=value
                )


def _differences(
    evidence: AcceptanceEvidence, variables: dict[int, dict[str, str]], expected: Expected
) -> Iterator[CheckResult]:
    planned = _plan(expected)
    for name in sorted({name for each in variables.values() for name in each} - planned.keys()):
        values = {rank: each.get(name, _UNSET) for rank, each in variables.items()}
        fails = name != "LD_LIBRARY_PATH"
        if (found := difference(CHECK, evidence, name, values, fails=fails)) is not None:
            yield found


def _stack(
    evidence: AcceptanceEvidence, variables: dict[int, dict[str, str]], expected: Expected
) -> Iterator[CheckResult]:
    """Variables that the network stack does not work with."""
    stack = expected.stack
    if stack is None:
        return
    for rank, each in variables.items():
        node = evidence.name_of(rank)
        for name in stack.forbidden:
            if name in each:
                reason = f"{node}: {name} is set; {stack.name} does not work with it"
                yield node_result(
                    CHECK, rank, Status.fail, reason, metric=name, observed=each[name],
                    expected=_UNSET, evidence=(cited(stack, "forbidden"),),
                )  # fmt: skip
        for name in stack.enforced:
            value = stack.profile_environment.get(name)
            if name in each and each[name] != value:
                reason = f"{node}: {name} is {each[name]}; {stack.name} ends a job without {value}"
                yield node_result(
                    CHECK, rank, Status.fail, reason, metric=name, observed=each[name],
                    expected=value or "", evidence=(cited(stack, "enforced"),),
                )  # fmt: skip
        for name in stack.superseded:
            if name in each:
                reason = f"{node}: {name} is set, which belongs to an earlier {stack.name}"
                yield node_result(
                    CHECK, rank, Status.warn, reason, metric=name, observed=each[name],
                    expected=_UNSET, evidence=(cited(stack, "superseded"),),
                )  # fmt: skip


CHECK = Check(
    name="environment",
    title="Variables of the network",
    level=Level.quick,
    probes=(PROBE,),
    seconds=1,
    measures="NCCL_*, TORCH_NCCL_*, GLOO_*, UCX_*, FI_* and LD_LIBRARY_PATH in the job",
    how="the environment of the job's own processes on each node",
    evidence="the environment of every node",
    references="the launch plan, the network stack's row, for all else what most nodes have",
    meaning="NCCL chooses another transport on that node: a job hangs or is slow",
    action="remove the variable from the node's profile, or set it in cluster.yaml: environment",
    judge=judge,
)
