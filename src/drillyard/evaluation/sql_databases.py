"""Rows for a schema that has none, made so that one reference query finds something in them.

Execution accuracy needs rows; a JSONL of Spider has CREATE TABLE statements only. Here every table is filled with
seeded rows whose values are drawn to make the reference answer: literals of the query (and numbers just below and above
them) occur in the columns that it compares them with, and columns that it compares with each other draw from one small
set, so that joins meet. Accuracy is therefore execution on generated rows, not on the databases of the benchmark.

Seeds are tried in a fixed order, and the first three whose result says something (a row that is not all NULL or 0) are
kept. Cost: about 1 ms per seed tried. Limits: columns are told apart by name only; what the query finds by arithmetic,
or by conditions that meet rarely, may stay empty: such a row is `unjudged`.
"""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from drillyard.data.builtin.text_to_sql import Draw
from drillyard.evaluation.sql_sandbox import build_database, make_read_only, run_query
from drillyard.evaluation.sql_text import Token, tokens

FILLS = 3
ATTEMPTS = 24
"""Seeds tried; the last quarter with `_MANY_ROWS`, for a HAVING that asks for many."""

MAX_SECONDS = 20.0
"""Of all attempts, each of which may take the time of a build and of a query."""
MAX_COLUMNS = 2_000
"""Of a schema: a row of generated values costs about 2 microseconds per column."""

_MANY_ROWS = 500
_SHARED_KEYS = 6
_FRACTIONAL = ("REAL", "DEC", "FLOA", "DOUB")

_WORDS = ("Amber", "Birch", "Cedar", "Delta", "Ember", "Falcon", "Grove", "Harbor", "Indigo", "Juniper")


@dataclass
class _Needs:
    """What a query asks of the rows: per class of columns its literals; a column's class is found through `parent`."""

    parent: dict[str, str] = field(default_factory=dict)
    literals: dict[str, list[Any]] = field(default_factory=lambda: defaultdict(list))
    numeric: set[str] = field(default_factory=set)

    def find(self, column: str) -> str:
        """The representative of the column's class."""
        while (above := self.parent.get(column, column)) != column:
            column = above
        return column

    def join(self, left: str, right: str) -> None:
        """Let two columns draw from one set."""
        self.parent[self.find(left)] = self.find(right)

    def values(self, column: str) -> list[Any]:
        """Literals of the column's class, in the order of the query."""
        return [
            value for name, values in self.literals.items() if self.find(name) == self.find(column) for value in values
        ]


Schema = dict[str, list[tuple[str, str]]]


def tables(connection: sqlite3.Connection) -> Schema:
    """(name in lower case, declared type in upper case) of each column of each table."""
    names = [
        name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY rowid")
    ]
    return {
        table: [
            (str(name).lower(), str(declared).upper())
            for _, name, declared, *_ in connection.execute(f"PRAGMA table_info({_quoted(table)})")
        ]
        for table in names
    }


def has_rows(connection: sqlite3.Connection) -> bool:
    """Whether any table has a row."""
    return any(connection.execute(f"SELECT 1 FROM {_quoted(table)} LIMIT 1").fetchone() for table in tables(connection))


def generated_databases(schema: str, sql: str) -> tuple[list[sqlite3.Connection], str]:
    """Up to three filled, read-only databases on which the query says something; when there is none, why."""
    kept: list[sqlite3.Connection] = []
    deadline = monotonic() + MAX_SECONDS
    for seed in range(ATTEMPTS):
        if monotonic() > deadline:
            return kept, f"no generated rows within {MAX_SECONDS:g} s on which the reference query returns something"
        connection = build_database(schema)
        columns_of = tables(connection)
        if sum(map(len, columns_of.values())) > MAX_COLUMNS:
            raise ValueError(f"more than {MAX_COLUMNS:,} columns, which is too many to generate rows for")
        needs = _needs(sql, {name for columns in columns_of.values() for name, _ in columns})
        _insert(
            connection,
            columns_of,
            needs,
            Draw("generated", sql, seed),
            _MANY_ROWS if seed >= ATTEMPTS * 3 // 4 else 12 + 2 * seed,
        )
        try:
            rows = run_query(make_read_only(connection), sql)
        except TimeoutError:
            rows = []
        except (sqlite3.Error, sqlite3.Warning, ValueError, MemoryError) as error:
            connection.close()
            return kept, f"the reference query fails: {str(error) or 'more memory than is allowed'}"
        if any(any(row) for row in rows):
            kept.append(connection)
        else:
            connection.close()
        if len(kept) == FILLS:
            break
    return kept, "the reference query returns nothing on any generated rows"


def _needs(sql: str, columns: set[str]) -> _Needs:
    """Which columns a query sets equal (`a = b`, `a IN (SELECT b`, `SELECT a EXCEPT SELECT b`), and its literals.

    A literal belongs to the last column named before it.
    """
    needs, last, selected = _Needs(), None, None
    stream = list(_without_qualifiers(tokens(sql)))
    for i, token in enumerate(stream):
        name = token.text.lower() if token.kind == "name" and token.text.lower() in columns else None
        if name:
            other = _compared_column(stream, i, columns)
            if other:
                needs.join(name, other)
            if i and stream[i - 1].is_word("SELECT"):
                if selected and i > 1 and stream[i - 2].text.upper() in ("EXCEPT", "INTERSECT"):
                    needs.join(name, selected)
                selected = name
            if i > 1 and stream[i - 1].text == "(" and stream[i - 2].text.upper() in ("AVG", "SUM"):
                needs.numeric.add(name)
            last = name
        elif last and (token.kind == "string" or token.quote == '"'):
            needs.literals[last].append(_matching_text(token.text))
        elif last and token.kind == "number":
            if stream[i - 1].kind == "mark" and stream[i - 2].text.lower() == last:
                needs.numeric.add(last)
            needs.literals[last].append(_number(token.text))
    return needs


def _number(text: str) -> int | float:
    """As sqlite reads it: what does not fit into 64 bits is REAL. A little less here, for the numbers around it."""
    value = float(text)
    return value if set(text) & set(".eE") or abs(value) >= 2**62 else int(text)


def _without_qualifiers(stream: Iterable[Token]) -> Iterator[Token]:
    """`T1.name` as `name`: a name followed by a point is left out, and the point with it."""
    waiting: Token | None = None
    for token in stream:
        if waiting and not (token.kind == "mark" and token.text == "."):
            yield waiting
        elif waiting:
            waiting = None
            continue
        waiting = token if token.kind == "name" else None
        if not waiting:
            yield token
    if waiting:
        yield waiting


def _compared_column(stream: list[Token], i: int, columns: set[str]) -> str | None:
    """The column that the column at `i` is set equal to, directly or by [NOT] IN (SELECT [DISTINCT] column."""
    rest = stream[i + 1 : i + 7]
    if rest and rest[0].text in ("=", "=="):
        rest = rest[1:]
    else:
        words = [token for token in rest if not token.is_word("NOT")]
        if len(words) < 3 or not (words[0].is_word("IN") and words[1].text == "(" and words[2].is_word("SELECT")):
            return None
        rest = words[3:]
    rest = [token for token in rest if not token.is_word("DISTINCT")]
    found = rest[0].text.lower() if rest and rest[0].kind == "name" else None
    return found if found in columns else None


def _matching_text(pattern: str) -> str:
    """A text that a LIKE pattern matches; a text without wildcards is itself."""
    return pattern.replace("%", "").replace("_", "a") if "%" in pattern else pattern


def _insert(connection: sqlite3.Connection, schema: Schema, needs: _Needs, draw: Draw, rows: int) -> None:
    classes = _classes(schema, needs)
    for table, columns in schema.items():
        drawn = [
            _column(table, name, declared, needs, classes[needs.find(name)], draw, rows) for name, declared in columns
        ]
        marks = ", ".join("?" * len(columns))
        # OR IGNORE: a drawn row that breaks UNIQUE or CHECK is left out, the others stay.
        connection.executemany(f"INSERT OR IGNORE INTO {_quoted(table)} VALUES ({marks})", zip(*drawn, strict=True))


@dataclass
class _Class:
    """Columns that draw from one set: how many, whether they hold numbers, which one numbers its table's rows."""

    members: int = 0
    numeric: bool = False
    counter: tuple[str, str] | None = None


def _classes(schema: Schema, needs: _Needs) -> dict[str, _Class]:
    """The classes of all columns. A key that comes first in its table numbers the rows of the first such table only."""
    classes: dict[str, _Class] = defaultdict(_Class)
    for table, columns in schema.items():
        for position, (name, declared) in enumerate(columns):
            its = classes[needs.find(name)]
            its.members += 1
            its.numeric |= _is_numeric(declared) or _is_key(name) or name in needs.numeric
            if position == 0 and _is_key(name) and its.counter is None:
                its.counter = (table, name)
    return classes


def _column(table: str, name: str, declared: str, needs: _Needs, its: _Class, draw: Draw, rows: int) -> list[Any]:
    """One column's values: half of them literals of the query, the others of the column's type and role."""
    literals = [near for value in needs.values(name) for near in _near(value)]
    if its.counter == (table, name) and not literals:
        return list(range(1, rows + 1))

    def generic() -> Any:
        if its.numeric and its.members > 1:
            return 1 + draw.below(_SHARED_KEYS)
        if "DATE" in declared or "TIME" in declared:
            return f"{2000 + draw.below(24)}-{1 + draw.below(12):02}-{1 + draw.below(28):02}"
        if its.numeric:
            return draw.below(1000) / 10 if any(part in declared for part in _FRACTIONAL) else 1 + draw.below(100)
        return draw.one(_WORDS)

    return [draw.one(literals) if literals and draw.uniform() < 0.5 else generic() for _ in range(rows)]


def _is_numeric(declared: str) -> bool:
    return any(part in declared for part in ("INT", "NUM", "BOOL", *_FRACTIONAL))


def _is_key(name: str) -> bool:
    return name.endswith("id")


def _near(value: Any) -> list[Any]:
    """The literal, and for a number its neighbours, so that rows fall on both sides of a comparison."""
    return [value] if isinstance(value, str) else [value - 1, value, value + 1]


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
