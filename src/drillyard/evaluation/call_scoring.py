"""Function-call accuracy: does a text make the calls that it should?

A text is read as calls (`data/call_syntax.py`) and compared with the accepted ones by structure, by
the rules of the Berkeley Function-Calling Leaderboard (BFCL, its `ast_checker`,
github.com/ShishirPatil/gorilla). A call is wrong in the first of these ways that holds, whatever
the order of its arguments:

- `wrong_name`: another function than the accepted call;
- `missing_parameter`: one that the schema requires, or that the accepted call does not let out, is
  not there;
- `invented_parameter`: one is there that the accepted call does not have;
- `wrong_type`: a value has neither its parameter's type (`data/schema_types.py`; a whole number
  does for a float) nor that of an accepted value, where these have another type than the schema
  (a variable, in the BFCL);
- `wrong_value`: a value is not one of those accepted. Text is equal whatever its case, spaces and
  the characters `,./-_*^`, and whichever quotes it has.

Several calls count in any order. They are paired with the accepted ones so that as few pairs as
possible are wrong, and among such pairings as few as possible in the first of these ways, then in
the second, and so on. The answer is wrong in the first way that the pairing has. So the verdict
depends neither on the order of the calls nor on which of the best pairings is found.

Accepted calls are [{name, arguments: {parameter: [values]}}]; "" in a list means that the parameter
may be left out, unless the call has `exact: true`. An accepted object is {key: [values]}. A row
whose accepted call lacks what its own schema requires is `unjudged`. Limit: a text that is right in
another way than the accepted ones is wrong here.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from drillyard.data.call_syntax import FunctionCall, UnparseableCall, parse_calls
from drillyard.data.schema_types import allows_parameter, required_parameters

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
"""`wrong_count`: a call is missing or too many; `unjudged`: the row asks for no call, or for one
that its schema refuses."""
OUTCOMES: tuple[CallOutcome, ...] = get_args(CallOutcome)
MAY_BE_LEFT_OUT = ""
_NEVER = object()
"""Instead of it where no accepted value has that meaning."""

_WORST_FIRST: tuple[CallOutcome, ...] = (
    "wrong_name",
    "missing_parameter",
    "invented_parameter",
    "wrong_type",
    "wrong_value",
)
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
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
    required = {
        name: required_parameters(schemas.get(name, {}))
        for name in {want["name"] for want in accepted}
    }
    for want in accepted:
        for name in required[want["name"]]:
            if name not in want["arguments"]:
                return CallVerdict(
                    "unjudged", f"the accepted {want['name']} has no {name}, which is required"
                )
    try:
        _, calls = parse_calls(predicted, schemas)
    except (UnparseableCall, RecursionError) as error:
        return CallVerdict("unparseable", str(error))
    if len(calls) != len(accepted):
        return CallVerdict("wrong_count", f"{len(calls)} calls instead of {len(accepted)}")
    table = [
        [
            _compare(schemas.get(want["name"], {}), required[want["name"]], want, call)
            for call in calls
        ]
        for want in accepted
    ]
    return _best_pairing(table)


def _best_pairing(table: list[list[CallVerdict]]) -> CallVerdict:
    """The verdict on calls of which `table[i][j]` compares accepted call i with call j."""
    size = len(table)
    if all(table[place][place].outcome == "correct" for place in range(size)):
        return CallVerdict("correct")
    # As digits of one number, so that a pairing's cost says how many pairs are wrong in each way.
    costs = {
        outcome: (size + 1) ** len(_WORST_FIRST) + (size + 1) ** place
        for place, outcome in enumerate(reversed(_WORST_FIRST))
    } | {"correct": 0}
    columns = cheapest_assignment([[costs[each.outcome] for each in row] for row in table])
    wrong = [
        (_WORST_FIRST.index(verdict.outcome), column, verdict)
        for row, column in zip(table, columns, strict=True)
        if (verdict := row[column]).outcome != "correct"
    ]
    if not wrong:
        return CallVerdict("correct")
    _, column, verdict = min(wrong, key=lambda each: each[:2])
    where = f"call {column + 1}: " if size > 1 else ""
    return CallVerdict(verdict.outcome, where + verdict.reason)


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


def cheapest_assignment(costs: list[list[int]]) -> list[int]:
    """The column of each row of a square table so that every column is taken once and the sum of
    costs is least: the Hungarian method with shortest augmenting paths (Kuhn 1955; Jonker and
    Volgenant 1987), exact on integers, in O(n^3)."""
    size = len(costs)
    row_of: list[int | None] = [None] * size
    for_rows, for_columns = [0] * size, [0] * size  # the potentials of the dual problem
    for new_row in range(size):
        row, column = new_row, -1
        distance: dict[int, int] = {}
        before: dict[int, int] = {}
        reached: list[tuple[int, int]] = []  # columns with their distances, nearest first
        shortest = 0
        while True:
            done = {each for each, _ in reached}
            for each in range(size):
                if each not in done:
                    length = shortest + costs[row][each] - for_rows[row] - for_columns[each]
                    if each not in distance or length < distance[each]:
                        distance[each], before[each] = length, column
            column = min((each for each in distance if each not in done), key=distance.__getitem__)
            shortest = distance[column]
            taken = row_of[column]
            if taken is None:
                break
            reached.append((column, shortest))
            row = taken
        for_rows[new_row] += shortest
        for each, length in reached:
            owner = row_of[each]
            assert owner is not None
            for_rows[owner] += shortest - length
            for_columns[each] -= shortest - length
        while column >= 0:
            previous = before[column]
            row_of[column] = new_row if previous < 0 else row_of[previous]
            column = previous
    columns = [0] * size
    for column, owner in enumerate(row_of):
        assert owner is not None
        columns[owner] = column
    return columns


def _compare(
    schema: Any, required: list[str], accepted: dict[str, Any], call: FunctionCall
) -> CallVerdict:
    """Compare one call with one accepted call."""
    if call.name != accepted["name"]:
        return CallVerdict("wrong_name", f"{call.name} instead of {accepted['name']}")
    wanted, given = accepted["arguments"], call.arguments
    left_out = _NEVER if accepted.get("exact") else MAY_BE_LEFT_OUT
    for name, choices in wanted.items():
        if name not in given and (name in required or left_out not in choices):
            return CallVerdict("missing_parameter", f"no {name}")
    for name in given:
        if name not in wanted:
            return CallVerdict("invented_parameter", f"{name} is not asked for")
    for name, value in given.items():
        if not allows_parameter(schema, name, value) and not any(
            type(value) is type(choice) and not allows_parameter(schema, name, choice)
            for choice in wanted[name]
            if choice != left_out
        ):
            return CallVerdict(
                "wrong_type", f"{name} is of type {type(value).__name__}: {value!r:.60}"
            )
    for name, value in given.items():
        if not any(_equal(value, choice, left_out) for choice in wanted[name]):
            return CallVerdict("wrong_value", f"{name} is {value!r:.60}")
    return CallVerdict("correct")


def _equal(value: Any, choice: Any, left_out: Any) -> bool:
    """Whether a value is the accepted one; an accepted object has a list of accepted values for
    each key, in which `left_out` means that it may be absent."""
    if isinstance(value, str) and isinstance(choice, str):
        return _significant(value) == _significant(choice)
    if isinstance(value, list) and isinstance(choice, list):
        return len(value) == len(choice) and all(
            _equal(item, each, left_out) for item, each in zip(value, choice, strict=True)
        )
    if isinstance(value, dict) and isinstance(choice, dict):
        return value.keys() <= choice.keys() and all(
            (
                any(_equal(value[key], each, left_out) for each in accepted)
                if key in value
                else left_out in accepted
            )
            for key, accepted in choice.items()
        )
    return isinstance(value, bool) == isinstance(choice, bool) and bool(value == choice)


def _significant(text: str) -> str:
    return _INSIGNIFICANT.sub("", text).lower().replace("'", '"')
