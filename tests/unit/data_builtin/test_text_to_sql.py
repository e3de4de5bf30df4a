"""Facts about `builtin:text-to-sql`: parts share nothing, queries say something, rows never change
by themselves."""

from __future__ import annotations

import itertools
import sqlite3
from collections import Counter, defaultdict
from hashlib import sha256
from typing import Any

import pytest

from drillyard.data.builtin import content_key, documents, held_out_parts
from drillyard.data.builtin.text_to_sql import (
    DOMAINS,
    TEST_PARTS,
    Draw,
    create_tables,
    domain_of,
    fill,
    insert_fill,
    part_of,
)
from drillyard.data.builtin.text_to_sql_vocabulary import CATEGORY_VALUES, NUMBER_RANGES, TEMPLATES

pytestmark = pytest.mark.slow
NAME = "text-to-sql"
PARTS = held_out_parts(NAME)
Rows = list[dict[str, Any]]


@pytest.fixture(scope="module")
def parts() -> dict[str, Rows]:
    held_out = {part: list(documents(NAME, {}, part)) for part in PARTS}
    return {"train": list(documents(NAME, {"examples": 12_000}, "train"))} | held_out


def texts(rows: Rows, column: str) -> set[str]:
    return {row[column] for row in rows}


def combinations(rows: Rows) -> set[tuple[str, ...]]:
    return {(row["template"], *row["columns"]) for row in rows if row["columns"]}


def results(row: dict[str, Any]) -> list[list[Any]]:
    """What the row's SQL returns on each of its fills, in databases that hold only what its schema
    shows."""
    domain = domain_of(row["domain"])
    found = []
    for seed in row["fills"]:
        connection = sqlite3.connect(":memory:")
        connection.executescript(row["schema"])
        insert_fill(connection, fill(domain, seed))
        found.append(connection.execute(row["sql"]).fetchall())
        connection.close()
    return found


def says_something(result: list[Any]) -> bool:
    return bool(result) and any(value is not None for value in result[0])


@pytest.mark.parametrize("column", ["question", "sql"])
def test_no_two_parts_share_a_question_or_a_query(parts: dict[str, Rows], column: str) -> None:
    for one, other in itertools.combinations(parts, 2):
        assert not texts(parts[one], column) & texts(parts[other], column), (one, other)


def test_another_seed_shares_nothing_with_the_held_out_parts_either(parts: dict[str, Rows]) -> None:
    train = list(documents(NAME, {"examples": 5_000, "seed": 7}, "train"))
    for part in PARTS:
        assert not texts(train, "question") & texts(parts[part], "question")
        assert not texts(train, "sql") & texts(parts[part], "sql")


def test_a_question_has_one_query(parts: dict[str, Rows]) -> None:
    queries = defaultdict(set)
    for row in itertools.chain.from_iterable(parts.values()):
        queries[row["question"]].add(row["sql"])
    assert [question for question, sqls in queries.items() if len(sqls) > 1] == []


def test_every_phrasing_names_its_table_and_all_that_its_query_needs() -> None:
    for template in TEMPLATES:
        for question in template.questions:
            named = {slot for slot in template.placeholders if "{" + slot + "}" in question}
            assert template.placeholders - named <= {"id"}, (template.name, question)


def test_a_held_out_query_occurs_once_in_its_part(parts: dict[str, Rows]) -> None:
    for part in PARTS:
        assert len(texts(parts[part], "sql")) == len(parts[part]) == 200


def test_held_out_combinations_are_never_trained_and_their_halves_are(
    parts: dict[str, Rows],
) -> None:
    train = combinations(parts["train"])
    templates = {template for template, *_ in train}
    columns = {column for _, *named in train for column in named}
    for part in ("combinations", "combinations-development"):
        held_out = combinations(parts[part])
        assert held_out and not held_out & train
        assert {template for template, *_ in held_out} <= templates
        assert {column for _, *named in held_out for column in named} <= columns
    assert not combinations(parts["combinations"]) & combinations(parts["combinations-development"])


def test_questions_ask_trained_combinations_only(parts: dict[str, Rows]) -> None:
    for part in ("questions", "questions-development"):
        assert all(row["template"] for row in parts[part])
        for row in parts[part]:
            domain = next(domain for domain in DOMAINS if domain.table == row["domain"])
            template = next(template for template in TEMPLATES if template.name == row["template"])
            assert part_of(domain, template, tuple(row["columns"]), row["sql"]) == part


def test_databases_are_apart_and_have_columns_of_their_own(parts: dict[str, Rows]) -> None:
    domains = {part: texts(rows, "domain") for part, rows in parts.items()}
    assert len(domains["train"]) >= 12
    assert domains["questions"] <= domains["train"] and domains["combinations"] <= domains["train"]
    assert not domains["databases"] & (domains["train"] | domains["databases-development"])
    assert not domains["databases-development"] & domains["train"]
    trained = {column for domain in DOMAINS if domain.role == "train" for column in domain.columns}
    for domain in DOMAINS:
        if domain.role != "train":
            assert set(domain.columns) - trained, domain.table


def test_every_template_is_trained_and_there_are_many(parts: dict[str, Rows]) -> None:
    counts = Counter(row["template"] for row in parts["train"])
    assert set(counts) == {template.name for template in TEMPLATES}
    assert len(counts) >= 31
    assert min(counts.values()) > 12_000 / len(counts) / 4


def test_every_query_runs_on_its_shown_schema_and_returns_something(parts: dict[str, Rows]) -> None:
    for row in parts["train"][:500]:
        assert says_something(results(row)[0]), row


@pytest.mark.parametrize("part", PARTS)
def test_held_out_results_say_something_on_every_fill_and_mostly_differ(
    parts: dict[str, Rows], part: str
) -> None:
    differing = 0
    for row in parts[part]:
        found = results(row)
        assert len(found) == 3 and all(map(says_something, found)), row
        differing += found[0] != found[1] and found[0] != found[2] and found[1] != found[2]
    assert differing >= 0.98 * len(parts[part])


def test_rows_are_short_enough_for_sequences_of_128_tokens(parts: dict[str, Rows]) -> None:
    """420 characters; with a byte-level BPE of 1,024 entries the longest row has about 85 tokens,
    the mean 47."""
    longest = max(
        len(row["schema"]) + len(row["question"]) + len(row["sql"]) for row in parts["train"]
    )
    assert longest < 420


def test_the_same_options_give_the_same_rows_and_a_larger_set_begins_with_the_smaller(
    parts: dict[str, Rows],
) -> None:
    assert list(documents(NAME, {"examples": 1_000}, "train")) == parts["train"][:1_000]
    assert list(documents(NAME, {"held_out_examples": 20}, "databases")) == parts["databases"][:20]
    assert list(documents(NAME, {"examples": 50, "seed": 1}, "train")) != parts["train"][:50]


def test_rows_do_not_depend_on_the_python_that_makes_them(parts: dict[str, Rows]) -> None:
    """A digest taken once: it changes only with VERSION, never with a Python or a sqlite
    version."""
    digest = sha256(repr([parts[part][:50] for part in parts]).encode()).hexdigest()
    assert digest[:16] == "5f084b7c171779c4"


def test_made_up_domains_are_trained_only_and_share_nothing_with_held_out_parts(
    parts: dict[str, Rows],
) -> None:
    rows = list(documents(NAME, {"examples": 3_000, "made_up": 0.5}, "train"))
    named = {domain.table for domain in DOMAINS}
    invented = [row for row in rows if row["domain"] not in named]
    assert 0.4 < len(invented) / len(rows) < 0.6
    assert len(texts(invented, "domain")) > 200
    held_out = [row for part in PARTS for row in parts[part]]
    assert not texts(rows, "question") & texts(held_out, "question")
    assert not combinations(rows) & (
        combinations(parts["combinations"]) | combinations(parts["combinations-development"])
    )
    assert all(says_something(results(row)[0]) for row in invented[:100])
    assert list(documents(NAME, {"made_up": 0.5}, "databases")) == parts["databases"]


def test_rows_stream() -> None:
    endless = documents(NAME, {"examples": 10**12}, "train")
    assert next(endless)["sql"].startswith("SELECT")


def test_the_content_key_follows_what_changes_rows_and_nothing_else() -> None:
    key = content_key(NAME, {})
    assert content_key(NAME, {"seed": 1}) != key
    assert content_key(NAME, {"examples": 5}) != key
    assert content_key(NAME, {"held_out": ["databases"]}) == key
    assert held_out_parts(NAME, {}) == list(TEST_PARTS)
    assert held_out_parts(NAME, {"held_out": ["databases-development"]}) == [
        "databases-development"
    ]


@pytest.mark.parametrize("domain", DOMAINS, ids=lambda domain: domain.table)
def test_a_fill_has_unique_numbers_and_labels_and_rows_without_events(domain: Any) -> None:
    rows = fill(domain, 3)
    main, events = rows[domain.table], rows[domain.events]
    for name in (domain.label, *domain.numbers):
        assert len(set(main[name])) == len(main[name])
    for name, values in (main | events).items():
        if name in NUMBER_RANGES:
            low, high, step = NUMBER_RANGES[name]
            assert all(low <= value <= high and (value - low) % step == 0 for value in values)
        elif name in CATEGORY_VALUES:
            assert set(values) <= set(CATEGORY_VALUES[name])
    assert set(events[domain.key]) < set(main[domain.key])
    assert len(set(main[domain.key]) - set(events[domain.key])) >= 2
    assert not set(domain.columns) & set(domain.event_columns)


def test_a_fill_goes_into_whatever_part_of_the_schema_is_there() -> None:
    connection = sqlite3.connect(":memory:")
    connection.executescript("CREATE TABLE shops (city TEXT, shop_id INT)")
    rows = fill(DOMAINS[0], 1)
    insert_fill(connection, rows)
    shown = connection.execute("SELECT city, shop_id FROM shops").fetchall()
    assert shown == list(zip(rows["shops"]["city"], rows["shops"]["shop_id"], strict=True))
    assert "CREATE TABLE sales" in create_tables(DOMAINS[0])


def test_draws_cover_their_range() -> None:
    draw = Draw("test")
    assert {draw.below(5) for _ in range(200)} == set(range(5))
    assert sorted(draw.some(range(6), 6)) == list(range(6))
    assert Draw("a").uniform() == Draw("a").uniform() != Draw("b").uniform()
