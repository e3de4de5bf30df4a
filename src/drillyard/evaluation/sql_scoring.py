"""SQL execution accuracy: does a predicted query return what the reference query returns?

A prediction is correct when its result equals the reference's on every database of the row: for the
built-in set the shown database and two further fills (test-suite accuracy, Zhong et al. 2020,
arXiv:2010.02840). Results are equal when they have as many columns in the same order and the same
multiset of rows; the order of rows counts only under a top-level ORDER BY of the reference. Numbers
are equal within a relative 1e-6 whatever their type; text never equals a number; NULL equals NULL.
Limits: column names are ignored; rows that tie under ORDER BY must come in the reference's order;
an answer that is right on these databases may be wrong on another.
"""

from __future__ import annotations

import contextlib
import math
import sqlite3
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from drillyard.evaluation.sql_databases import SCHEMA_COLUMNS, databases
from drillyard.evaluation.sql_sandbox import NO_MEMORY, SQL_ERRORS, Row, run_query
from drillyard.evaluation.sql_text import has_top_level_order_by, statements

RELATIVE_TOLERANCE = 1e-6
ABSOLUTE_TOLERANCE = 1e-9
"""Only so that a sum that cancels to 1e-17 equals 0."""

_MAX_PAIRINGS = 300

Outcome = Literal["correct", "wrong", "invalid", "timeout", "unjudged"]
OUTCOMES: tuple[Outcome, ...] = ("correct", "wrong", "invalid", "timeout", "unjudged")


@dataclass(frozen=True)
class SqlVerdict:
    """The judgement of one prediction. `unjudged`: the reference itself fails or returns
    nothing."""

    outcome: Outcome
    reason: str = ""


class QueryJudge:
    """Judges predictions for one row; builds its databases and runs its reference once. `close`
    frees the databases.

    `unjudged`: why predictions for this row cannot be judged; empty when they can.
    """

    def __init__(self, row: dict[str, Any]) -> None:
        self.reference = str(row["sql"])
        self._ordered = has_top_level_order_by(self.reference)
        self._cases: list[tuple[sqlite3.Connection, list[Row]]] = []
        problems = []
        for connection, problem in databases(row):
            result = _reference_result(connection, self.reference) if connection else problem
            if isinstance(result, str):
                problems.append(result)
            elif connection:
                self._cases.append((connection, result))
        schema = next((str(row[name]) for name in SCHEMA_COLUMNS if row.get(name)), "")
        self._not_built = {each.table for each in statements(schema) if each.table}
        self.unjudged = "" if self._cases else problems[0]
        if self.unjudged and (missing := self._missing_table(self.unjudged)):
            self.unjudged += f" ({missing})"

    def judge(self, predicted: str) -> SqlVerdict:
        """Judge one prediction. Never raises, whatever the text."""
        if self.unjudged:
            return SqlVerdict("unjudged", self.unjudged)
        for number, (connection, expected) in enumerate(self._cases):
            try:
                found = run_query(connection, predicted)
            except TimeoutError as error:
                return SqlVerdict("timeout", str(error))
            except SQL_ERRORS as error:
                if missing := self._missing_table(str(error)):
                    return SqlVerdict("unjudged", missing)
                return SqlVerdict("invalid", str(error) or NO_MEMORY)
            if difference := result_difference(expected, found, ordered=self._ordered):
                return SqlVerdict(
                    "wrong", f"{difference} on database {number + 1} of {len(self._cases)}"
                )
        return SqlVerdict("correct")

    def _missing_table(self, error: str) -> str:
        """Why a query cannot find a table that the schema has; empty for any other error."""
        _, found, name = error.partition("no such table: ")
        table = name.split(".")[-1].lower()
        if not found or table not in self._not_built:
            return ""
        return f"{table} is a virtual table, which is not built"

    def close(self) -> None:
        """Free the databases."""
        for connection, _ in self._cases:
            connection.close()


def _reference_result(connection: sqlite3.Connection, sql: str) -> list[Row] | str:
    """The reference's rows, or why they cannot judge anything: it fails, or returns nothing but
    NULL."""
    try:
        rows = run_query(connection, sql)
    except (*SQL_ERRORS, TimeoutError) as error:
        return f"the reference query fails: {str(error) or NO_MEMORY}"
    return (
        rows
        if any(value is not None for row in rows for value in row)
        else "the reference query returns nothing"
    )


def judge(row: dict[str, Any], predicted: str) -> SqlVerdict:
    """Judge one prediction for a row with `sql` (the reference) and `schema` or `sql_context`
    (CREATE TABLE and possibly INSERT statements); a row of `builtin:text-to-sql` also has `domain`
    and `fills`. Raises UserError for a row without a schema.
    """
    with contextlib.closing(QueryJudge(row)) as query_judge:
        return query_judge.judge(predicted)


def accuracy(verdicts: Iterable[SqlVerdict]) -> dict[str, float | int]:
    """Counts per outcome, `judged` (all but unjudged), and `accuracy` = correct / judged (NaN when
    none was judged)."""
    counts = Counter(verdict.outcome for verdict in verdicts)
    judged = sum(counts.values()) - counts["unjudged"]
    figures: dict[str, float | int] = {outcome: counts[outcome] for outcome in OUTCOMES}
    return figures | {
        "judged": judged,
        "accuracy": counts["correct"] / judged if judged else math.nan,
    }


def result_difference(expected: list[Row], found: list[Row], *, ordered: bool) -> str:
    """Describe the difference of two results in a few words; empty when they are equal in the sense
    of this module."""
    if len(expected) != len(found):
        return f"{len(found)} rows instead of {len(expected)}"
    if expected and len(expected[0]) != len(found[0]):
        return f"{len(found[0])} columns instead of {len(expected[0])}"
    if all(map(_rows_equal, expected, found)):
        return ""
    if ordered:
        return "other rows, or another order"
    return "" if _same_multiset(expected, found) else "other rows"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _rows_equal(left: Row, right: Row) -> bool:
    return all(map(_values_equal, left, right))


def _values_equal(left: Any, right: Any) -> bool:
    if _is_number(left) and _is_number(right):
        return math.isclose(left, right, rel_tol=RELATIVE_TOLERANCE, abs_tol=ABSOLUTE_TOLERANCE)
    return type(left) is type(right) and bool(left == right)


def _same_multiset(expected: list[Row], found: list[Row]) -> bool:
    """Whether the rows can be paired off so that each pair is equal.

    Equal rows are paired first; the rest is grouped by all that is no number, and paired by its
    numbers within a group. Closeness is not transitive, so that is a bipartite matching.
    """
    remaining = Counter(expected)
    remaining.subtract(found)
    if not any(remaining.values()):
        return True
    left_groups, right_groups = _groups(remaining.elements()), _groups((-remaining).elements())
    return left_groups.keys() == right_groups.keys() and all(
        len(left) == len(right_groups[key]) and _can_be_paired(left, right_groups[key])
        for key, left in left_groups.items()
    )


def _groups(rows: Iterable[Row]) -> dict[Row, list[Row]]:
    groups: dict[Row, list[Row]] = {}
    for row in rows:
        key = tuple(None if _is_number(value) else (type(value).__name__, value) for value in row)
        groups.setdefault(key, []).append(tuple(value for value in row if _is_number(value)))
    return groups


def _can_be_paired(left: list[Row], right: list[Row]) -> bool:
    """A perfect matching of close rows: in sorted order if that does, else by augmenting paths
    (Kuhn 1955)."""
    left, right = sorted(left), sorted(right)
    if all(map(_rows_equal, left, right)):
        return True
    if len(left[0]) < 2 or len(left) > _MAX_PAIRINGS:
        return False
    partner: dict[int, int] = {}
    return all(_augment(i, left, right, partner, set()) for i in range(len(left)))


def _augment(
    i: int, left: list[Row], right: list[Row], partner: dict[int, int], tried: set[int]
) -> bool:
    for j, row in enumerate(right):
        if j not in tried and _rows_equal(left[i], row):
            tried.add(j)
            if j not in partner or _augment(partner[j], left, right, partner, tried):
                partner[j] = i
                return True
    return False
