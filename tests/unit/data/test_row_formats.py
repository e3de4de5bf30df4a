"""How rows become documents, and what is said about rows that cannot."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.facts import says

from drillyard.config.run import RunConfig
from drillyard.data.prepared_data import prepare
from drillyard.data.row_formats import RowFormat, render_prompt, row_format
from drillyard.errors import UserError

MakeConfig = Callable[..., RunConfig]
WriteRows = Callable[..., Path]

SQL_ROW = {
    "schema": "CREATE TABLE t (a);",
    "question": "How many?",
    "sql": "SELECT count(*) FROM t",
}


def segments(form: RowFormat, row: dict[str, Any]) -> list[tuple[str, bool]]:
    return form.segments(form.canonical(row, "here"), "here")


def test_text_carries_loss_throughout() -> None:
    assert segments(RowFormat("text", loss_on="all"), {"text": " a ", "b": 1}) == [(" a ", True)]


def test_a_completion_carries_loss_and_its_prompt_does_not() -> None:
    row = {"prompt": "p", "completion": "c"}
    assert segments(RowFormat("prompt-completion"), row) == [("p", False), ("c", True)]
    assert segments(RowFormat("prompt-completion", loss_on="all"), row) == [
        ("p", True),
        ("c", True),
    ]


@pytest.mark.parametrize(
    "row",
    [
        SQL_ROW,
        {"db_id": "d", **SQL_ROW},
        {
            "sql_context": SQL_ROW["schema"],
            "sql_prompt": SQL_ROW["question"],
            "sql": SQL_ROW["sql"],
            "sql_explanation": "x",
        },
    ],
    ids=["built-in", "Spider", "gretelai"],
)
def test_text_to_sql_knows_the_columns_of_the_common_sets(row: dict[str, Any]) -> None:
    assert segments(RowFormat("text-to-sql"), row) == [
        (render_prompt(SQL_ROW), False),
        (SQL_ROW["sql"], True),
    ]


def test_columns_can_be_mapped() -> None:
    form = RowFormat("text-to-sql", {"question": "q", "sql": "query"})
    row = {"schema": SQL_ROW["schema"], "q": SQL_ROW["question"], "query": SQL_ROW["sql"]}
    assert segments(form, row) == segments(RowFormat("text-to-sql"), SQL_ROW)


def test_a_question_stays_on_its_comment_line() -> None:
    assert (
        render_prompt({"schema": "CREATE TABLE t (a);\n", "question": "one\ntwo"})
        == "CREATE TABLE t (a);\n-- one two\n"
    )


def test_a_column_that_is_not_there_is_reported_with_those_that_are() -> None:
    with pytest.raises(UserError) as caught:
        segments(RowFormat("prompt-completion"), {"promt": "p", "completion": "c"})
    assert says(
        str(caught.value),
        "here: ... 'prompt' ... prompt-completion ... promt, completion ... data.columns: {prompt:"
        " promt}",
    )
    with pytest.raises(UserError, match="column 'schema' or 'sql_context'"):
        segments(RowFormat("text-to-sql"), {"question": "q", "sql": "s"})


@pytest.mark.parametrize(
    ("value", "found"), [(3, "type int"), (None, "no value"), (["a"], "type list")]
)
def test_a_value_that_is_not_text_is_an_error(
    value: Any, found: str, make_config: MakeConfig, write_rows: WriteRows
) -> None:
    path = write_rows([{"text": "fine"}, {"text": value}])
    with pytest.raises(UserError, match=f"data.jsonl, line 2: .*'text'.*{found}"):
        prepare(make_config(path, on_error="refuse"))


def test_half_of_a_surrogate_pair_is_an_error(
    make_config: MakeConfig, write_rows: WriteRows
) -> None:
    path = write_rows([{"text": "fine"}, {"text": "bad \ud800"}])
    with pytest.raises(UserError, match=r"line 2: .*surrogate"):
        prepare(make_config(path, on_error="refuse"))


def test_settings_that_do_not_fit_the_format_are_reported(make_config: MakeConfig) -> None:
    with pytest.raises(UserError, match=r"'promt'.*'prompt'"):
        row_format(make_config("x", format="prompt-completion", columns={"promt": "a"}).data)
    with pytest.raises(UserError, match=r"format text.*completion"):
        row_format(make_config("x", loss_on="completion").data)


def test_a_held_out_column_that_is_not_there_is_reported(
    make_config: MakeConfig, write_rows: WriteRows
) -> None:
    path = write_rows([{"text": "fine"}])
    with pytest.raises(UserError, match=r"line 1: .*'db' \(data.held_out.split_by\).*: text"):
        prepare(make_config(path, held_out={"fraction": 0.5, "split_by": "db"}))
