"""SQL of a data set or a model: whatever it says, evaluating it costs bounded memory and time, and
calls nothing else.

That a prediction cannot write, attach or run for ever is in
tests/unit/evaluation/test_sql_scoring.py.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from typing import Any

import pytest

from drillyard.evaluation.sql_databases import ATTEMPTS, generated_databases
from drillyard.evaluation.sql_sandbox import build_database, make_read_only, run_query
from drillyard.evaluation.sql_scoring import judge
from drillyard.evaluation.sql_text import tokens

LONG = "'" + "a" * 40_000 + "'"
ROWS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 100000)"
SCHEMA = "CREATE TABLE a (x TEXT); INSERT INTO a VALUES ('b')"
QUERY = "SELECT x FROM a"

HOSTILE = {
    "zeroblob in a schema": (
        "CREATE TABLE a (x); INSERT INTO a VALUES (zeroblob(900000000))",
        QUERY,
    ),
    "rows in a schema": (
        f"CREATE TABLE a (x); INSERT INTO a {ROWS} SELECT {LONG} || i FROM n",
        QUERY,
    ),
    "indexes in a schema": (
        (
            f"CREATE TABLE a (x); INSERT INTO a {ROWS} SELECT {LONG} || i FROM n LIMIT 1500; CREATE"
            " INDEX i ON a (x, x)"
        ),
        QUERY,
    ),
    "a materialised join in a schema": (
        (
            f"CREATE TABLE a (x); INSERT INTO a {ROWS}, m AS MATERIALIZED (SELECT {LONG} || i AS y"
            " FROM n) SELECT count(*) FROM m, m AS o"
        ),
        QUERY,
    ),
    "wide rows in a result": (
        SCHEMA,
        f"{ROWS} SELECT {', '.join('s' * 400)} FROM n, (SELECT {LONG} || '\U0001f600' s)",
    ),
    "group_concat": (SCHEMA, f"{ROWS} SELECT group_concat({LONG}) FROM n"),
    "replace": (SCHEMA, f"SELECT replace({LONG}, 'a', {LONG})"),
    "distinct": (SCHEMA, f"{ROWS} SELECT count(DISTINCT {LONG} || i) FROM n"),
    "views of views": (
        SCHEMA,
        "WITH c0 AS (SELECT 1 AS x)"
        + "".join(f", c{i + 1} AS (SELECT p.x FROM c{i} p, c{i} q)" for i in range(30))
        + " SELECT x FROM c30",
    ),
}
MAX_MEMORY_MB = 500
CHILD = """
import json, sys
from drillyard.evaluation.sql_scoring import judge
for schema, query in json.load(sys.stdin):
    print(judge({"schema": schema, "sql": "SELECT x FROM a"}, query).outcome)
# Unlike ru_maxrss it begins at 0 with this program, not at what the test's own process held.
peak_kib = next(line for line in open("/proc/self/status") if line.startswith("VmHWM:")).split()[1]
print(int(peak_kib) // 1024)
"""


def test_no_schema_and_no_query_takes_more_than_a_bounded_amount_of_memory() -> None:
    """A child, as a peak belongs to a process; its address space is limited for the sake of this
    machine."""
    limit = 2 * 2**30
    done = subprocess.run(
        [sys.executable, "-c", CHILD],
        input=json.dumps(list(HOSTILE.values())),
        capture_output=True,
        text=True,
        timeout=100,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
    )
    assert done.returncode == 0, done.stderr
    *outcomes, peak_mb = done.stdout.split()
    refused = dict(zip(HOSTILE, outcomes, strict=True))
    assert set(refused.values()) <= {"unjudged", "invalid", "timeout"}, refused
    assert int(peak_mb) < MAX_MEMORY_MB


@pytest.mark.parametrize(
    "function", ["fts3_tokenizer('simple')", "load_extension('x')", "sqlite_version()"]
)
def test_a_function_that_is_not_listed_is_refused(function: str) -> None:
    verdict = judge({"schema": SCHEMA, "sql": QUERY}, f"SELECT {function}")
    assert verdict.outcome == "invalid" and "not authorized" in verdict.reason
    verdict = judge({"schema": f"{SCHEMA}; INSERT INTO a SELECT {function}", "sql": QUERY}, QUERY)
    assert verdict.outcome == "unjudged" and "not authorized" in verdict.reason


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("trim('xxaxx', 'x')", "a"),
        ("ltrim('xyay', 'xy')", "ay"),
        ("rtrim('ayx', 'xy')", "a"),
        ("trim(' a ')", "a"),
        ("trim(NULL, 'x')", None),
        ("trim('x', NULL)", None),
        ("trim(12.5, '5')", "12."),
        ("json_extract('[1, 2]', '$[1]')", 2),
        ("'{\"a\": 3}' ->> 'a'", 3),
        ("strftime('%Y', '2020-01-01')", "2020"),
        ("round(sqrt(2), 2)", 1.41),
        ("group_concat(x, '-')", "b"),
        ("first_value(x) OVER ()", "b"),
    ],
)
def test_functions_of_ordinary_queries_work(expression: str, value: Any) -> None:
    assert run_query(make_read_only(build_database(SCHEMA)), f"SELECT {expression} FROM a") == [
        (value,)
    ]


def test_a_trim_of_many_characters_does_not_multiply_both_lengths() -> None:
    """In sqlite itself 100,000 characters to be trimmed of 100,000 others take some 10 s, within
    one instruction."""
    texts = "WITH t(b) AS (SELECT '" + "a" * 33_000 + "'), u(s) AS (SELECT b || b || b FROM t)"
    query = f"{texts} SELECT length(trim(s, replace(s, 'a', 'b') || 'a')) FROM u"
    assert run_query(make_read_only(build_database(SCHEMA)), query) == [(0,)]


def test_schemas_may_be_altered() -> None:
    schema = (
        "CREATE TABLE s (a INT CHECK (a LIKE '%'), b DEFAULT CURRENT_TIMESTAMP); INSERT INTO s (a)"
        " VALUES (7);ALTER TABLE s ADD COLUMN c DEFAULT 3; ALTER TABLE s RENAME COLUMN a TO d;"
        " ALTER TABLE s DROP COLUMN b;ALTER TABLE s RENAME TO t; CREATE INDEX i ON t (d); CREATE"
        " VIEW v AS SELECT upper(d) AS e FROM t"
    )
    connection = make_read_only(build_database(schema))
    assert run_query(connection, "SELECT d, c, e FROM t, v") == [(7, 3, "7")]


@pytest.mark.parametrize(
    "number", ["99999999999999999999", "9223372036854775807", "1e999", "9" * 5_000]
)
def test_numbers_beyond_64_bits_in_a_reference_do_not_end_an_evaluation(number: str) -> None:
    row = {
        "schema": "CREATE TABLE a (x INT)",
        "sql": f"SELECT x FROM a WHERE x = {number} OR x < {number}",
    }
    assert judge(row, row["sql"]).outcome in ("correct", "unjudged")


def test_a_schema_of_many_columns_gets_no_generated_rows() -> None:
    schema = "".join(
        f"CREATE TABLE t{i} ({', '.join(f'c{j}' for j in range(400))});" for i in range(10)
    )
    verdict = judge({"schema": schema, "sql": "SELECT c1 FROM t1"}, "SELECT c1 FROM t1")
    assert verdict.outcome == "unjudged" and "columns" in verdict.reason


def test_attempts_to_generate_rows_share_one_limit_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 10_000, 9))
    built = []
    monkeypatch.setattr("drillyard.evaluation.sql_databases.monotonic", lambda: next(clock))
    monkeypatch.setattr(
        "drillyard.evaluation.sql_databases.build_database",
        lambda schema: built.append(1) or build_database(schema),
    )
    kept, why = generated_databases("CREATE TABLE a (x INT)", "SELECT x FROM a WHERE 0")
    assert not kept and " s " in why
    assert len(built) < ATTEMPTS


def test_an_open_bracket_is_one_token_however_many_follow() -> None:
    """Each of them used to look for its closing one to the end of the text."""
    assert len(list(tokens("[" * 40_000))) == 1


@pytest.mark.parametrize(
    "columns",
    [
        {"fills": [1]},
        {"fills": 5, "domain": "shops"},
        {"fills": [1], "domain": "nope"},
        {"fills": [None], "domain": "shops"},
        {"fills": [1], "domain": "shops", "schema": "CREATE TABLE shops (nothing_of_the_kind INT)"},
    ],
    ids=str,
)
def test_columns_of_the_built_in_data_with_other_contents_leave_a_row_unjudged(
    columns: dict[str, Any],
) -> None:
    verdict = judge({"schema": SCHEMA, "sql": QUERY, **columns}, QUERY)
    assert verdict.outcome == "unjudged" and "fills" in verdict.reason
