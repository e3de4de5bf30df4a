"""What is left of a cluster, as a value, as JSON and as text."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from drillyard.formatting import plural

NONE, SOME, UNKNOWN = 0, 1, 3
_PROVIDER = re.compile(r"^google_(?:compute_)?|^nebius_[a-z0-9]+_v\d+_")


@dataclass(frozen=True)
class Gap:
    """A list that was not given, or only in part."""

    service: str
    method: str
    why: str


@dataclass(frozen=True)
class Leak:
    """One thing that is left. `usd_per_day` None: no price is known. `command` deletes it;
    `deleted_with`: it does so by deleting this other leak. Empty: there is none, or it would delete
    data, and `why` has it."""

    kind: str
    name: str
    location: str
    why: str
    usd_per_day: float | None
    command: str
    deleted_with: str = ""


@dataclass(frozen=True)
class LeakReport:
    """What is left. `doubtful` may be the cluster's or another's; `unknown` are lists that were not
    given in full; `disabled` services that the project does not use, so nothing of them exists."""

    cluster: str
    project: str
    leaks: tuple[Leak, ...]
    doubtful: tuple[Leak, ...]
    unknown: tuple[Gap, ...]
    disabled: tuple[str, ...]
    reservations: tuple[Leak, ...]

    @property
    def exit_code(self) -> int:
        """0 none, 1 some, 3 unknown."""
        if self.leaks:
            return SOME
        return UNKNOWN if self.unknown or self.doubtful else NONE

    @property
    def usd_per_day(self) -> float:
        """Dollars per day of the leaks whose price is known."""
        return sum(each.usd_per_day or 0.0 for each in self.leaks)

    @property
    def commands(self) -> tuple[str, ...]:
        """The commands that delete all leaks, in order, each once."""
        return tuple(dict.fromkeys(each.command for each in self.leaks if each.command))

    @property
    def text(self) -> str:
        """The report for a person."""
        return "\n".join(_lines(self))

    def as_json(self) -> dict[str, Any]:
        """The report as a JSON document."""
        return {
            **asdict(self),
            "usd_per_day": self.usd_per_day,
            "commands": list(self.commands),
            "exit_code": self.exit_code,
        }


def kind_title(kind: str) -> str:
    """Terraform's name of a kind in words: `router nat`."""
    return _PROVIDER.sub("", kind, count=1).replace("_", " ")


def _lines(report: LeakReport) -> Iterator[str]:
    where = f"cluster {report.cluster} in project {report.project}"
    if report.leaks:
        unpriced = sum(each.usd_per_day is None for each in report.leaks)
        yield f"{plural(len(report.leaks), 'thing')} left of {where}:"
        yield from _table(report.leaks)
        more = f", and {plural(unpriced, 'thing')} without a known price" if unpriced else ""
        yield f"${report.usd_per_day:,.2f} per day{more}"
        yield "To delete them, in this order:"
        yield from (f"  {each}" for each in report.commands)
    elif report.exit_code == 0:
        yield f"Nothing is left of {where}: every list was given in full."
    else:
        yield f"Unknown whether something is left of {where}."
    if report.doubtful:
        yield "It may be this cluster's, or another's: look before you delete."
        yield from _table(report.doubtful)
        yield from (f"  {each.command}" for each in report.doubtful)
    if report.unknown:
        yield "Unknown, since these lists were not given in full:"
        yield from (f"  {each.service}: {each.method}: {each.why}" for each in report.unknown)
    if report.disabled:
        yield f"Not enabled in the project, so nothing of them exists: {', '.join(report.disabled)}"
    if report.reservations:
        yield "Reservations, which are not deleted with a cluster:"
        yield from (
            f"  {kind_title(each.kind)} {each.name} in {each.location}"
            for each in report.reservations
        )


def _table(leaks: Sequence[Leak]) -> Iterator[str]:
    rows = [
        (
            kind_title(each.kind),
            each.name,
            each.location or "global",
            "unknown" if each.usd_per_day is None else f"{each.usd_per_day:,.2f}",
            each.why + (f"; deleted with {each.deleted_with}" if each.deleted_with else ""),
        )
        for each in leaks
    ]
    rows.insert(0, ("KIND", "NAME", "LOCATION", "$/DAY", "WHY"))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        yield f"  {'  '.join((*cells, row[-1]))}".rstrip()
