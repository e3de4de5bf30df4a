"""What `drillyard eval` prints of its results, and the shares that `drillyard data` shows as it
prepares."""

from __future__ import annotations

from typing import Any

import pytest

from drillyard.cli.data import _share
from drillyard.cli.saved_model import _cell, _print_table


@pytest.mark.parametrize(
    ("key", "value", "shown"),
    [
        ("sql_execution", 0.125, "12.5%"),
        ("tokens", 12345, "12,345"),
        ("loss", 1.5, "1.5000"),
        ("loss", None, "-"),
        ("sql_execution", None, "-"),
    ],
)
def test_how_a_result_is_written(key: str, value: Any, shown: str) -> None:
    assert _cell(key, value) == shown


def test_a_table_has_a_column_for_each_result_that_some_part_has(
    capsys: pytest.CaptureFixture[str],
) -> None:
    _print_table(
        {"first": {"loss": 1.5, "sql_execution": None}, "second": {"loss": 2.0, "tokens": 7}}
    )
    lines = [
        line
        for line in capsys.readouterr().out.splitlines()
        if any(letter.isalpha() for letter in line)
    ]
    cells = [
        [cell.strip() for cell in line.replace("┃", "│").strip("│ ").split("│")] for line in lines
    ]
    assert cells == [
        ["held-out part", "loss", "tokens"],
        ["first", "1.5000", "-"],
        ["second", "2.0000", "7"],
    ]


@pytest.mark.parametrize(
    ("done", "total", "shown"),
    [(1, 3, "33 %"), (3, 3, "100 %"), (2_500_000, None, "2 MB"), (5_000_000, 0, "5 MB")],
)
def test_a_share_is_of_the_whole_where_that_is_known(
    done: int, total: int | None, shown: str
) -> None:
    assert _share(done, total) == shown
