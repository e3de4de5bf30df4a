"""A row at fault costs that row: it is left out, counted and named, or refused (data.on_error)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.unit.data.test_chat_template import CHATML, TALK

from drillyard.config.run import RunConfig
from drillyard.config.run_identity import differences
from drillyard.data.first_rows import require_readable_data
from drillyard.data.held_out_parts import evaluation_rows
from drillyard.data.prepared_data import prepare
from drillyard.errors import UserError

MakeConfig = Callable[..., RunConfig]
WriteRows = Callable[..., Path]
GOOD = [{"text": f"a fine row, number {n}"} for n in range(6)]


def json_lines(*lines: Any) -> bytes:
    written = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    return b"\n".join(written) + b"\n"


FILES: dict[str, tuple[str, bytes, str]] = {
    "another type": ("a.jsonl", json_lines(GOOD[0], {"text": 3}, *GOOD[1:]), "line 2: .*'text'"),
    "no column": ("a.jsonl", json_lines(GOOD[0], {"txt": "a"}, *GOOD[1:]), "line 2: no column"),
    "not JSON": ("a.jsonl", json_lines(GOOD[0], b'{"text": "a', *GOOD[1:]), "line 2, column 10: "),
    "a list": ("a.jsonl", json_lines(GOOD[0], [1], *GOOD[1:]), "line 2: .*an array"),
    "too deep": ("a.jsonl", json_lines(GOOD[0], b"[" * 100_000, *GOOD[1:]), "line 2: .*deep"),
    "not UTF-8": (
        "a.jsonl",
        json_lines(GOOD[0], b'{"text": "\xff"}', *GOOD[1:]),
        "line 2, byte 43: 0xff",
    ),
    "half a pair": (
        "a.jsonl",
        json_lines(GOOD[0], b'{"text": "\\ud800"}', *GOOD[1:]),
        "line 2: .*surrogate",
    ),
    "no object of an array": (
        "a.json",
        json.dumps([GOOD[0], 17, *GOOD[1:]]).encode(),
        "row 2, line 1, column .*a number",
    ),
    "values of CSV": (
        "a.csv",
        b"text\n" + b"\n".join([b"fine", b"a,b", *[b"more"] * 5]),
        "line 3: 2 values",
    ),
    "quotes of CSV": (
        "a.csv",
        b"text\n" + b"\n".join([b"fine", b'"a" b', *[b"more"] * 5]),
        "line 3: not valid CSV",
    ),
}


@pytest.mark.parametrize("case", FILES)
def test_a_row_at_fault_is_left_out_and_named(
    case: str, make_config: MakeConfig, tmp_path: Path
) -> None:
    name, content, found = FILES[case]
    (tmp_path / name).write_bytes(content)
    for _ in range(2):  # built, and from the cache
        data = prepare(make_config(tmp_path / name))
        (part,) = data.report.parts.values()
        assert (part["rows"], part["documents"], part["at_fault"]) == (7, 6, 1)
        (note,) = data.report.notes
        assert "1 of 7 rows" in note
        with pytest.raises(AssertionError, match=f"{name}, {found}"):
            raise AssertionError(note)
    # A cache that was made without these rows is refused as well.
    for _ in range(2):
        with pytest.raises(UserError, match=f"{name}, {found}"):
            prepare(make_config(tmp_path / name, on_error="refuse"))
    fresh = str(tmp_path / "fresh")
    with pytest.raises(UserError, match=f"{name}, {found}"):
        prepare(make_config(tmp_path / name, on_error="refuse", cache_directory=fresh))


def test_values_of_parquet_that_are_no_text_cost_their_row(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    column = pa.array([b"good one", b"\xff", b"good two"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
    data = prepare(make_config(tmp_path / "a.parquet"))
    (part,) = data.report.parts.values()
    assert (part["rows"], part["documents"], part["at_fault"]) == (3, 2, 1)
    assert "row 2" in data.report.notes[0]


def test_the_other_rows_are_as_without_the_row_at_fault(
    make_config: MakeConfig, write_rows: WriteRows
) -> None:
    whole = prepare(make_config(write_rows(GOOD, "whole.jsonl")))
    faulty = prepare(make_config(write_rows([*GOOD[:3], {"no": 1}, *GOOD[3:]], "faulty.jsonl")))
    one, other = (data.train.sources[0].read([0]) for data in (whole, faulty))
    assert np.array_equal(one.input_ids, other.input_ids)
    assert np.array_equal(one.labels, other.labels)


def test_data_of_which_every_row_is_at_fault_are_refused(
    make_config: MakeConfig, write_rows: WriteRows
) -> None:
    config = make_config(write_rows([{"no": 1}, {"text": 2}]))
    with pytest.raises(UserError, match=r"data\.jsonl, line 1: no column 'text'.*2 of 2 rows"):
        prepare(config)
    with pytest.raises(UserError, match="line 1: no column 'text'"):
        require_readable_data(config)


def test_some_of_the_first_rows_at_fault_do_not_stop_a_run(
    make_config: MakeConfig, write_rows: WriteRows
) -> None:
    path = write_rows([{"no": 1}, *GOOD])
    require_readable_data(make_config(path))
    require_readable_data(make_config(path, tokenizer={"train": "bpe", "vocab_size": 300}))
    for tokenizer in ({}, {"tokenizer": {"train": "bpe", "vocab_size": 300}}):
        with pytest.raises(UserError, match="line 1: "):
            require_readable_data(make_config(path, on_error="refuse", **tokenizer))


def test_a_tokenizer_is_trained_without_rows_at_fault(
    make_config: MakeConfig, write_rows: WriteRows
) -> None:
    path = write_rows([*GOOD[:2], {"text": 3}, *GOOD[2:]])
    settings = {"tokenizer": {"train": "bpe", "vocab_size": 300}}
    assert prepare(make_config(path, **settings)).report.parts["data"]["at_fault"] == 1


@pytest.mark.parametrize(
    "bad",
    [
        {"messages": [{"role": "user"}]},
        {"messages": [{"role": "narrator", "content": "a"}, *TALK]},
        {"messages": [*TALK, {"role": "assistant", "tool_calls": [{"name": "f"}]}]},
        {"other": 1},
    ],
)
@pytest.mark.parametrize("name", ["chat", "function-calling"])
def test_chats_at_fault_cost_their_row(
    bad: dict[str, Any],
    name: str,
    make_config: MakeConfig,
    write_rows: WriteRows,
    chat_tokenizer: Callable[[str], Path],
) -> None:
    if name == "function-calling" and "tool_calls" in str(bad):
        bad = {"messages": [{"role": "assistant", "tool_calls": ["f"]}]}
    path = write_rows([{"messages": TALK}, bad])
    settings = {"format": name, "tokenizer": str(chat_tokenizer(CHATML)), "sequence_length": 256}
    data = prepare(make_config(path, **settings))
    assert data.report.parts["data"]["at_fault"] == 1
    assert "1 of 2 rows" in data.report.notes[0] and "line 2: " in data.report.notes[0]
    with pytest.raises(UserError, match="line 2: "):
        prepare(make_config(path, on_error="refuse", **settings))


def test_rows_at_fault_are_no_questions_of_an_evaluation(
    make_config: MakeConfig, write_rows: WriteRows
) -> None:
    good = [{"schema": f"CREATE TABLE t{n} (a)", "question": "a?", "sql": "SELECT 1"} for n in range(3)]  # fmt: skip # noqa: E501
    path = write_rows([*good, {**good[0], "sql": 5}, {"schema": "x"}])
    held_out = {"source": {"path": str(path), "name": "test"}}
    settings = {"format": "text-to-sql", "held_out": held_out, "sequence_length": 256}
    assert len(evaluation_rows(make_config(path, **settings), "test", 10)) == 3
    with pytest.raises(UserError, match="line 4: "):
        evaluation_rows(make_config(path, on_error="refuse", **settings), "test", 10)


def test_what_a_row_at_fault_costs_may_change_between_starts(make_config: MakeConfig) -> None:
    assert differences(make_config("a"), make_config("a", on_error="refuse")) == []


@pytest.mark.parametrize(
    ("name", "content"),
    [("a.json", b'[{"text": "a"}, {"text"'), ("a.csv", b'text\nfine\n"open, to the end\nmore\n')],
)
def test_a_file_in_which_the_end_of_a_row_is_not_known_is_refused(
    name: str, content: bytes, make_config: MakeConfig, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=name):
        prepare(make_config(tmp_path / name))
