"""sqlite in a sandbox: build a database from a data set's statements, and run one query of any
content.

Limits hold from the first statement on: on the lengths of texts and values, pages of the database,
memory of all of sqlite in this process (nothing goes to a disk), functions (those in `_FUNCTIONS`),
virtual-machine steps (deterministic) and, as a backstop, seconds. A built database is then
read-only twice over: `PRAGMA query_only` and an authorizer that permits only reading. A query's
result is limited by rows and bytes.

sqlite counts steps only between instructions, so one call of a function may overrun the seconds, by
about 0.1 s.
"""

from __future__ import annotations

import sqlite3
import sys
from collections.abc import Callable
from time import monotonic
from typing import Any

from drillyard.evaluation.sql_text import statements

MAX_STEPS = 2_000_000
"""Virtual-machine instructions of one query; one over the databases here needs hundreds to some ten
thousands."""
MAX_SECONDS = 5.0
MAX_ROWS = 10_000

_STEPS_PER_CHECK = 500

_READING = frozenset({sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_RECURSIVE})
_BUILDING = _READING | {
    sqlite3.SQLITE_CREATE_TABLE,
    sqlite3.SQLITE_CREATE_TEMP_TABLE,
    sqlite3.SQLITE_CREATE_INDEX,
    sqlite3.SQLITE_CREATE_TEMP_INDEX,
    sqlite3.SQLITE_CREATE_VIEW,
    sqlite3.SQLITE_CREATE_TEMP_VIEW,
    sqlite3.SQLITE_ALTER_TABLE,
    sqlite3.SQLITE_DROP_TABLE,
    sqlite3.SQLITE_DROP_INDEX,
    sqlite3.SQLITE_DROP_VIEW,
    sqlite3.SQLITE_INSERT,
    sqlite3.SQLITE_UPDATE,
    sqlite3.SQLITE_DELETE,
    sqlite3.SQLITE_TRANSACTION,
    sqlite3.SQLITE_REINDEX,
}
_PRAGMAS = ("table_info", "index_list", "index_info")
"""Of a database that is being built."""
# Deterministic functions (and the clock), each bounded in time and size by the limits below. Not
# among them: what reaches outside (load_extension, fts3_tokenizer), what differs from call to call
# (random), makers of large values.
_FUNCTION_NAMES = """
abs char coalesce concat concat_ws glob hex if ifnull iif instr length like likelihood likely lower ltrim max min
nullif octet_length quote replace round rtrim sign soundex substr substring trim typeof unhex unicode unlikely upper
date time datetime julianday unixepoch strftime timediff current_date current_time current_timestamp
avg count group_concat string_agg sum total median percentile percentile_cont percentile_disc
row_number rank dense_rank percent_rank cume_dist ntile lag lead first_value last_value nth_value
acos acosh asin asinh atan atan2 atanh ceil ceiling cos cosh degrees exp floor ln log log10 log2 mod pi pow power
radians sin sinh sqrt tan tanh trunc
-> ->> json json_array json_array_length json_each json_error_position json_extract json_group_array
json_group_object json_insert json_object json_patch json_pretty json_quote json_remove json_replace json_set
json_tree json_type json_valid
"""  # noqa: E501
_FUNCTIONS = frozenset(_FUNCTION_NAMES.split())
# What ALTER TABLE calls inside of sqlite.
_BUILDING_FUNCTIONS = _FUNCTIONS | {
    "printf",
    "sqlite_drop_column",
    "sqlite_rename_column",
    "sqlite_rename_quotefix",
    "sqlite_rename_table",
    "sqlite_rename_test",
}

_MAX_BUILD_STEPS = 5_000_000
_MAX_HEAP_BYTES = 256 * 2**20
"""Of all of sqlite in this process; the databases of a row need well under 1 MB."""
_MAX_PAGES = 64 * 2**20 // 4096
_MAX_RESULT_BYTES = 16 * 2**20
_CELLS_PER_COUNT = 100

_LIMITS = {
    # of a value, a row and, in Python's sqlite3, a text of statements
    sqlite3.SQLITE_LIMIT_LENGTH: 100_000,
    sqlite3.SQLITE_LIMIT_SQL_LENGTH: 50_000,
    sqlite3.SQLITE_LIMIT_EXPR_DEPTH: 200,
    sqlite3.SQLITE_LIMIT_COMPOUND_SELECT: 50,
    sqlite3.SQLITE_LIMIT_COLUMN: 500,
    sqlite3.SQLITE_LIMIT_VDBE_OP: 50_000,
    sqlite3.SQLITE_LIMIT_FUNCTION_ARG: 100,
    # time of a LIKE is this times the length of the value
    sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 200,
    sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER: 500,
    sqlite3.SQLITE_LIMIT_TRIGGER_DEPTH: 1,
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
    sqlite3.SQLITE_LIMIT_WORKER_THREADS: 0,
}
# One INSERT may bring all rows of a table.
_BUILDING_LIMITS = _LIMITS | {
    sqlite3.SQLITE_LIMIT_LENGTH: 250_000,
    sqlite3.SQLITE_LIMIT_SQL_LENGTH: 250_000,
    sqlite3.SQLITE_LIMIT_COMPOUND_SELECT: 500,
    sqlite3.SQLITE_LIMIT_VDBE_OP: 1_000_000,
}

Row = tuple[Any, ...]

SQL_ERRORS = (sqlite3.Error, sqlite3.Warning, ValueError, MemoryError)
"""Exceptions of building a database or running a query, besides TimeoutError."""
NO_MEMORY = "more memory than is allowed"


class _Limit:
    """Counts virtual-machine steps and seconds from now on; sqlite's progress handler, which stops
    what exceeds one."""

    def __init__(self, connection: sqlite3.Connection, most_steps: int) -> None:
        self.steps, self._most_steps, self._deadline = 0, most_steps, monotonic() + MAX_SECONDS
        connection.set_progress_handler(self._count, _STEPS_PER_CHECK)

    def _count(self) -> int:
        self.steps += _STEPS_PER_CHECK
        return int(self.exceeded())

    def exceeded(self) -> bool:
        return self.steps > self._most_steps or monotonic() > self._deadline


def build_database(schema: str) -> sqlite3.Connection:
    """A new database, still open to building under its limits, without the statements that
    `sql_text.py` leaves out. Raises sqlite3.Error, ValueError or MemoryError."""
    connection = sqlite3.connect(":memory:", isolation_level=None, cached_statements=0)
    try:
        for pragma in (
            f"hard_heap_limit = {_MAX_HEAP_BYTES}",
            f"max_page_count = {_MAX_PAGES}",
            "temp_store = MEMORY",
        ):
            connection.execute(f"PRAGMA {pragma}")
        for limit, value in _BUILDING_LIMITS.items():
            connection.setlimit(limit, value)
        for name, strip in _TRIMS.items():
            connection.create_function(name, 2, strip, deterministic=True)
        connection.set_authorizer(_authorizer(_BUILDING, _BUILDING_FUNCTIONS))
        _Limit(connection, _MAX_BUILD_STEPS)
        if len(schema) > _BUILDING_LIMITS[sqlite3.SQLITE_LIMIT_SQL_LENGTH]:
            raise ValueError(f"a schema of {len(schema):,} characters is too long")
        for number, statement in enumerate(statements(schema), 1):
            if not statement.is_left_out:
                _execute(connection, statement.text, number)
    except BaseException:
        connection.close()
        raise
    return connection


def _execute(connection: sqlite3.Connection, statement: str, number: int) -> None:
    """Run one statement of a schema; its error names it."""
    try:
        connection.execute(statement).close()
    except (sqlite3.Error, sqlite3.Warning) as error:
        begin = " ".join(statement.split())[:60]
        raise type(error)(f"{error} in statement {number}: {begin}") from None


def make_read_only(connection: sqlite3.Connection) -> sqlite3.Connection:
    """Close the database to all but reading, for good; returns it."""
    connection.set_progress_handler(None, 0)
    connection.set_authorizer(None)
    connection.execute("PRAGMA query_only = ON")
    for limit, value in _LIMITS.items():
        connection.setlimit(limit, value)
    connection.set_authorizer(_authorizer(_READING, _FUNCTIONS))
    return connection


def _authorizer(actions: frozenset[int], functions: frozenset[str]) -> Any:
    def permit(
        action: int, first: str | None, second: str | None, database: str | None, source: str | None
    ) -> int:
        if action == sqlite3.SQLITE_FUNCTION:
            allowed = (second or "").lower() in functions
        elif action == sqlite3.SQLITE_PRAGMA:
            allowed = actions is _BUILDING and first in _PRAGMAS
        else:
            allowed = action in actions
        return sqlite3.SQLITE_OK if allowed else sqlite3.SQLITE_DENY

    return permit


def _trim(strip: Callable[[str, str], str]) -> Callable[[Any, Any], str | None]:
    """`trim(text, characters)` without sqlite's cost, which is the product of both lengths (10 s
    and more)."""

    def function(text: Any, characters: Any) -> str | None:
        if text is None or characters is None:
            return None
        return strip(_text(text), "".join(set(_text(characters))))

    return function


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


_TRIMS = {"trim": _trim(str.strip), "ltrim": _trim(str.lstrip), "rtrim": _trim(str.rstrip)}


def run_query(connection: sqlite3.Connection, sql: str) -> list[Row]:
    """All rows of one query. Raises SQL_ERRORS (ValueError: no query), or TimeoutError for a
    limit."""
    limit = _Limit(connection, MAX_STEPS)
    cursor = connection.cursor()
    try:
        cursor.execute(sql)
        if cursor.description is None:
            raise ValueError("not a query")
        return _fetch(cursor)
    except sqlite3.OperationalError as error:
        if limit.exceeded():
            raise TimeoutError(f"stopped after {limit.steps:,} steps") from error
        raise
    finally:
        cursor.close()
        connection.set_progress_handler(None, 0)


def _fetch(cursor: sqlite3.Cursor) -> list[Row]:
    """All rows, at most MAX_ROWS and _MAX_RESULT_BYTES; a result of few cells, as the last ones, is
    not counted."""
    rows: list[Row] = []
    size, at_once = 0, max(1, _CELLS_PER_COUNT // len(cursor.description))
    while found := cursor.fetchmany(at_once):
        rows += found
        if len(found) == at_once:
            size += sum(sys.getsizeof(value) for row in found for value in row)
        if size > _MAX_RESULT_BYTES:
            raise TimeoutError(f"a result of more than {_MAX_RESULT_BYTES // 2**20} MiB")
        if len(rows) > MAX_ROWS:
            raise TimeoutError(f"more than {MAX_ROWS:,} rows")
    return rows
