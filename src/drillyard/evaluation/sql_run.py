"""sqlite under guard: building a database from a data set's statements, and running one query that may be anything.

A built database is read-only three times over: `PRAGMA query_only`, an authorizer that permits only reading, and limits
on sizes. A query's work is limited by a count of virtual-machine steps (deterministic) and, as a backstop, by seconds;
its result by rows. Sorting and materialising spill to sqlite's temporary file, so memory stays small within the step
limit.
"""

from __future__ import annotations

import sqlite3
from time import monotonic
from typing import Any

MAX_STEPS = 2_000_000
"""Virtual-machine instructions of one query; one over the databases here needs hundreds to some ten thousands."""
MAX_SECONDS = 5.0
MAX_ROWS = 10_000

_STEPS_PER_CHECK = 500

_READING = frozenset({sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE})
_BUILDING = _READING | {
    sqlite3.SQLITE_CREATE_TABLE,
    sqlite3.SQLITE_CREATE_INDEX,
    sqlite3.SQLITE_CREATE_VIEW,
    sqlite3.SQLITE_ALTER_TABLE,
    sqlite3.SQLITE_DROP_TABLE,
    sqlite3.SQLITE_DROP_VIEW,
    sqlite3.SQLITE_INSERT,
    sqlite3.SQLITE_UPDATE,
    sqlite3.SQLITE_DELETE,
    sqlite3.SQLITE_TRANSACTION,
    sqlite3.SQLITE_REINDEX,
}
# Functions that reach outside, differ from call to call, or work long and make large values in one step.
_FORBIDDEN_FUNCTIONS = frozenset({"load_extension", "random", "randomblob", "zeroblob", "printf", "format"})

_MAX_BUILD_STEPS = 5_000_000
_QUERY_LIMITS = {
    sqlite3.SQLITE_LIMIT_LENGTH: 100_000,
    sqlite3.SQLITE_LIMIT_SQL_LENGTH: 50_000,
    sqlite3.SQLITE_LIMIT_EXPR_DEPTH: 200,
    sqlite3.SQLITE_LIMIT_COMPOUND_SELECT: 50,
    sqlite3.SQLITE_LIMIT_COLUMN: 500,
    sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 1_000,
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
    sqlite3.SQLITE_LIMIT_WORKER_THREADS: 0,
}

Row = tuple[Any, ...]


def build(schema: str) -> sqlite3.Connection:
    """A new database from CREATE TABLE, INSERT and the like. Raises sqlite3.Error or ValueError."""
    connection = sqlite3.connect(":memory:", isolation_level=None, cached_statements=0)
    steps = 0

    def over_limit() -> int:
        nonlocal steps
        steps += 10_000
        return int(steps > _MAX_BUILD_STEPS)

    connection.set_authorizer(_authorizer(_BUILDING))
    connection.set_progress_handler(over_limit, 10_000)
    try:
        connection.executescript(schema)
    except BaseException:
        connection.close()
        raise
    connection.set_progress_handler(None, 0)
    connection.set_authorizer(None)
    return connection


def forbid_writing(connection: sqlite3.Connection) -> sqlite3.Connection:
    """Close the database to all but reading, for good; returns it."""
    connection.execute("PRAGMA query_only = ON")
    for limit, value in _QUERY_LIMITS.items():
        connection.setlimit(limit, value)
    connection.set_authorizer(_authorizer(_READING))
    return connection


def _authorizer(allowed: frozenset[int]) -> Any:
    def permit(action: int, first: str | None, second: str | None, database: str | None, source: str | None) -> int:
        if action not in allowed or (
            action == sqlite3.SQLITE_FUNCTION and (second or "").lower() in _FORBIDDEN_FUNCTIONS
        ):
            return sqlite3.SQLITE_DENY
        return sqlite3.SQLITE_OK

    return permit


def run_query(connection: sqlite3.Connection, sql: str) -> list[Row]:
    """All rows of one query. Raises sqlite3.Error (sqlite's words), ValueError (no query) or TimeoutError (a limit)."""
    steps, deadline = 0, monotonic() + MAX_SECONDS

    def over_limit() -> int:
        nonlocal steps
        steps += _STEPS_PER_CHECK
        return int(steps > MAX_STEPS or monotonic() > deadline)

    connection.set_progress_handler(over_limit, _STEPS_PER_CHECK)
    cursor = connection.cursor()
    try:
        cursor.execute(sql)
        if cursor.description is None:
            raise ValueError("not a query")
        rows = cursor.fetchmany(MAX_ROWS + 1)
    except sqlite3.OperationalError as error:
        if steps > MAX_STEPS or monotonic() > deadline:
            raise TimeoutError(f"stopped after {steps:,} steps") from error
        raise
    finally:
        cursor.close()
        connection.set_progress_handler(None, 0)
    if len(rows) > MAX_ROWS:
        raise TimeoutError(f"more than {MAX_ROWS:,} rows")
    return rows
