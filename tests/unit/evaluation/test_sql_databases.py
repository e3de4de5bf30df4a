"""Facts about generated rows for schemas without rows: the reference finds something, other queries
something else."""

from __future__ import annotations

from typing import Any

import pytest

from drillyard.evaluation.sql_databases import generated_databases
from drillyard.evaluation.sql_scoring import QueryJudge, judge

SCHEMA = (
    'CREATE TABLE "stadium" ("Stadium_ID" INTEGER, "Name" TEXT, "Capacity" INTEGER, "Opened" DATE);'
    ' CREATE TABLE "concert" ("concert_ID" INTEGER, "Title" TEXT, "Stadium_ID" TEXT, "Year" TEXT,'
    ' "fee" REAL); CREATE TABLE "ticket" ("id" INTEGER PRIMARY KEY, "owner" TEXT UNIQUE, "concert"'
    " TEXT)"
)


def row(sql: str) -> dict[str, Any]:
    return {"db_id": "concert", "schema": SCHEMA, "question": "?", "sql": sql}


@pytest.mark.parametrize(
    ("reference", "wrong"),
    [
        (
            "SELECT count(*) FROM concert WHERE Year = '2014'",
            "SELECT count(*) FROM concert WHERE Year = '2015'",
        ),
        ('SELECT Name FROM stadium WHERE Name = "Azadi Park"', "SELECT Name FROM stadium"),
        (
            "SELECT Name FROM stadium WHERE Capacity > 60000",
            "SELECT Name FROM stadium WHERE Capacity >= 60000",
        ),
        (
            "SELECT Name FROM stadium WHERE Capacity BETWEEN 500 AND 900",
            "SELECT Name FROM stadium WHERE Capacity < 900",
        ),
        ("SELECT Title FROM concert WHERE Title LIKE '%free_x%'", "SELECT Title FROM concert"),
        (
            (
                "SELECT Title FROM concert AS c JOIN stadium AS s ON c.Stadium_ID = s.Stadium_ID"
                " WHERE s.Name = 'Ayr'"
            ),
            "SELECT Title FROM concert",
        ),
        (
            "SELECT T2.owner FROM concert AS T1 JOIN ticket AS T2 ON T1.concert_ID = T2.concert",
            "SELECT owner FROM ticket WHERE id > 3",
        ),
        (
            "SELECT Name FROM stadium WHERE Stadium_ID NOT IN (SELECT Stadium_ID FROM concert)",
            "SELECT Name FROM stadium",
        ),
        (
            "SELECT concert_ID FROM concert EXCEPT SELECT id FROM ticket",
            "SELECT concert_ID FROM concert",
        ),
        ("SELECT avg(Year) FROM concert", "SELECT max(Year) FROM concert"),
        (
            "SELECT Year FROM concert GROUP BY Year HAVING count(*) > 50",
            "SELECT Year FROM concert GROUP BY Year HAVING count(*) < 50",
        ),
        (
            "SELECT Name FROM stadium WHERE Capacity = (SELECT max(Capacity) FROM stadium)",
            "SELECT Name FROM stadium WHERE Capacity = (SELECT min(Capacity) FROM stadium)",
        ),
    ],
)
def test_the_reference_is_correct_and_another_query_is_not(reference: str, wrong: str) -> None:
    referee = QueryJudge(row(reference))
    assert referee.unjudged == ""
    assert referee.judge(reference).outcome == "correct"
    assert referee.judge(wrong).outcome == "wrong"
    referee.close()


def test_a_reference_that_fails_or_finds_nothing_is_unjudged() -> None:
    assert "no such table" in judge(row("SELECT a FROM nowhere"), "SELECT 1").reason
    nothing = judge(row("SELECT Name FROM stadium WHERE 1 = 0"), "SELECT 1")
    assert nothing.outcome == "unjudged" and "nothing" in nothing.reason


def test_rows_are_the_same_every_time() -> None:
    reference = "SELECT * FROM stadium JOIN concert USING (Stadium_ID)"
    rows = [
        [found.execute(reference).fetchall() for found in generated_databases(SCHEMA, reference)[0]]
        for _ in range(2)
    ]
    assert rows[0] == rows[1] and len(rows[0]) == 3
    assert rows[0][0] != rows[0][1]


def test_the_reference_cannot_write_while_rows_are_made() -> None:
    kept, problem = generated_databases(SCHEMA, "DELETE FROM stadium")
    assert not kept and "not authorized" in problem
