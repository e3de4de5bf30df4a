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


TABLE = "CREATE TABLE shop (id INTEGER, name TEXT)"
ROWS = "INSERT INTO shop VALUES (1, 'a;b'), (2, 'c')"


def outcome(schema: str, sql: str = "SELECT name FROM shop", predicted: str = "") -> str:
    return judge({"schema": schema, "sql": sql}, predicted or sql).outcome


@pytest.mark.parametrize(
    "schema",
    [
        f"{TABLE}; CREATE TABLE sqlite_sequence(name,seq);",
        f'CREATE TABLE IF NOT EXISTS "sqlite_sequence" (name, seq);\n{TABLE}',
        f"{TABLE}; create table main.SQLITE_SEQUENCE(name,seq); {ROWS}",
        f"{TABLE}; DELETE FROM sqlite_sequence; INSERT INTO sqlite_sequence VALUES('shop', 2);",
        f"{TABLE}; INSERT OR REPLACE INTO \"sqlite_sequence\" VALUES('shop', 2); {ROWS}",
        f"{TABLE}; CREATE TABLE sqlite_stat1(tbl,idx,stat); ANALYZE sqlite_schema;",
        f"PRAGMA foreign_keys=OFF;\nBEGIN TRANSACTION;\n{TABLE};\n{ROWS};\nCOMMIT;\n",
        "CREATE TABLE shop (id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT)",
        (
            "CREATE TABLE shop (id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT);"
            " CREATE TABLE sqlite_sequence(name,seq); INSERT INTO shop (name) VALUES ('a')"
        ),
        (
            f"{TABLE}; CREATE TRIGGER t AFTER INSERT ON shop BEGIN UPDATE shop SET name = CASE WHEN"
            f" 1 THEN 'x' END; DELETE FROM shop; END; {ROWS}"
        ),
        f"{TABLE}; CREATE VIRTUAL TABLE docs USING fts5(a, b); {ROWS}",
        f"/* a; */ {TABLE} -- it's; this\n;;{ROWS};-- end",
        f"{TABLE};{ROWS};CREATE INDEX i ON shop (id);CREATE VIEW v AS SELECT * FROM shop",
        f"SET NAMES utf8; USE shops; LOCK TABLES shop WRITE; {TABLE}; {ROWS}; UNLOCK TABLES;",
        f"/*!40101 SET NAMES utf8 */; DROP TABLE IF EXISTS `shop`; {TABLE}; {ROWS}",
        f"CREATE SCHEMA public; CREATE EXTENSION x; {TABLE}; COMMENT ON TABLE shop IS 'a'; {ROWS}",
        f"CREATE TEMP TABLE shop (id INTEGER, name TEXT); {ROWS}",
        "CREATE TEMP TABLE shop (id INTEGER, name TEXT)",
        "CREATE TABLE shop (id INTEGER, name TEXT, twice INT AS (id * 2), PRIMARY KEY (id))",
        "CREATE TABLE shop (id INTEGER PRIMARY KEY, name TEXT NOT NULL) WITHOUT ROWID",
    ],
)
def test_a_schema_as_databases_print_it_is_built(schema: str) -> None:
    assert outcome(schema) == "correct"
    assert outcome(schema, predicted="SELECT name FROM shop WHERE id = -1") == "wrong"


def test_the_tables_of_sqlite_itself_get_no_rows() -> None:
    schema = "CREATE TABLE shop (id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT)"
    kept, _ = generated_databases(schema, "SELECT name FROM shop")
    for connection in kept:
        (found,) = connection.execute("SELECT name, seq FROM sqlite_sequence").fetchall()
        assert found == connection.execute("SELECT 'shop', max(id) FROM shop").fetchone()


def test_names_that_are_reserved_words_or_have_spaces() -> None:
    schema = 'CREATE TABLE "order" ("group" INTEGER, [select] TEXT, `unit price` REAL, "Ähre" TEXT)'
    for sql in (
        'SELECT [select] FROM "order" WHERE "group" > 5',
        "SELECT `unit price` FROM [order] WHERE `Ähre` = 'x'",
    ):
        assert outcome(schema, sql) == "correct"
        assert outcome(schema, sql, 'SELECT "Ähre" FROM "order"') == "wrong"


def test_a_view_gets_the_rows_that_its_own_conditions_ask_for() -> None:
    schema = (
        "CREATE TABLE shop (id INTEGER, city TEXT); CREATE VIEW far AS SELECT id AS shop FROM shop"
        " WHERE city = 'Ayr'"
    )
    assert outcome(schema, "SELECT shop FROM far") == "correct"
    assert outcome(schema, "SELECT shop FROM far", "SELECT id FROM shop") == "wrong"


@pytest.mark.parametrize("key", ["INTEGER PRIMARY KEY", "INTEGER UNIQUE", "INTEGER"])
@pytest.mark.parametrize("strict", ["", " STRICT"])
def test_constraints_leave_rows_to_judge_by(key: str, strict: str) -> None:
    schema = (
        f"CREATE TABLE shop (shop_id {key}, name TEXT UNIQUE){strict}; CREATE TABLE sale (sale_id"
        f" {key}, shop_id INTEGER){strict}"
    )
    for sql in (
        "SELECT name FROM shop WHERE shop_id = 'Ayr' OR shop_id = 3",
        "SELECT name FROM shop WHERE shop_id NOT IN (SELECT shop_id FROM sale)",
        (
            "SELECT T1.name FROM shop AS T1 JOIN sale AS T2 ON T1.shop_id = T2.shop_id GROUP BY"
            " T1.shop_id HAVING count(*) >= 3"
        ),
    ):
        assert outcome(schema, sql) == "correct", sql


def test_a_query_that_needs_a_virtual_table_is_unjudged() -> None:
    schema = f"{TABLE}; CREATE VIRTUAL TABLE main.Docs USING fts5(a, b); {ROWS}"
    gold = {"schema": schema, "sql": "SELECT name FROM shop"}
    verdict = judge(gold, "SELECT a FROM docs")
    assert verdict.outcome == "unjudged" and "docs" in verdict.reason
    assert judge(gold, "SELECT a FROM other").outcome == "invalid"
    verdict = judge({"schema": schema, "sql": "SELECT a FROM docs"}, "SELECT 1")
    assert verdict.outcome == "unjudged" and "virtual" in verdict.reason


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        (f"{TABLE}; CREATE TABLE t (a INT AUTO_INCREMENT) ENGINE=InnoDB", "statement 2"),
        (f"{TABLE}; CREATE TABLE public.t (a text DEFAULT 'x'::text)", "CREATE TABLE public.t"),
        (f"{TABLE}; COPY shop (id, name) FROM stdin", "COPY shop"),
        (f"{TABLE}; ATTACH DATABASE 'x' AS y", "ATTACH DATABASE"),
        (" ", "no such table"),
        ("-- nothing", "no such table"),
        ("", "empty"),
        (None, "empty"),
    ],
)
def test_a_schema_that_sqlite_refuses_names_the_statement(schema: Any, named: str) -> None:
    verdict = judge({"schema": schema, "sql": "SELECT name FROM shop"}, "SELECT 1")
    assert verdict.outcome == "unjudged" and named in verdict.reason
