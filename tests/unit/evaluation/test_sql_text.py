"""Facts about reading SQL as tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drillyard.evaluation.sql_text import Token, has_top_level_order_by, statements, tokens


@pytest.mark.parametrize(
    ("sql", "ordered"),
    [
        ("SELECT a FROM t ORDER BY a", True),
        ("select a from t order\n\tby a desc limit 1;", True),
        ("SELECT a FROM t ORDER /* x */ BY a", True),
        ("(SELECT a FROM t) ORDER BY a", True),
        ("SELECT a FROM t UNION SELECT b FROM u ORDER BY 1", True),
        ("SELECT a FROM t", False),
        ("SELECT a FROM (SELECT a FROM t ORDER BY a)", False),
        ("SELECT a, ROW_NUMBER() OVER (ORDER BY b) FROM t", False),
        ("SELECT a FROM t WHERE b = 'x ORDER BY y'", False),
        ("SELECT a FROM t WHERE b = 'it''s' AND c = ' ORDER BY '", False),
        ('SELECT "ORDER BY" FROM t', False),
        ("SELECT [ORDER] BY FROM t", False),
        ("SELECT a FROM t -- ORDER BY a", False),
        ("SELECT a FROM t /* ORDER BY a */", False),
        ("SELECT a FROM t WHERE b = '(' ORDER BY a", True),
        ("SELECT border by FROM t", False),
    ],
)
def test_only_a_top_level_order_by_orders(sql: str, ordered: bool) -> None:
    assert has_top_level_order_by(sql) is ordered


def test_tokens_lose_their_quotes_and_keep_their_kind() -> None:
    assert list(tokens("SELECT \"a\"\"b\", `c`, 'it''s' >= 1.5e3")) == [
        Token("name", "SELECT"),
        Token("name", 'a"b', '"'),
        Token("symbol", ","),
        Token("name", "c", "`"),
        Token("symbol", ","),
        Token("string", "it's", "'"),
        Token("symbol", ">="),
        Token("number", "1.5e3"),
    ]


@given(st.text())
def test_any_text_has_tokens(sql: str) -> None:
    list(tokens(sql))
    statements(sql)
    has_top_level_order_by(sql)
