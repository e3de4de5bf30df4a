"""Function-call accuracy: does a text make the calls that it should?

A text is read as calls (`data/call_syntax.py`) and compared with the accepted ones by structure, by
the rules of the Berkeley Function-Calling Leaderboard (BFCL, its `ast_checker`,
github.com/ShishirPatil/gorilla):

- the function has the right name, and no call is missing or too many; several calls count in any
  order;
- every required parameter is there, and every other one that the accepted call does not let out;
- no parameter is invented: unknown to the schema or to the accepted call;
- each value has its parameter's type (a whole number does for a float), or that of an accepted
  value: the accepted calls may have a variable where the schema has another type;
- each value is one of those accepted. Text is equal whatever its case, spaces and the characters
  `,./-_*^`, and whichever quotes it has.

Accepted calls are [{name, arguments: {parameter: [values]}}]; "" in a list means that the parameter
may be left out. An accepted object is {key: [values]}. Limit: a text that is right in another way
than the accepted ones is wrong here.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from drillyard.data.call_syntax import FunctionCall, UnparseableCall, parse_calls

CallOutcome = Literal[
    "correct",
    "wrong_name",
    "missing_parameter",
    "invented_parameter",
    "wrong_type",
    "wrong_value",
    "wrong_count",
    "unparseable",
    "unjudged",
]
"""`wrong_count`: a call is missing or too many; `unjudged`: the row asks for no call."""
OUTCOMES: tuple[CallOutcome, ...] = get_args(CallOutcome)
MAY_BE_LEFT_OUT = ""

_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}
_INSIGNIFICANT = re.compile(r"[ ,./\-_*^]")


@dataclass(frozen=True)
class CallVerdict:
    """The judgement of one text, with its reason."""

    outcome: CallOutcome
    reason: str = ""


def judge_calls(
    tools: list[dict[str, Any]], accepted: list[dict[str, Any]], predicted: str
) -> CallVerdict:
    """Judge a text against the accepted calls of the functions in `tools`. Never raises, whatever
    the text."""
    if not accepted:
        return CallVerdict("unjudged", "the row has no call")
    try:
        _, calls = parse_calls(predicted)
    except (UnparseableCall, RecursionError) as error:
        return CallVerdict("unparseable", str(error))
    if len(calls) != len(accepted):
        return CallVerdict("wrong_count", f"{len(calls)} calls instead of {len(accepted)}")
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
    table = [
        [_compare(schemas.get(want["name"], {}), want, call) for call in calls] for want in accepted
    ]
    left = unpaired(len(accepted), lambda i, j: table[i][j].outcome == "correct")
    if left is None:
        return CallVerdict("correct")
    # The call to the same function says most about what is wrong.
    return next(
        (verdict for verdict in table[left] if verdict.outcome not in ("wrong_name", "correct")),
        table[left][0],
    )


def call_accuracy(verdicts: Iterable[CallVerdict]) -> dict[str, float | int]:
    """Counts per outcome, `judged` (all but unjudged), and `accuracy` = correct / judged (NaN when
    none was judged)."""
    counts = Counter(verdict.outcome for verdict in verdicts)
    judged = sum(counts.values()) - counts["unjudged"]
    figures: dict[str, float | int] = {outcome: counts[outcome] for outcome in OUTCOMES}
    return figures | {
        "judged": judged,
        "accuracy": counts["correct"] / judged if judged else math.nan,
    }


def unpaired(size: int, fits: Callable[[int, int], bool]) -> int | None:
    """The first of `size` rows that no matching with as many columns pairs; None if all are paired
    (Kuhn 1955)."""
    partner: dict[int, int] = {}

    def place(row: int, tried: set[int]) -> bool:
        for column in range(size):
            if column not in tried and fits(row, column):
                tried.add(column)
                if column not in partner or place(partner[column], tried):
                    partner[column] = row
                    return True
        return False

    return next((row for row in range(size) if not place(row, set())), None)


def _compare(schema: dict[str, Any], accepted: dict[str, Any], call: FunctionCall) -> CallVerdict:
    """Compare one call with one accepted call."""
    if call.name != accepted["name"]:
        return CallVerdict("wrong_name", f"{call.name} instead of {accepted['name']}")
    wanted, properties = accepted["arguments"], schema.get("properties") or {}
    for name in schema.get("required") or []:
        if name not in call.arguments:
            return CallVerdict("missing_parameter", f"no {name}")
    for name, value in call.arguments.items():
        if name not in wanted or (properties and name not in properties):
            return CallVerdict("invented_parameter", f"{name} is not asked for")
        if not _has_type(value, properties.get(name) or {}, wanted[name]):
            return CallVerdict(
                "wrong_type", f"{name} is of type {type(value).__name__}: {value!r:.60}"
            )
        if not any(_equal(value, choice) for choice in wanted[name]):
            return CallVerdict("wrong_value", f"{name} is {value!r:.60}")
    for name, choices in wanted.items():
        if name not in call.arguments and MAY_BE_LEFT_OUT not in choices:
            return CallVerdict("missing_parameter", f"no {name}")
    return CallVerdict("correct")


def _has_type(value: Any, schema: dict[str, Any], choices: list[Any]) -> bool:
    """Whether the value has the schema's type or, as BFCL admits variables, that of the first
    accepted value."""
    if _fits(value, schema):
        return True
    first = next((choice for choice in choices if choice != MAY_BE_LEFT_OUT), None)
    return type(value) is type(first) and not _fits(first, schema)


def _fits(value: Any, schema: Any) -> bool:
    """Whether the value has the type of a schema, and its items theirs. A schema without a type
    takes any value."""
    wanted = schema.get("type") if isinstance(schema, dict) else None
    names = wanted if isinstance(wanted, list) else [wanted]
    known = [_TYPES[name] for name in names if isinstance(name, str) and name in _TYPES]
    if not known:
        return True
    if not any(type(value) in types for types in known):
        return False
    return not isinstance(value, list) or all(
        _fits(item, schema.get("items") or {}) for item in value
    )


def _equal(value: Any, choice: Any) -> bool:
    """Whether a value is the accepted one; an accepted object has a list of accepted values for
    each key."""
    if isinstance(value, str) and isinstance(choice, str):
        return _significant(value) == _significant(choice)
    if isinstance(value, list) and isinstance(choice, list):
        return len(value) == len(choice) and all(map(_equal, value, choice))
    if isinstance(value, dict) and isinstance(choice, dict):
        return value.keys() <= choice.keys() and all(
            (
                any(_equal(value[key], each) for each in accepted)
                if key in value
                else MAY_BE_LEFT_OUT in accepted
            )
            for key, accepted in choice.items()
        )
    return isinstance(value, bool) == isinstance(choice, bool) and bool(value == choice)


def _significant(text: str) -> str:
    return _INSIGNIFICANT.sub("", text).lower().replace("'", '"')
