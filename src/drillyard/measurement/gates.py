"""`--fail-if 'mfu<0.38'`: conditions on the published document, so that a CI job can gate on a
measured run.

A condition is a field of the document by its dotted name, a comparison and a number. Whatever is
not known cannot pass: a gate on a null field fails, and names the flag that would give the figure.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Final

from drillyard.errors import UserError

_COMPARISONS: Final[dict[str, Callable[[float, float], bool]]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
}
_WITH_GOODPUT: Final = frozenset(
    {
        *("seconds_by_category", "microseconds_by_category"),
        *("wall_seconds", "restarts", "steps_redone", "clock_steps_back"),
    }
)
"""Figures that are there when goodput is."""
_GATE: Final = re.compile(r"\s*([A-Za-z0-9_.]+)\s*(<=|>=|==|!=|<|>)\s*(\S+?)\s*(%?)\s*")


@dataclass(frozen=True, slots=True)
class Gate:
    """One condition under which the command fails."""

    text: str
    field: str
    comparison: str
    limit: float

    def trips(self, document: Mapping[str, Any]) -> str | None:
        """Reason why this run fails, or None. UserError for a name that is no number in the
        document."""
        value = _lookup(document, self.field, self.text)
        if value is None:
            why = [
                f": {item['reason']}{_flags(item)}"
                for item in document["missing"]
                if _about(item, self)
            ]
            return f"{self.field} is not known{''.join(why[:1])}; so --fail-if '{self.text}' fails"
        if _COMPARISONS[self.comparison](value, self.limit):
            return f"{self.field} is {value:.6g}: --fail-if '{self.text}'"
        return None


def parse_gate(text: str) -> Gate:
    """The condition that `text` states; `38%` is 0.38. UserError for anything else."""
    match = _GATE.fullmatch(text)
    try:
        limit = math.nan if match is None else float(match[3]) / (100 if match[4] else 1)
    except ValueError:
        limit = math.nan
    if match is None or math.isnan(limit):
        raise UserError(
            f"--fail-if '{text}': write it as FIELD<NUMBER, such as 'mfu<0.38' or"
            " 'step_seconds.p95>15'."
        )
    return Gate(text.strip(), match[1], match[2], limit)


def _lookup(document: Mapping[str, Any], field: str, text: str) -> float | None:
    value: Any = document
    for name in field.split("."):
        if value is None:
            return None
        if not isinstance(value, Mapping) or name not in value:
            known = sorted(_numbers(document))
            close = get_close_matches(field, known, n=1, cutoff=0.5)
            hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(known)}"
            raise UserError(f"--fail-if '{text}': there is no figure {field}; {hint}")
        value = value[name]
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UserError(f"--fail-if '{text}': {field} is not a number.")
    return value


def _numbers(document: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """The dotted names of all that may be a number."""
    for name, value in document.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{prefix}{name}.")
        elif value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
            yield f"{prefix}{name}"


def _about(missing: Mapping[str, Any], gate: Gate) -> bool:
    first = gate.field.split(".")[0]
    return missing["field"] in (gate.field, first) or (
        missing["field"] == "goodput" and first in _WITH_GOODPUT
    )


def _flags(missing: Mapping[str, Any]) -> str:
    return f" ({', '.join(missing['flags'])})" if missing["flags"] else ""
