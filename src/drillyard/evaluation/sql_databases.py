"""The in-memory databases on which a row's queries are compared, read-only once they are built.

A row of `builtin:text-to-sql` names its fills; a row with INSERT statements
(gretelai/synthetic_text_to_sql) has one database of its own; for a row with CREATE TABLE statements
alone (Spider as JSONL), rows are generated.

Generated rows are drawn to make the reference query return something: its literals (and numbers
just below and above them) occur in the columns that it compares them with, and columns that it
compares with each other draw from one small set, so that joins match. Accuracy is therefore
execution on generated rows, not on the databases of the benchmark. Seeds are tried in a fixed
order, and the first three with a result (a row that is not all NULL or 0) are kept. Cost: about 1
ms per seed. Limits: columns are identified by name only; a query that selects by arithmetic, or by
conditions that are rarely true, may still return nothing: such a row is `unjudged`.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from drillyard.data.builtin import text_to_sql
from drillyard.data.builtin.text_to_sql import Draw
from drillyard.errors import UserError
from drillyard.evaluation.sql_sandbox import (
    NO_MEMORY,
    SQL_ERRORS,
    build_database,
    make_read_only,
    run_query,
)
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
_NUMERIC = ("INT", "NUM", "BOOL", *_FRACTIONAL)
_WORDS = (
    "Amber",
    "Birch",
    "Cedar",
    "Delta",
    "Ember",
    "Falcon",
    "Grove",
    "Harbor",
    "Indigo",
    "Juniper",
)
SCHEMA_COLUMNS = ("schema", "sql_context")


def databases(row: dict[str, Any]) -> list[tuple[sqlite3.Connection | None, str]]:
    """The row's databases, read-only, or one (None, why it cannot be built). Raises UserError
    without a schema."""
    schema = next((row[name] for name in SCHEMA_COLUMNS if row.get(name)), None)
    if schema is None and any(name in row for name in SCHEMA_COLUMNS):
        return [(None, "the row's schema is empty")]
    if schema is None:
        raise UserError(
            f"SQL execution needs a column {' or '.join(SCHEMA_COLUMNS)} with CREATE TABLE"
            f" statements; this row has {', '.join(row)}."
        )
    try:
        if row.get("fills"):
            return _built_in_databases(row, str(schema))
        own = build_database(str(schema))
        if any(
            own.execute(f"SELECT 1 FROM {_quoted(table)} LIMIT 1").fetchone()
            for table in tables(own)
        ):
            return [(make_read_only(own), "")]
        own.close()
        fills, problem = generated_databases(str(schema), str(row["sql"]))
    except SQL_ERRORS as error:
        return [(None, f"the schema cannot be built in sqlite: {str(error) or NO_MEMORY}")]
    return [(connection, "") for connection in fills] or [(None, problem)]


def _built_in_databases(
    row: dict[str, Any], schema: str
) -> list[tuple[sqlite3.Connection | None, str]]:
    found: list[tuple[sqlite3.Connection | None, str]] = []
    try:
        for seed in row["fills"]:
            connection = build_database(schema)
            text_to_sql.insert_fill(
                connection, text_to_sql.fill(text_to_sql.domain_of(str(row["domain"])), int(seed))
            )
            found.append((make_read_only(connection), ""))
    except (KeyError, TypeError):  # a data set from elsewhere may have columns of these names too
        return [(None, "its columns fills, domain and schema are not those of builtin:text-to-sql")]
    return found


@dataclass
class _Needs:
    """Rows that a query needs: per class of columns its literals; a column's class is found through
    `parent`."""

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
            value
            for name, values in self.literals.items()
            if self.find(name) == self.find(column)
            for value in values
        ]


Schema = dict[str, list[tuple[str, str]]]


def tables(connection: sqlite3.Connection) -> Schema:
    """(name in lower case, declared type in upper case) of each column of each table."""
    found = {}
    for master in ("sqlite_master", "sqlite_temp_master"):
        names = connection.execute(
            f"SELECT name FROM {master} WHERE type = 'table' ORDER BY rowid"
        ).fetchall()
        for (table,) in names:
            if not str(table).lower().startswith("sqlite_"):  # sqlite's own
                info = connection.execute(f"PRAGMA table_info({_quoted(table)})")
                found[table] = [
                    (str(name).lower(), str(declared).upper()) for _, name, declared, *_ in info
                ]
    return found


def _unique_columns(connection: sqlite3.Connection, names: Iterable[str]) -> set[tuple[str, str]]:
    """(table, column in lower case) of the columns that are a primary key or UNIQUE by
    themselves."""
    found = set()
    for table in names:
        keys = [
            str(name)
            for _, name, *_, place in connection.execute(f"PRAGMA table_info({_quoted(table)})")
            if place
        ]
        groups = [keys]
        for _, index, unique, *_ in connection.execute(f"PRAGMA index_list({_quoted(table)})"):
            if unique:
                info = connection.execute(f"PRAGMA index_info({_quoted(index)})")
                groups.append([str(name) for *_, name in info])
        found |= {(table, group[0].lower()) for group in groups if len(group) == 1}
    return found


def generated_databases(schema: str, sql: str) -> tuple[list[sqlite3.Connection], str]:
    """Up to three filled, read-only databases on which the query returns something; when there is
    none, why."""
    kept: list[sqlite3.Connection] = []
    columns_of: Schema = {}
    needs: _Needs | None = None
    deadline = monotonic() + MAX_SECONDS
    for seed in range(ATTEMPTS):
        if monotonic() > deadline:
            return (
                kept,
                (
                    f"no generated rows within {MAX_SECONDS:g} s on which the reference query"
                    " returns something"
                ),
            )
        connection = build_database(schema)
        if needs is None:
            columns_of = tables(connection)
            if sum(map(len, columns_of.values())) > MAX_COLUMNS:
                raise ValueError(
                    f"more than {MAX_COLUMNS:,} columns, which is too many to generate rows for"
                )
            names = {name for columns in columns_of.values() for name, _ in columns}
            needs = _needs(_with_views(connection, sql), names)
            classes = _classes(columns_of, needs)
            unique = _unique_columns(connection, columns_of)
        num_rows = _MANY_ROWS if seed >= ATTEMPTS * 3 // 4 else 12 + 2 * seed
        draw = Draw("generated", sql, seed)
        for table, columns in columns_of.items():
            if not columns:
                continue
            drawn = [
                _column(table, *column, needs, classes[needs.find(column[0])], draw, num_rows)
                for column in columns
            ]
            for place, (name, _) in enumerate(columns):
                # In every other attempt, so that keys are missing from a table in the others.
                if seed % 2 and (table, name) in unique:
                    drawn[place] = _distinct(drawn[place])
            _insert(connection, table, list(zip(*drawn, strict=True)))
        try:
            rows = run_query(make_read_only(connection), sql)
        except TimeoutError:
            rows = []
        except SQL_ERRORS as error:
            connection.close()
            return kept, f"the reference query fails: {str(error) or NO_MEMORY}"
        if any(any(row) for row in rows):
            kept.append(connection)
        else:
            connection.close()
        if len(kept) == FILLS:
            break
    return kept, "the reference query returns nothing on any generated rows"


def _insert(connection: sqlite3.Connection, table: str, rows: list[tuple[Any, ...]]) -> None:
    """Insert those of the drawn rows that break no constraint of the table."""
    slots = ", ".join("?" * len(rows[0]))
    statement = f"INSERT OR IGNORE INTO {_quoted(table)} VALUES ({slots})"
    try:
        connection.executemany(statement, rows)
    except sqlite3.IntegrityError:  # a type is wrong, which OR IGNORE does not cover
        for row in rows:
            with contextlib.suppress(sqlite3.IntegrityError):
                connection.execute(statement, row)


def _distinct(values: list[Any]) -> list[Any]:
    """The values, each of those that came before replaced by another one."""
    seen: set[Any] = set()
    found = []
    for value in values:
        while value in seen:
            value = f"{value} {len(seen)}" if isinstance(value, str) else value + 1
        seen.add(value)
        found.append(value)
    return found


def _with_views(connection: sqlite3.Connection, sql: str) -> str:
    """The query, and the definitions of the views that it names."""
    named = {token.text.lower() for token in tokens(sql) if token.kind == "name"}
    views = connection.execute("SELECT name, sql FROM sqlite_master WHERE type = 'view'")
    return "\n;".join([sql, *(text for name, text in views if str(name).lower() in named)])


def _needs(sql: str, columns: set[str]) -> _Needs:
    """Find columns that a query sets equal (`a = b`, `a IN (SELECT b`, `SELECT a EXCEPT SELECT b`),
    and its literals.

    A literal belongs to the last column named before it.
    """
    needs, last, selected = _Needs(), None, None
    stream = _without_qualifiers(tokens(sql))
    for i, token in enumerate(stream):
        name = (
            token.text.lower() if token.kind == "name" and token.text.lower() in columns else None
        )
        if name:
            if other := _compared_column(stream, i, columns):
                needs.join(name, other)
            if i and stream[i - 1].is_word("SELECT"):
                if selected and i > 1 and stream[i - 2].text.upper() in ("EXCEPT", "INTERSECT"):
                    needs.join(name, selected)
                selected = name
            if i > 1 and stream[i - 1].text == "(" and stream[i - 2].text.upper() in ("AVG", "SUM"):
                needs.numeric.add(name)
            last = name
        elif last and (token.kind == "string" or token.quote == '"'):
            # A LIKE pattern becomes a text that it matches.
            text = token.text
            needs.literals[last].append(
                text.replace("%", "").replace("_", "a") if "%" in text else text
            )
        elif last and token.kind == "number":
            if stream[i - 1].kind == "symbol" and stream[i - 2].text.lower() == last:
                needs.numeric.add(last)
            needs.literals[last].append(_number(token.text))
    return needs


def _number(text: str) -> int | float:
    """As sqlite reads it: what does not fit into 64 bits is REAL. A little less here, for the
    numbers around it."""
    value = float(text)
    return value if set(text) & set(".eE") or abs(value) >= 2**62 else int(text)


def _without_qualifiers(stream: Iterable[Token]) -> list[Token]:
    """`T1.name` as `name`: a name followed by a point is left out, and the point with it."""
    kept: list[Token] = []
    for token in stream:
        if kept and kept[-1].kind == "name" and token.kind == "symbol" and token.text == ".":
            kept.pop()
        else:
            kept.append(token)
    return kept


def _compared_column(stream: list[Token], i: int, columns: set[str]) -> str | None:
    """The column that the column at `i` is set equal to, directly or by [NOT] IN (SELECT [DISTINCT]
    column."""
    rest = stream[i + 1 : i + 7]
    if rest and rest[0].text in ("=", "=="):
        rest = rest[1:]
    else:
        words = [token for token in rest if not token.is_word("NOT")]
        if len(words) < 3 or not (
            words[0].is_word("IN") and words[1].text == "(" and words[2].is_word("SELECT")
        ):
            return None
        rest = words[3:]
    rest = [token for token in rest if not token.is_word("DISTINCT")]
    found = rest[0].text.lower() if rest and rest[0].kind == "name" else None
    return found if found in columns else None


@dataclass
class _Class:
    """Columns that draw from one set: how many, whether they hold numbers, which one numbers its
    table's rows."""

    members: int = 0
    numeric: bool = False
    counter: tuple[str, str] | None = None


def _classes(schema: Schema, needs: _Needs) -> dict[str, _Class]:
    """The classes of all columns. A key that comes first in its table numbers the rows of the first
    such table only."""
    classes: dict[str, _Class] = defaultdict(_Class)
    for table, columns in schema.items():
        for position, (name, declared) in enumerate(columns):
            its = classes[needs.find(name)]
            its.members += 1
            its.numeric |= (
                any(part in declared for part in _NUMERIC) or _is_key(name) or name in needs.numeric
            )
            if position == 0 and _is_key(name) and its.counter is None:
                its.counter = (table, name)
    return classes


def _column(
    table: str, name: str, declared: str, needs: _Needs, its: _Class, draw: Draw, rows: int
) -> list[Any]:
    """One column's values: half of them literals of the query, the others of the column's type and
    role."""
    # A number has its neighbours, so that rows fall on both sides of a comparison.
    literals = [
        near
        for value in needs.values(name)
        for near in ([value] if isinstance(value, str) else [value - 1, value, value + 1])
    ]
    if its.counter == (table, name) and not literals:
        return list(range(1, rows + 1))

    def generic() -> Any:
        if its.numeric and its.members > 1:
            return 1 + draw.below(_SHARED_KEYS)
        if "DATE" in declared or "TIME" in declared:
            return f"{2000 + draw.below(24)}-{1 + draw.below(12):02}-{1 + draw.below(28):02}"
        if its.numeric:
            return (
                draw.below(1000) / 10
                if any(part in declared for part in _FRACTIONAL)
                else 1 + draw.below(100)
            )
        return draw.one(_WORDS)

    return [
        draw.one(literals) if literals and draw.uniform() < 0.5 else generic() for _ in range(rows)
    ]


def _is_key(name: str) -> bool:
    return name.endswith("id")


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
