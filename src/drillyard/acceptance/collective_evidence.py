"""Measurements of collectives in the evidence, whichever program made them: busbw by message size,
repeat by repeat, and what is wrong with them.

Two probes measure collectives. `nccl_tests` gives the program's output, `{output, program, ranks}`
(`tables`: which of its tables, by
number from 0). `collective` is PyTorch's: each rank gives
`{collective, rows: [{bytes, seconds: [one per repeat], wrong}]}`; the time of a repeat is the mean
over ranks, as nccl-tests reports it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final

from drillyard.acceptance.evidence import AcceptanceEvidence, Observation
from drillyard.acceptance.parsers.collective_table import CollectiveTable
from drillyard.acceptance.parsers.recorded_tables import parse_tables
from drillyard.hardware.bandwidths import bus_factor

PROBES: Final = ("nccl_tests", "collective")
_OTHER_NAMES: Final = {"all_to_all": "alltoall", "all_to_all_single": "alltoall"}


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCollective:
    """One collective on one group of nodes. `bus`: GB/s by bytes, one value per repeat. `problems`
    leave nothing to judge by; `doubts` forbid a pass and nothing else."""

    observation: Observation
    collective: str | None
    nodes: tuple[int, ...]
    bus: Mapping[int, tuple[float, ...]] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()
    wrong: int = 0
    by: str = ""
    """The program, and its file where it was recorded."""


def measured_collectives(evidence: AcceptanceEvidence) -> Iterator[MeasuredCollective]:
    """All of them, in the order in which they were observed."""
    for observation in evidence.observations:
        if observation.probe == "nccl_tests" and "skipped" not in (observation.values or {}):
            yield from _by_nccl_tests(observation, evidence)
        elif observation.probe == "collective":
            yield _by_torch(observation, evidence)


def canonical(collective: object) -> str:
    """The name by which rows know it."""
    name = str(collective).removesuffix("_perf")
    return _OTHER_NAMES.get(name, name)


# nccl-tests


def _by_nccl_tests(
    observation: Observation, evidence: AcceptanceEvidence
) -> Iterator[MeasuredCollective]:
    values = observation.values or {}
    program, error = values.get("program"), observation.error or values.get("error")
    if error is None and values.get("exit_code", 0) != 0:
        error = f"ended with exit code {values['exit_code']}"
    asked = None if program is None else canonical(program)
    by = f"nccl-tests{f', {observation.source}' if observation.source else ''}"
    output = values.get("output")
    tables = list(_tables_in(output)) if isinstance(output, str) else []
    chosen = values.get("tables")
    if isinstance(chosen, list):
        tables = [table for place, table in enumerate(tables) if place in chosen]
    if not tables:
        why = error or "has no table of nccl-tests"
        yield MeasuredCollective(
            observation=observation, collective=asked, nodes=observation.nodes,
            problems=(str(why),), by=by,
        )  # fmt: skip
        return
    ranks = values.get("ranks")
    if not isinstance(ranks, int):
        ranks = len(observation.nodes) * evidence.processes_per_node
    groups: dict[str | None, list[CollectiveTable]] = {}
    for table in tables:
        groups.setdefault(table.collective, []).append(table)
    for collective, same in groups.items():
        problems = [why for table in same for why in table.problems]
        if error:
            problems.append(str(error))
        if asked is not None and collective not in (None, asked):
            problems.append(f"is of {collective}, and {asked} was asked for")
        problems += [
            f"is of {table.ranks} ranks, and {ranks} were asked for"
            for table in same
            if table.ranks is not None and table.ranks != ranks
        ]
        yield MeasuredCollective(
            observation=observation,
            collective=asked or collective,
            nodes=observation.nodes,
            bus=_common_sizes([table.bus_by_size() for table in same]),
            problems=tuple(dict.fromkeys(problems)),
            doubts=tuple(why for table in same for why in table.doubts),
            wrong=sum(table.wrong for table in same),
            by=by,
        )


@lru_cache(maxsize=64)
def _tables_in(output: str) -> tuple[CollectiveTable, ...]:
    """The tables of an output, which several checks read."""
    return tuple(parse_tables(output.encode()))


def _common_sizes(repeats: Sequence[Mapping[int, float]]) -> dict[int, tuple[float, ...]]:
    sizes = set.intersection(*(set(each) for each in repeats))
    return {size: tuple(each[size] for each in repeats) for size in sorted(sizes)}


# PyTorch


def _by_torch(observation: Observation, evidence: AcceptanceEvidence) -> MeasuredCollective:
    asked = canonical(observation.arguments.get("collective", "all_reduce"))
    problems: list[str] = []
    doubts: list[str] = []
    bus: dict[int, tuple[float, ...]] = {}
    wrong, checked = 0, False
    try:
        if observation.error is not None:
            raise ValueError(observation.error)
        by_rank = _values_by_rank(observation, evidence)
        if len(by_rank) == 1:
            raise ValueError("there is one rank")
        names = {canonical(values.get("collective", asked)) for values in by_rank}
        if names != {asked}:
            raise ValueError(f"is of {', '.join(sorted(names))}, and {asked} was asked for")
        rows = [_rows_by_size(values) for values in by_rank]
        factor = bus_factor(asked, len(rows))
        for size in rows[0]:
            bus[size] = _bus_of([each[size] for each in rows], size, factor)
        doubts += [
            f"{size:,} bytes were asked for, and were not measured"
            for size in observation.arguments.get("sizes") or ()
            if not any(abs(size - found) <= 0.01 * size for found in bus)
        ]
        counts = [each[size].get("wrong") for each in rows for size in bus]
        checked = all(isinstance(count, int) for count in counts)
        wrong = sum(count for count in counts if isinstance(count, int))
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        missing = f"has no {error}" if isinstance(error, KeyError) else str(error)
        problems.append(missing[:400])
    if not checked and not problems:
        doubts.append("its results were not checked")
    return MeasuredCollective(
        observation=observation, collective=asked, nodes=observation.nodes, bus=bus,
        problems=tuple(problems), doubts=tuple(doubts), wrong=wrong, by="PyTorch",
    )  # fmt: skip


def _values_by_rank(observation: Observation, evidence: AcceptanceEvidence) -> list[dict[str, Any]]:
    ranks = (observation.values or {})["ranks"]
    needed = len(observation.nodes) * evidence.processes_per_node
    if sorted(each["rank"] for each in ranks) != list(range(needed)):
        raise ValueError(f"{len(ranks)} of {needed} ranks answered")
    for each in ranks:
        if each["values"] is None:
            raise ValueError(f"rank {each['rank']}: {each['error'] or 'has no values'}")
    return [each["values"] for each in ranks]


def _rows_by_size(values: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    rows = {row["bytes"]: row for row in values["rows"]}
    if len(rows) != len(values["rows"]):
        raise ValueError("a size is there twice")
    return rows


def _bus_of(rows: Sequence[Mapping[str, Any]], size: int, factor: float) -> tuple[float, ...]:
    """GB/s of each repeat, from the mean of the ranks' times."""
    times = [list(row["seconds"]) for row in rows]
    if not times[0] or {len(each) for each in times} != {len(times[0])}:
        raise ValueError(f"{size:,} bytes: the ranks do not have as many repeats")
    found = []
    for repeat in zip(*times, strict=True):
        mean = math.fsum(repeat) / len(repeat)
        if isinstance(size, bool) or not math.isfinite(mean) or min(repeat) <= 0 or size <= 0:
            raise ValueError(f"{size:,} bytes: has no time")
        found.append(size / mean * factor / 1e9)
    return tuple(found)
