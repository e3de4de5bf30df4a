"""What is computed from facts knows what it rests on."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drillyard.hardware import Fact, FactSource, combine
from drillyard.hardware.facts import Provenance

PAGE = FactSource("page", "2026-01-02")
TABLE = FactSource("table", "2025-12-31")
DOUBTED = FactSource("blog", "2026-03-04", unverified=True)
NUMBERS = st.floats(min_value=1e-6, max_value=1e12)
SOURCES = st.lists(st.sampled_from([PAGE, TABLE, DOUBTED]), max_size=3).map(tuple)
FACTS = st.builds(Fact, NUMBERS, SOURCES)


def test_a_sum_names_every_source_once_and_is_as_old_as_the_oldest():
    fact = Fact(3.0, (PAGE,)) + Fact(4.0, (TABLE,)) + Fact(5.0, (PAGE,))
    assert (fact.value, fact.source, fact.date, fact.unverified) == (
        12.0,
        "page; table",
        "2025-12-31",
        False,
    )


def test_numbers_bring_no_source():
    fact = 100 / (Fact(5.0, (PAGE,)) * 2 - 5)
    assert (fact.value, fact.sources) == (20.0, (PAGE,))


@given(FACTS, FACTS)
def test_one_unverified_operand_makes_the_result_unverified(left, right):
    expected = left.unverified or right.unverified
    assert [
        fact.unverified for fact in (left + right, left - right, left * right, left / right)
    ] == [expected] * 4
    assert (left * right).value == left.value * right.value
    assert set((left / right).sources) == {*left.sources, *right.sources}


def test_a_derived_value_can_be_of_any_kind():
    assert combine(min(3, 4), Fact(3, (PAGE,)), Fact(4, (DOUBTED,)), 7) == Fact(3, (PAGE, DOUBTED))
    assert combine(1.0, TABLE, Fact(3, (PAGE,))) == Fact(1.0, (TABLE, PAGE))


def test_a_fact_shows_itself_as_json():
    assert Fact(8.05, (DOUBTED,)).as_json() == {
        "value": 8.05,
        "source": "blog",
        "date": "2026-03-04",
        "unverified": True,
    }


def test_the_most_specific_source_counts_and_a_doubt_reaches_everything_below():
    provenance = Provenance(PAGE, {"peak": TABLE, "peak.fp8": DOUBTED}, frozenset({"memory"}))
    assert provenance.of("name") == PAGE
    assert provenance.of("peak.bf16") == TABLE
    assert provenance.of("peak.fp8") == DOUBTED
    assert provenance.of("memory.gib") == FactSource("page", "2026-01-02", unverified=True)


def test_facts_cannot_be_changed():
    with pytest.raises(FrozenInstanceError):
        Fact(1.0, (PAGE,)).value = 2.0
