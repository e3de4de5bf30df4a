"""Facts about SQL execution accuracy: which results are equal, what a prediction may do, and that
none can harm."""

from __future__ import annotations

import sqlite3
from typing import Any

import pytest
from demo.run import best_constant_answer
from hypothesis import given, settings
from hypothesis import strategies as st

from drillyard.data.builtin import documents
from drillyard.errors import UserError
from drillyard.evaluation import sql_scoring as judging
from drillyard.evaluation.sql_scoring import (
    QueryJudge,
    SqlVerdict,
    accuracy,
    judge,
    result_difference,
)

CONTEXT = (
    "CREATE TABLE shops (name TEXT, city TEXT, price INT, share REAL);INSERT INTO shops VALUES"
    " ('Nova', 'Oslo', 10, 0.1), ('Vega', 'Rome', 30, 0.2), ('Luna', 'Oslo', 20, NULL)"
)


def row(sql: str, context: str = CONTEXT) -> dict[str, Any]:
    return {"sql_context": context, "sql_prompt": "?", "sql": sql}


def outcome(reference: str, predicted: str) -> str:
    return judge(row(reference), predicted).outcome


@pytest.mark.parametrize(
    ("reference", "predicted", "expected"),
    [
        ("SELECT name FROM shops", "SELECT name FROM shops ORDER BY price DESC", "correct"),
        (
            "SELECT name FROM shops ORDER BY price",
            "SELECT name FROM shops ORDER BY price DESC",
            "wrong",
        ),
        (
            "SELECT name FROM shops ORDER BY price",
            "select name from shops order by share is null, price;",
            "wrong",
        ),
        (
            "SELECT name FROM (SELECT name FROM shops ORDER BY price)",
            "SELECT name FROM shops ORDER BY name",
            "correct",
        ),
        ("SELECT name, price FROM shops", "SELECT price, name FROM shops", "wrong"),
        ("SELECT name FROM shops", "SELECT name, price FROM shops", "wrong"),
        ("SELECT city FROM shops", "SELECT DISTINCT city FROM shops", "wrong"),
        ("SELECT AVG(price) FROM shops", "SELECT 20", "correct"),
        ("SELECT AVG(price) FROM shops", "SELECT 20.00001", "correct"),
        ("SELECT AVG(price) FROM shops", "SELECT 20.001", "wrong"),
        ("SELECT price FROM shops WHERE name = 'Nova'", "SELECT '10'", "wrong"),
        (
            "SELECT share FROM shops",
            "SELECT share FROM shops WHERE share IS NOT NULL UNION ALL SELECT NULL",
            "correct",
        ),
        ("SELECT share FROM shops", "SELECT coalesce(share, 0) FROM shops", "wrong"),
        ("SELECT name FROM shops", "SELECT nme FROM shops", "invalid"),
        ("SELECT name FROM shops", "", "invalid"),
        ("SELECT name FROM shops", "-- nothing", "invalid"),
        ("SELECT name FROM shops", "Sure! Here is the query: SELECT name FROM shops", "invalid"),
        ("SELECT nme FROM shops", "SELECT name FROM shops", "unjudged"),
        (
            "SELECT name FROM shops WHERE price > 99",
            "SELECT name FROM shops WHERE price > 99",
            "unjudged",
        ),
        ("SELECT MAX(price) FROM shops WHERE price > 99", "SELECT NULL", "unjudged"),
        ("WITH a AS (SELECT price FROM shops) SELECT SUM(price) FROM a", "SELECT 60", "correct"),
    ],
)
def test_verdicts(reference: str, predicted: str, expected: str) -> None:
    assert outcome(reference, predicted) == expected


@pytest.mark.parametrize(
    "predicted",
    [
        "DELETE FROM shops",
        "INSERT INTO shops VALUES ('a', 'b', 1, 1)",
        "UPDATE shops SET price = 0 RETURNING price",
        "DROP TABLE shops",
        "CREATE TABLE x (a)",
        "CREATE TEMP TABLE x (a)",
        "CREATE TEMP VIEW v AS SELECT 1",
        "SELECT name FROM shops; DELETE FROM shops",
        "ATTACH DATABASE '/tmp/never.db' AS other",
        "VACUUM INTO '/tmp/never.db'",
        "PRAGMA writable_schema = ON",
        "PRAGMA query_only = OFF",
        "SELECT * FROM pragma_table_info('shops')",
        "BEGIN",
        "SAVEPOINT a",
        "ANALYZE",
        "REINDEX",
        "SELECT load_extension('evil')",
        "SELECT randomblob(1000000000)",
        "SELECT zeroblob(1000000000)",
        "SELECT name FROM shops ORDER BY random()",
        "SELECT replace(hex(zeroblob(100000)), '00', 'aaaaaaaaaaaaaaaa')",
        "SELECT printf('%.*c', 100000000, 'x')",
        "SELECT " + "(" * 5000 + "1" + ")" * 5000,
        "SELECT " + "1+" * 30_000 + "1",
        "SELECT 1" + " UNION SELECT 1" * 3_000,
        "SELECT '" + "x" * 1_000_000 + "'",
        "SELECT name FROM shops\0",
        "\0",
        "SELECT '\ud800'",
        "SELECT CAST(x'ff' AS TEXT)",
        "SELECT ?",
        "SELECT :name",
    ],
)
def test_a_prediction_that_does_more_than_read_is_invalid_and_changes_nothing(
    predicted: str,
) -> None:
    referee = QueryJudge(row("SELECT name, city, price, share FROM shops"))
    assert referee.judge(predicted).outcome == "invalid"
    assert referee.judge("SELECT * FROM shops").outcome == "correct"
    referee.close()


@pytest.mark.parametrize(
    "predicted",
    [
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i FROM n",
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT COUNT(*) FROM n",
        "SELECT COUNT(*) FROM " + ", ".join(f"shops s{i}" for i in range(30)),
    ],
)
def test_a_query_that_does_not_end_is_stopped(predicted: str) -> None:
    assert judge(row("SELECT COUNT(*) FROM shops"), predicted).outcome == "timeout"


def test_the_step_limit_is_the_same_on_every_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    endless = (
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT COUNT(*) FROM n"
    )
    monkeypatch.setattr("drillyard.evaluation.sql_sandbox.MAX_SECONDS", 1e9)
    reasons = {judge(row("SELECT COUNT(*) FROM shops"), endless).reason for _ in range(3)}
    assert len(reasons) == 1 and "steps" in reasons.pop()


SQL_WORDS = """
SELECT FROM WHERE shops name price city * ( ) , ; ' " ` [ -- /* */ 1 -1 9e999 x'ff' NULL ORDER BY GROUP HAVING LIMIT
UNION ALL JOIN ON USING WITH RECURSIVE AS VALUES COUNT(*) AVG( CAST LIKE % IN BETWEEN AND OR NOT DELETE PRAGMA ? : @ $a
"""  # noqa: E501
SQL_SOUP = st.lists(st.sampled_from(SQL_WORDS.split()), max_size=25).map(" ".join)


@settings(max_examples=150)
@given(st.one_of(st.text(), st.binary().map(lambda raw: raw.decode("latin-1")), SQL_SOUP))
def test_no_text_raises(predicted: str) -> None:
    referee = QueryJudge(row("SELECT name, price FROM shops"))
    assert isinstance(referee.judge(predicted), SqlVerdict)
    assert referee.judge("SELECT name, price FROM shops").outcome == "correct"
    referee.close()


VALUES = st.one_of(
    st.none(), st.integers(-3, 3), st.sampled_from([0.5, 1.0, 2.0, 1e300]), st.sampled_from("ab1")
)
RESULTS = st.integers(1, 3).flatmap(
    lambda width: st.lists(st.tuples(*[VALUES] * width), min_size=1, max_size=8)
)


@given(RESULTS, st.randoms(use_true_random=False))
def test_a_shuffled_and_slightly_rounded_result_is_equal_unless_order_counts(
    rows: list[Any], random: Any
) -> None:
    other = [tuple(v * (1 + 1e-8) if isinstance(v, float) else v for v in found) for found in rows]
    assert result_difference(rows, other, ordered=True) == ""
    random.shuffle(other)
    assert result_difference(rows, other, ordered=False) == ""


@given(RESULTS, st.data())
def test_a_changed_value_is_a_difference(rows: list[Any], data: Any) -> None:
    i = data.draw(st.integers(0, len(rows) - 1))
    changed = [*rows[:i], ("other", *rows[i][1:]), *rows[i + 1 :]]
    assert result_difference(rows, changed, ordered=False) != ""
    assert result_difference(rows, changed, ordered=True) != ""


def test_rows_that_are_close_but_sort_differently_are_paired() -> None:
    near = 1.0 + 1e-9
    assert (
        result_difference([(1.0, 2.0), (near, 1.0)], [(near, 2.0), (1.0, 1.0)], ordered=False) == ""
    )
    assert (
        result_difference([(1.0, 2.0), (near, 1.0)], [(near, 2.0), (1.0, 3.0)], ordered=False) != ""
    )


def test_the_built_in_set_is_judged_on_three_databases() -> None:
    """A query that is right on the shown database by luck alone is found out by the further
    fills."""
    found_out = 0
    for example in documents("text-to-sql", {"held_out_examples": 60}, "questions"):
        assert judge(example, example["sql"]).outcome == "correct"
        referee = QueryJudge(example)
        shown, *_ = judging.databases(example)
        assert shown[0] is not None
        values = judging.run_query(shown[0], example["sql"])
        constant = (
            "SELECT * FROM (VALUES "
            + ", ".join(f"({', '.join(map(literal, found))})" for found in values)
            + ")"
        )
        verdict = referee.judge(constant)
        assert verdict.outcome == "wrong"
        assert not verdict.reason.endswith("on database 1 of 3")
        found_out += 1
        referee.close()
    assert found_out == 60


def literal(value: Any) -> str:
    return "'" + value.replace("'", "''") + "'" if isinstance(value, str) else repr(value)


@pytest.mark.slow
@pytest.mark.parametrize("part", ["questions", "combinations", "databases"])
def test_the_best_constant_answer_scores_under_three_percent(part: str) -> None:
    examples = list(documents("text-to-sql", {}, part))
    sql, share = best_constant_answer(examples)
    assert sql in {example["sql"] for example in examples}
    assert 1 / len(examples) <= share < 0.03


def test_accuracy_counts_what_could_be_judged() -> None:
    verdicts = [
        SqlVerdict("correct"),
        SqlVerdict("wrong", "x"),
        SqlVerdict("unjudged"),
        SqlVerdict("timeout"),
        SqlVerdict("correct"),
    ]
    figures = accuracy(verdicts)
    assert (
        figures["judged"] == 4
        and figures["accuracy"] == 0.5
        and figures["unjudged"] == 1
        and figures["invalid"] == 0
    )


@pytest.mark.parametrize(
    "context",
    [
        "CREATE TABLE a (x INT) ENGINE=InnoDB",
        "ATTACH DATABASE '/tmp/never.db' AS b",
        "PRAGMA writable_schema = ON",
        (
            "CREATE TABLE a (x); INSERT INTO a "
            "WITH RECURSIVE n AS (SELECT 1 i UNION ALL SELECT i + 1 FROM n) SELECT i FROM n"
        ),
        "not SQL",
    ],
)
def test_a_schema_that_cannot_be_built_makes_the_row_unjudged(context: str) -> None:
    verdict = judge(row("SELECT x FROM a", context), "SELECT x FROM a")
    assert verdict.outcome == "unjudged" and verdict.reason


def test_a_row_without_a_schema_names_its_columns() -> None:
    with pytest.raises(UserError, match="question, sql"):
        judge({"question": "?", "sql": "SELECT 1"}, "SELECT 1")


def test_results_over_the_row_limit_are_stopped() -> None:
    many = (
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 10001) SELECT i"
        " FROM n"
    )
    verdict = judge(row("SELECT name FROM shops"), many)
    assert verdict == SqlVerdict("timeout", "more than 10,000 rows")


def test_sqlite_is_the_one_that_judges_validity() -> None:
    with pytest.raises(sqlite3.OperationalError, match="no such table"):
        judging.run_query(sqlite3.connect(":memory:"), "SELECT 1 FROM nowhere")
