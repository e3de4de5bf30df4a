"""`builtin:text-to-sql`: schemas, questions and SQL over many templates and domains, seeded and
executable.

A row is drawn: template, domain, columns, values that occur in the shown database; its SQL is
executed in sqlite, and drawn again if the result is empty. Hashes, not draws, decide the part that
a row belongs to:

- a (template, columns) combination belongs to `combinations`, to `combinations-development`, or to
  training;
- among the trained combinations, an SQL text belongs to `questions`, to `questions-development`, or
  to training;
- a domain belongs to `databases`, to `databases-development`, or to training.

So no two parts share an SQL text, for any seeds and sizes; and since a question has exactly one SQL
(`text_to_sql_vocabulary.yaml`), they share no question either. In a held-out part each SQL occurs
once.

A database is a pure function of (domain, fill seed): `fill` returns its rows. The column `fills`
names the shown database first, then two others on which the SQL gives other results, if possible,
for test-suite accuracy.

A model can memorise fifteen trained domains and then use their names for a new table. The option
`made_up` takes a share of the training rows from 400 domains with invented names, which a model can
only copy from the prompt. The held-out parts do not depend on it.

Cost: about 16,000 training rows per second on one core, in constant memory. Limits: one spelling of
SQL per template, integers and short texts only, at most two tables.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from random import Random
from typing import Any, TypeVar

from drillyard.data.builtin.text_to_sql_vocabulary import (
    CATEGORY_VALUES,
    DOMAINS,
    EXTRA_CATEGORIES,
    EXTRA_NUMBERS,
    LABELS,
    NUMBER_RANGES,
    TEMPLATES,
    Domain,
    Template,
)
from drillyard.errors import UserError

VERSION = 1
"""Raised by hand with every change that changes a row; part of the content key."""

DEVELOPMENT = "-development"
TEST_PARTS = ("questions", "combinations", "databases")
HELD_OUT_PARTS = (*TEST_PARTS, *(part + DEVELOPMENT for part in TEST_PARTS))

_SQL_PERCENT = 4
_COMBINATION_PERCENT = 6
_ROWS_PER_FILL = {True: 200, False: 4}
_FILL_ATTEMPTS = 60
_MADE_UP_DOMAINS = 400
_MAX_DRAWS_WITHOUT_A_ROW = 300_000

Item = TypeVar("Item")
Columns = dict[str, list[Any]]
Fill = dict[str, Columns]


def stable_hash(*key: object) -> int:
    """64 bits that depend on the key alone: the same under every Python version and hash seed."""
    return int.from_bytes(
        blake2b("\x1f".join(map(str, key)).encode(), digest_size=8).digest(), "big"
    )


class Draw:
    """Random choices from `Random.random()` alone, the only method whose sequence per seed Python
    guarantees."""

    def __init__(self, *key: object) -> None:
        self.uniform = Random(stable_hash(*key)).random

    def below(self, bound: int) -> int:
        """An integer in [0, bound)."""
        return int(self.uniform() * bound)

    def one(self, items: Sequence[Item]) -> Item:
        """One of the items."""
        return items[int(self.uniform() * len(items))]

    def some(self, items: Sequence[Item], count: int) -> list[Item]:
        """`count` different items in random order."""
        pool = list(items)
        for i in range(count):
            j = i + int(self.uniform() * (len(pool) - i))
            pool[i], pool[j] = pool[j], pool[i]
        return pool[:count]


def fill(domain: Domain, seed: int) -> Fill:
    """The rows of both tables of a domain, by column: a pure function of (domain, seed).

    Numbers and labels are unique within a column, so an order or a highest row is never ambiguous.
    At least two rows of the main table have no event.
    """
    draw = Draw("fill", domain.table, seed)
    rows, events = 9 + draw.below(6), 14 + draw.below(7)
    keys = list(range(1, rows + 1))
    main: Columns = {domain.key: keys, domain.label: list(draw.some(LABELS, rows))}
    main |= {name: [draw.one(CATEGORY_VALUES[name]) for _ in keys] for name in domain.categories}
    main |= {name: list(draw.some(_number_values(name), rows)) for name in domain.numbers}
    busy = draw.some(keys, rows - 2 - draw.below(3))
    event: Columns = {domain.key: [draw.one(busy) for _ in range(events)]}
    event[domain.event_category] = [
        draw.one(CATEGORY_VALUES[domain.event_category]) for _ in range(events)
    ]
    event |= {name: list(draw.some(_number_values(name), events)) for name in domain.event_numbers}
    return {domain.table: main, domain.events: event}


def _number_values(column: str) -> range:
    low, high, step = NUMBER_RANGES[column]
    return range(low, high + 1, step)


def domain_of(table: str) -> Domain:
    """The domain with this main table. Raises KeyError if there is none."""
    return (
        next((domain for domain in DOMAINS if domain.table == table), None)
        or _made_up_domains()[table]
    )


@cache
def _made_up_domains() -> dict[str, Domain]:
    """Training domains with invented table names, which a model can only copy from the schema."""
    trained = [domain for domain in DOMAINS if domain.role == "train"]
    categories = sorted(
        {name for domain in trained for name in domain.categories} | set(EXTRA_CATEGORIES)
    )
    numbers = sorted({name for domain in trained for name in domain.numbers} | set(EXTRA_NUMBERS))
    draw, made = Draw("made-up domains"), dict[str, Domain]()
    while len(made) < _MADE_UP_DOMAINS:
        events = draw.one(trained)
        word = _invented_word(draw)
        made[word + "s"] = Domain(
            table=word + "s",
            label=draw.one(("name", "title")),
            categories=tuple(draw.some(categories, 4)),
            numbers=tuple(draw.some(numbers, 4)),
            events=_invented_word(draw) + "s",
            key=word + "_id",
            event_category=events.event_category,
            event_numbers=events.event_numbers,
            role="train",
        )
    return made


def _invented_word(draw: Draw) -> str:
    onset, vowel = "bdfgklmnprstvz", "aeiou"
    return "".join(draw.one(letters) for letters in (onset, vowel, onset, vowel, "lmnrtk"))


def create_tables(domain: Domain) -> str:
    """CREATE TABLE statements for all columns of a domain, keys first."""
    return _schema(
        (domain.table, (domain.key, *domain.columns)),
        (domain.events, (domain.key, *domain.event_columns)),
    )


def _schema(*tables: tuple[str, Sequence[str]]) -> str:
    return "; ".join(
        f"CREATE TABLE {table} ({', '.join(map(_declared, columns))})" for table, columns in tables
    )


def _declared(column: str) -> str:
    return (
        f"{column} INT" if column in NUMBER_RANGES or column.endswith("_id") else f"{column} TEXT"
    )


def insert_fill(connection: sqlite3.Connection, rows: Fill) -> None:
    """Insert a fill into those of its tables and columns that the connection's schema has."""
    for table, by_column in rows.items():
        if shown := [name for _, name, *_ in connection.execute(f"PRAGMA table_info({table})")]:
            placeholders = ", ".join("?" * len(shown))
            connection.executemany(
                f"INSERT INTO {table} ({', '.join(shown)}) VALUES ({placeholders})",
                zip(*(by_column[name] for name in shown), strict=True),
            )


class _Database:
    """A fill of a domain with all its columns, in sqlite; a query returns the same here as on any
    shown schema."""

    def __init__(self, domain: Domain, seed: int) -> None:
        self.domain, self.seed = domain, seed
        self.rows = fill(domain, seed)
        self.connection = sqlite3.connect(":memory:", isolation_level=None)
        self.connection.executescript(create_tables(domain))
        insert_fill(self.connection, self.rows)

    def result(self, candidate: _Candidate) -> list[tuple[Any, ...]] | None:
        """The result of the candidate's SQL, or None if it is trivial: no row, only NULL or zero,
        or a tie."""
        result = self.connection.execute(candidate.sql).fetchall()
        if not result or not any(result[0]):
            return None
        if candidate.template.name == "most-common":
            counts = Counter(self.rows[self.domain.table][candidate.columns[0]]).most_common(2)
            if len(counts) > 1 and counts[0][1] == counts[1][1]:
                return None
        return result


@dataclass(frozen=True)
class _Candidate:
    template: Template
    columns: tuple[str, ...]
    slots: dict[str, Any]
    sql: str


def _candidate(draw: Draw, database: _Database) -> _Candidate:
    """Draw a template, its columns and its values; values in equalities come from the database."""
    domain, template = database.domain, draw.one(TEMPLATES)
    slots: dict[str, Any] = {
        "t": domain.table,
        "e": domain.events,
        "id": domain.key,
        "l": domain.label,
    }
    main, event = database.rows[domain.table], database.rows[domain.events]
    needed = template.placeholders
    slots["c"], slots["d"] = draw.some(domain.categories, 2)
    slots["n"], slots["x"], slots["y"] = (
        draw.one(domain.numbers),
        draw.one(domain.event_numbers),
        domain.event_category,
    )
    if "a" in needed:
        taken = {slots[slot] for slot in needed & {"c", "d", "n"}}
        slots["a"], slots["b"] = draw.some(
            [name for name in domain.columns if name not in taken], 2
        )
        if "b" not in needed and draw.uniform() < 0.35:
            slots["a"] = domain.label
    for slot in template.value_slots:
        slots[slot] = _VALUES[slot](draw, slots, main, event)
    columns = tuple(slots[slot] for slot in template.column_slots)
    return _Candidate(template, columns, slots, template.sql.format_map(slots))


def _threshold(column: str, fraction: float) -> int:
    """The value at this fraction of the column's range, on its step."""
    return NUMBER_RANGES[column][0] + _part_of_range(column, fraction)


def _part_of_range(column: str, fraction: float, more_steps: int = 0) -> int:
    """This fraction of the column's range, in whole steps."""
    low, high, step = NUMBER_RANGES[column]
    return step * (more_steps + int(fraction * (high - low) / step))


_VALUES: dict[str, Callable[[Draw, dict[str, Any], Columns, Columns], Any]] = {
    "v": lambda draw, slots, main, event: draw.one(main[slots["c"]]),
    "w": lambda draw, slots, main, event: draw.one(
        [v for v in CATEGORY_VALUES[slots["c"]] if v != slots["v"]]
    ),
    "u": lambda draw, slots, main, event: draw.one(main[slots["d"]]),
    "j": lambda draw, slots, main, event: draw.one(main[slots["n"]]),
    "k": lambda draw, slots, main, event: _threshold(slots["n"], 0.15 + 0.55 * draw.uniform()),
    "z": lambda draw, slots, main, event: _threshold(slots["x"], 0.15 + 0.55 * draw.uniform()),
    "h": lambda draw, slots, main, event: (
        slots["k"] + _part_of_range(slots["n"], 0.1 + 0.2 * draw.uniform(), 1)
    ),
    "q": lambda draw, slots, main, event: draw.one(main[slots["l"]]),
    "p": lambda draw, slots, main, event: draw.one(main[slots["l"]])[0],
    "r": lambda draw, slots, main, event: draw.one(event[slots["y"]]),
    "i": lambda draw, slots, main, event: 2 + draw.below(4),
    "g": lambda draw, slots, main, event: 1 + draw.below(2),
}
"""The value of each placeholder that is not a column; `text_to_sql_vocabulary.yaml` explains the
letters."""


def part_of(domain: Domain, template: Template, columns: tuple[str, ...], sql: str) -> str:
    """The only part that may have this SQL: "train" or a held-out part. Does not depend on seed and
    size."""
    if domain.role != "train":
        return "databases" + (DEVELOPMENT if domain.role == "development" else "")
    if columns:
        percent = stable_hash("combination", template.name, *columns) % 100
        if percent < 2 * _COMBINATION_PERCENT:
            return "combinations" + (DEVELOPMENT if percent < _COMBINATION_PERCENT else "")
    percent = stable_hash("sql", sql) % 100
    if percent < 2 * _SQL_PERCENT:
        return "questions" + (DEVELOPMENT if percent < _SQL_PERCENT else "")
    return "train"


def _domains_of(part: str) -> list[Domain]:
    role = {"databases": "test", "databases" + DEVELOPMENT: "development"}.get(part, "train")
    return [domain for domain in DOMAINS if domain.role == role]


def rows(part: str, count: int, seed: int, made_up: float = 0.0) -> Iterator[dict[str, Any]]:
    """`count` rows of a part, in a fixed order; the first rows of a larger count are the rows of a
    smaller one.

    Columns: `schema` (as shown to the model), `question`, `sql`, `domain` (its main table),
    `template`, `columns` (those of the combination), `fills` (seeds: the shown database and two
    others). In a held-out part no SQL occurs twice. `made_up` is the share of training rows about
    domains with invented names; held-out parts have none.
    """
    draw = Draw("rows", part, seed)
    training = part == "train"
    domains = _domains_of(part)
    named = len(domains)
    if training and made_up:
        domains += _made_up_domains().values()
    databases = [_Database(domain, draw.below(2**31)) for domain in domains]
    uses, seen = [0] * len(databases), set[str]()
    made = without = 0
    while made < count:
        without += 1
        if without > _MAX_DRAWS_WITHOUT_A_ROW:
            raise UserError(
                f"builtin:text-to-sql has only {made:,} rows in {part}: lower held_out_examples."
            )
        invented = len(domains) > named and draw.uniform() < made_up
        number = named + draw.below(len(domains) - named) if invented else draw.below(named)
        database = databases[number]
        candidate = _candidate(draw, database)
        if (
            candidate.sql in seen
            or part_of(database.domain, candidate.template, candidate.columns, candidate.sql)
            != part
            or (result := database.result(candidate)) is None
        ):
            continue
        further = (
            [draw.below(2**31) for _ in range(2)]
            if training
            else _further_fills(draw, database, candidate, result)
        )
        if not training:
            seen.add(candidate.sql)
        yield _row(draw, database, candidate, further)
        made, without = made + 1, 0
        uses[number] += 1
        if uses[number] % _ROWS_PER_FILL[training] == 0:
            database.connection.close()
            databases[number] = _Database(database.domain, draw.below(2**31))


def _further_fills(
    draw: Draw, shown: _Database, candidate: _Candidate, result: list[tuple[Any, ...]]
) -> list[int]:
    """Two fills on which the result is not trivial and, if possible, differs from the results
    before."""
    different: list[int] = []
    others: list[int] = []
    results = [result]
    for _ in range(_FILL_ATTEMPTS):
        database = _Database(shown.domain, draw.below(2**31))
        further = database.result(candidate)
        database.connection.close()
        if further is not None and further not in results:
            results.append(further)
            different.append(database.seed)
        elif further is not None:
            others.append(database.seed)
        if len(different) == 2:
            break
    return (different + others + [shown.seed, shown.seed])[:2]


def _row(
    draw: Draw, database: _Database, candidate: _Candidate, further: list[int]
) -> dict[str, Any]:
    """The row: a phrasing of the question, and a schema of the needed columns and others, in random
    order."""
    domain, template, slots = database.domain, candidate.template, candidate.slots
    main = [slots[slot] for slot in template.column_slots if slot not in "xy"]
    event = [slots[slot] for slot in template.column_slots if slot in "xy"]
    both = template.joins or draw.uniform() < 0.2
    shown = _shown(
        draw, main, domain.columns, 3 + draw.below(2 if both else 3), domain.key if both else None
    )
    tables = [(domain.table, shown)]
    if both:
        tables.append(
            (
                domain.events,
                _shown(draw, event, domain.event_columns, 1 + draw.below(2), domain.key),
            )
        )
        if draw.uniform() < 0.5:
            tables.reverse()
    words = {
        name: value.replace("_", " ") if isinstance(value, str) else value
        for name, value in slots.items()
    }
    return {
        "schema": _schema(*tables),
        "question": draw.one(template.questions).format_map(words),
        "sql": candidate.sql,
        "domain": domain.table,
        "template": template.name,
        "columns": list(candidate.columns),
        "fills": [database.seed, *further],
    }


def _shown(
    draw: Draw, needed: list[str], columns: Sequence[str], count: int, key: str | None
) -> list[str]:
    """The needed columns and others up to `count`, and the key, in random order."""
    others = [name for name in columns if name not in needed]
    chosen = [*needed, *draw.some(others, min(len(others), max(0, count - len(needed))))]
    if key:
        chosen.append(key)
    return draw.some(chosen, len(chosen))
