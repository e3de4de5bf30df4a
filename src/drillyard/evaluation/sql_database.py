"""The databases on which a row's queries are compared, built in memory and then closed to writing.

A row of `builtin:text-to-sql` names its fills; a row with INSERT statements (gretelai/synthetic_text_to_sql) has one
database of its own; a row with CREATE TABLE statements alone (Spider as JSONL) gets rows generated for its reference
query (`sql_fill`). A row's statements come from a data set that others made, so building is guarded as well as
querying.
"""

from __future__ import annotations

import sqlite3
from typing import Any

from drillyard.data.builtin import text_to_sql
from drillyard.errors import UserError
from drillyard.evaluation.sql_databases import generated_databases, has_rows
from drillyard.evaluation.sql_sandbox import build_database, make_read_only

SCHEMA_COLUMNS = ("schema", "sql_context")


def databases(row: dict[str, Any]) -> list[tuple[sqlite3.Connection | None, str]]:
    """The row's databases, read-only, or one (None, why it cannot be built). Raises UserError without a schema."""
    schema = next((row[name] for name in SCHEMA_COLUMNS if row.get(name)), None)
    if schema is None:
        raise UserError(
            f"SQL execution needs a column {' or '.join(SCHEMA_COLUMNS)} with CREATE TABLE statements; "
            f"this row has {', '.join(row)}."
        )
    try:
        if row.get("fills"):
            return _of_built_in(row, str(schema))
        own = build_database(str(schema))
        if has_rows(own):
            return [(make_read_only(own), "")]
        own.close()
        fills, problem = generated_databases(str(schema), str(row["sql"]))
    except (sqlite3.Error, sqlite3.Warning, ValueError, MemoryError) as error:
        return [(None, f"the schema cannot be built in sqlite: {str(error) or 'more memory than is allowed'}")]
    return [(connection, "") for connection in fills] or [(None, problem)]


def _of_built_in(row: dict[str, Any], schema: str) -> list[tuple[sqlite3.Connection | None, str]]:
    try:
        return [(_built_in(schema, str(row["domain"]), int(seed)), "") for seed in row["fills"]]
    except (KeyError, TypeError):  # a data set from elsewhere may have columns of these names too
        return [(None, "its columns fills, domain and schema are not those of builtin:text-to-sql")]


def _built_in(schema: str, table: str, seed: int) -> sqlite3.Connection:
    connection = build_database(schema)
    text_to_sql.insert_fill(connection, text_to_sql.fill(text_to_sql.domain_of(table), seed))
    return make_read_only(connection)
