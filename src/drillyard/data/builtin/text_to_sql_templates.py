"""The question and SQL templates of `builtin:text-to-sql`.

One spelling of SQL per template, several phrasings of the question. Every phrasing names its table and all that its SQL
needs, and no phrasing can be read as another template: so a question has one SQL, and two splits that share no SQL
share no question either.

Placeholders: `t` main table, `e` its event table, `id` the key that joins them. Columns: `a`, `b` any of the main
table, `l` its label, `c`, `d` categories, `n`, `m` numbers, `x` a number and `y` the category of the event table.
Values: `v`, `w` of `c`; `u` of `d`; `k` < `h` in the range of `n`; `j` in the range of `n`, one that occurs; `z` in the
range of `x`; `r` of `y`; `q` a label; `p` the first letter of a label; `i`, `g` small counts. A question shows a column
as words: `unit_price` is "unit price".
"""

from __future__ import annotations

import string
from dataclasses import dataclass
from functools import cached_property

COLUMN_SLOTS = "abcdlnxy"
VALUE_SLOTS = "vwujkhqprzig"


@dataclass(frozen=True)
class Template:
    """One SQL pattern and the phrasings of its question."""

    name: str
    sql: str
    questions: tuple[str, ...]

    @cached_property
    def placeholders(self) -> frozenset[str]:
        """Names of all placeholders of the SQL."""
        return frozenset(field for _, field, _, _ in string.Formatter().parse(self.sql) if field)

    @cached_property
    def column_slots(self) -> tuple[str, ...]:
        """The column placeholders in a fixed order; their columns make the (template, columns) combination."""
        return tuple(slot for slot in COLUMN_SLOTS if slot in self.placeholders)

    @cached_property
    def value_slots(self) -> tuple[str, ...]:
        """The value placeholders, in an order in which each can be drawn from those before it."""
        return tuple(slot for slot in VALUE_SLOTS if slot in self.placeholders)

    @property
    def joins(self) -> bool:
        """Whether the SQL reads the event table."""
        return "e" in self.placeholders


def _template(name: str, sql: str, *questions: str) -> Template:
    return Template(name, sql, questions)


TEMPLATES: tuple[Template, ...] = (
    _template("list", "SELECT {a} FROM {t}", "Show the {a} of all {t}.", "List the {a} of every row in {t}."),
    _template(
        "list-two",
        "SELECT {a}, {b} FROM {t}",
        "Show the {a} and {b} of all {t}.",
        "List the {a} and the {b} of every row in {t}.",
    ),
    _template(
        "distinct",
        "SELECT DISTINCT {c} FROM {t}",
        "Show the different {c} values of {t}.",
        "List each {c} of {t} once.",
    ),
    _template(
        "distinct-where",
        "SELECT DISTINCT {c} FROM {t} WHERE {n} > {k}",
        "Show the different {c} values of {t} with {n} above {k}.",
        "List each {c} of {t} once where {n} is more than {k}.",
    ),
    _template("count", "SELECT COUNT(*) FROM {t}", "How many {t} are there?", "Count all {t}."),
    _template(
        "count-distinct",
        "SELECT COUNT(DISTINCT {c}) FROM {t}",
        "How many different {c} values do {t} have?",
        "Count the different {c} values of {t}.",
    ),
    _template("max", "SELECT MAX({n}) FROM {t}", "What is the highest {n} of {t}?", "Find the maximum {n} of {t}."),
    _template("min", "SELECT MIN({n}) FROM {t}", "What is the lowest {n} of {t}?", "Find the minimum {n} of {t}."),
    _template("avg", "SELECT AVG({n}) FROM {t}", "What is the average {n} of {t}?", "Find the mean {n} of {t}."),
    _template("sum", "SELECT SUM({n}) FROM {t}", "What is the total {n} of {t}?", "Add up the {n} of {t}."),
    _template(
        "min-max",
        "SELECT MIN({n}), MAX({n}) FROM {t}",
        "What are the lowest and highest {n} of {t}?",
        "Find the minimum and maximum {n} of {t}.",
    ),
    _template(
        "where-is",
        "SELECT {a} FROM {t} WHERE {c} = '{v}'",
        "Show the {a} of {t} with {c} '{v}'.",
        "List the {a} of {t} where {c} is '{v}'.",
    ),
    _template(
        "where-not",
        "SELECT {a} FROM {t} WHERE {c} != '{v}'",
        "Show the {a} of {t} without {c} '{v}'.",
        "List the {a} of {t} where {c} is not '{v}'.",
    ),
    _template(
        "where-in",
        "SELECT {a} FROM {t} WHERE {c} IN ('{v}', '{w}')",
        "Show the {a} of {t} with {c} '{v}' or '{w}'.",
        "List the {a} of {t} where {c} is '{v}' or '{w}'.",
    ),
    _template(
        "where-above",
        "SELECT {a} FROM {t} WHERE {n} > {k}",
        "Show the {a} of {t} with {n} above {k}.",
        "List the {a} of {t} where {n} is more than {k}.",
    ),
    _template(
        "where-below",
        "SELECT {a} FROM {t} WHERE {n} < {k}",
        "Show the {a} of {t} with {n} below {k}.",
        "List the {a} of {t} where {n} is less than {k}.",
    ),
    _template(
        "where-number",
        "SELECT {a} FROM {t} WHERE {n} = {j}",
        "Show the {a} of {t} with {n} exactly {j}.",
        "List the {a} of {t} where {n} is {j}.",
    ),
    _template(
        "between",
        "SELECT {a} FROM {t} WHERE {n} BETWEEN {k} AND {h}",
        "Show the {a} of {t} with {n} between {k} and {h}.",
        "List the {a} of {t} where {n} is from {k} to {h}.",
    ),
    _template(
        "like",
        "SELECT {l} FROM {t} WHERE {l} LIKE '{p}%'",
        "Show the {l} of {t} starting with '{p}'.",
        "List the {l} of {t} that begins with '{p}'.",
    ),
    _template(
        "and",
        "SELECT {a} FROM {t} WHERE {c} = '{v}' AND {n} > {k}",
        "Show the {a} of {t} with {c} '{v}' and {n} above {k}.",
        "List the {a} of {t} where {c} is '{v}' and {n} is more than {k}.",
    ),
    _template(
        "or",
        "SELECT {a} FROM {t} WHERE {c} = '{v}' OR {n} < {k}",
        "Show the {a} of {t} with {c} '{v}' or {n} below {k}.",
        "List the {a} of {t} where {c} is '{v}' or {n} is less than {k}.",
    ),
    _template(
        "and-two",
        "SELECT {a} FROM {t} WHERE {c} = '{v}' AND {d} = '{u}'",
        "Show the {a} of {t} with {c} '{v}' and {d} '{u}'.",
        "List the {a} of {t} where {c} is '{v}' and {d} is '{u}'.",
    ),
    _template(
        "count-is",
        "SELECT COUNT(*) FROM {t} WHERE {c} = '{v}'",
        "How many {t} have {c} '{v}'?",
        "Count the {t} with {c} '{v}'.",
    ),
    _template(
        "count-above",
        "SELECT COUNT(*) FROM {t} WHERE {n} > {k}",
        "How many {t} have {n} above {k}?",
        "Count the {t} with {n} more than {k}.",
    ),
    _template(
        "count-below",
        "SELECT COUNT(*) FROM {t} WHERE {n} < {k}",
        "How many {t} have {n} below {k}?",
        "Count the {t} with {n} less than {k}.",
    ),
    _template(
        "avg-where",
        "SELECT AVG({n}) FROM {t} WHERE {c} = '{v}'",
        "What is the average {n} of {t} with {c} '{v}'?",
        "Find the mean {n} of {t} where {c} is '{v}'.",
    ),
    _template(
        "max-where",
        "SELECT MAX({n}) FROM {t} WHERE {c} = '{v}'",
        "What is the highest {n} of {t} with {c} '{v}'?",
        "Find the maximum {n} of {t} where {c} is '{v}'.",
    ),
    _template(
        "sum-where",
        "SELECT SUM({n}) FROM {t} WHERE {c} = '{v}'",
        "What is the total {n} of {t} with {c} '{v}'?",
        "Add up the {n} of {t} where {c} is '{v}'.",
    ),
    _template(
        "order",
        "SELECT {a} FROM {t} ORDER BY {n}",
        "Show the {a} of {t} ordered by {n}.",
        "List the {a} of {t} from lowest to highest {n}.",
    ),
    _template(
        "order-down",
        "SELECT {a} FROM {t} ORDER BY {n} DESC",
        "Show the {a} of {t} ordered by {n} descending.",
        "List the {a} of {t} from highest to lowest {n}.",
    ),
    _template(
        "highest",
        "SELECT {a} FROM {t} ORDER BY {n} DESC LIMIT 1",
        "Show the {a} of the {t} with the highest {n}.",
        "What is the {a} of the {t} with the most {n}?",
    ),
    _template(
        "lowest",
        "SELECT {a} FROM {t} ORDER BY {n} LIMIT 1",
        "Show the {a} of the {t} with the lowest {n}.",
        "What is the {a} of the {t} with the least {n}?",
    ),
    _template(
        "top",
        "SELECT {a} FROM {t} ORDER BY {n} DESC LIMIT {i}",
        "Show the {a} of the {i} {t} with the highest {n}.",
        "List the {a} of the top {i} {t} by {n}.",
    ),
    _template(
        "highest-where",
        "SELECT {a} FROM {t} WHERE {c} = '{v}' ORDER BY {n} DESC LIMIT 1",
        "Show the {a} of the {t} with {c} '{v}' and the highest {n}.",
        "What is the {a} of the {t} with {c} '{v}' and the most {n}?",
    ),
    _template(
        "above-average",
        "SELECT {a} FROM {t} WHERE {n} > (SELECT AVG({n}) FROM {t})",
        "Show the {a} of {t} with {n} above average.",
        "List the {a} of {t} whose {n} is more than the mean.",
    ),
    _template(
        "below-average",
        "SELECT {a} FROM {t} WHERE {n} < (SELECT AVG({n}) FROM {t})",
        "Show the {a} of {t} with {n} below average.",
        "List the {a} of {t} whose {n} is less than the mean.",
    ),
    _template(
        "group-count",
        "SELECT {c}, COUNT(*) FROM {t} GROUP BY {c}",
        "How many {t} are there for each {c}?",
        "Count the {t} per {c}.",
    ),
    _template(
        "group-avg",
        "SELECT {c}, AVG({n}) FROM {t} GROUP BY {c}",
        "What is the average {n} of {t} for each {c}?",
        "Find the mean {n} of {t} per {c}.",
    ),
    _template(
        "group-max",
        "SELECT {c}, MAX({n}) FROM {t} GROUP BY {c}",
        "What is the highest {n} of {t} for each {c}?",
        "Find the maximum {n} of {t} per {c}.",
    ),
    _template(
        "group-sum",
        "SELECT {c}, SUM({n}) FROM {t} GROUP BY {c}",
        "What is the total {n} of {t} for each {c}?",
        "Add up the {n} of {t} per {c}.",
    ),
    _template(
        "having",
        "SELECT {c} FROM {t} GROUP BY {c} HAVING COUNT(*) > {g}",
        "Which {c} values have more than {g} {t}?",
        "List each {c} shared by more than {g} {t}.",
    ),
    _template(
        "having-avg",
        "SELECT {c} FROM {t} GROUP BY {c} HAVING AVG({n}) > {k}",
        "Which {c} values of {t} have an average {n} above {k}?",
        "List each {c} of {t} whose mean {n} is more than {k}.",
    ),
    _template(
        "most-common",
        "SELECT {c} FROM {t} GROUP BY {c} ORDER BY COUNT(*) DESC LIMIT 1",
        "What is the most common {c} of {t}?",
        "Which {c} do most {t} have?",
    ),
    _template(
        "join-is",
        "SELECT {x} FROM {t} JOIN {e} USING ({id}) WHERE {l} = '{q}'",
        "Show the {x} of {e} of the {t} with {l} '{q}'.",
        "List the {x} of {e} where the {l} of {t} is '{q}'.",
    ),
    _template(
        "join-above",
        "SELECT {l} FROM {t} JOIN {e} USING ({id}) WHERE {x} > {z}",
        "Show the {l} of {t} having {e} with {x} above {z}.",
        "List the {l} of {t} for {e} where {x} is more than {z}.",
    ),
    _template(
        "join-event",
        "SELECT {a} FROM {t} JOIN {e} USING ({id}) WHERE {y} = '{r}'",
        "Show the {a} of {t} having {e} with {y} '{r}'.",
        "List the {a} of {t} for {e} where {y} is '{r}'.",
    ),
    _template(
        "join-sum",
        "SELECT SUM({x}) FROM {t} JOIN {e} USING ({id}) WHERE {c} = '{v}'",
        "What is the total {x} of {e} of {t} with {c} '{v}'?",
        "Add up the {x} of {e} where the {c} of {t} is '{v}'.",
    ),
    _template(
        "join-group",
        "SELECT {l}, SUM({x}) FROM {t} JOIN {e} USING ({id}) GROUP BY {l}",
        "What is the total {x} of {e} for each {l} of {t}?",
        "Add up the {x} of {e} per {l} of {t}.",
    ),
    _template(
        "join-count",
        "SELECT {l}, COUNT(*) FROM {t} JOIN {e} USING ({id}) GROUP BY {l}",
        "How many {e} are there for each {l} of {t}?",
        "Count the {e} per {l} of {t}.",
    ),
    _template(
        "without",
        "SELECT {a} FROM {t} WHERE {id} NOT IN (SELECT {id} FROM {e})",
        "Show the {a} of {t} without {e}.",
        "List the {a} of {t} that have no {e}.",
    ),
)
