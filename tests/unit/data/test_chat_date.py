"""A chat template with a clock: the day is the one on which the run began, on every later day."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from drillyard.config.run import RunConfig
from drillyard.data import prepared_data
from drillyard.data.data_changes import DATA_RECORD, read_record, write_record
from drillyard.data.mapped_sequences import Batch
from drillyard.data.prepared_data import PreparedData, prepare

DATED = (
    "<day {{ strftime_now('%d %b %Y') }}>{% for m in messages %}<{{ m.role }}>{{ m.content }};"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
TALK = [{"role": "user", "content": "When?"}, {"role": "assistant", "content": "Now."}]


@pytest.fixture
def config(
    make_config: Callable[..., RunConfig],
    write_rows: Callable[..., Path],
    chat_tokenizer: Callable[[str], Path],
) -> RunConfig:
    rows = [{"messages": TALK}] * 20
    tokenizer = str(chat_tokenizer(DATED))
    return make_config(write_rows(rows), format="chat", tokenizer=tokenizer, packing=False)


@pytest.fixture
def today(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes a day today."""
    return lambda day: monkeypatch.setattr(prepared_data, "today", lambda: day)


def first_text(data: PreparedData) -> str:
    batch: Batch = data.train.sources[0].read(np.array([0]))
    tokens = batch.input_ids[0][batch.document_ids[0] >= 0].tolist()
    return str(data.tokenizer.decode(tokens))


def test_a_run_keeps_the_day_on_which_it_began(
    config: RunConfig, today: Callable[[str], None], tmp_path: Path
) -> None:
    today("2026-01-31")
    began = prepare(config)
    assert first_text(began).startswith("<day 31 Jan 2026>")
    write_record(tmp_path, began.record)
    assert json.loads((tmp_path / DATA_RECORD).read_text())["date"] == "2026-01-31"

    today("2026-02-01")
    resumed = prepare(config, known=read_record(tmp_path))
    assert first_text(resumed) == first_text(began)
    assert resumed.record == began.record
    another = prepare(config)
    assert first_text(another).startswith("<day 01 Feb 2026>")
    assert another.record.fingerprint != began.record.fingerprint


def test_ranks_in_other_time_zones_have_the_day_of_the_first(
    config: RunConfig, today: Callable[[str], None]
) -> None:
    today("2026-02-01")
    assert prepare(config, date="2026-01-31").record.date == "2026-01-31"


def test_the_text_is_that_of_transformers_on_that_day(config: RunConfig) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(config.data.tokenizer)
    expected = tokenizer.apply_chat_template(TALK, tokenize=False)
    assert first_text(prepare(config)) == expected


def test_a_template_without_a_clock_has_no_day(
    config: RunConfig, chat_tokenizer: Callable[[str], Path], today: Callable[[str], None]
) -> None:
    plain = str(chat_tokenizer(DATED.replace("strftime_now('%d %b %Y')", "'once'")))
    config = config.model_copy(update={"data": config.data.model_copy(update={"tokenizer": plain})})
    records = []
    for day in ("2026-01-31", "2026-02-01"):
        today(day)
        records.append(prepare(config).record)
    assert records[0] == records[1] and records[0].date is None


@pytest.mark.parametrize("date", [3, "tomorrow", "2026-13-01", ["2026-01-31"]])
def test_a_record_with_an_odd_day_is_none(date: Any, config: RunConfig, tmp_path: Path) -> None:
    write_record(tmp_path, prepare(config).record)
    path = tmp_path / DATA_RECORD
    path.write_text(json.dumps(json.loads(path.read_text()) | {"date": date}))
    assert read_record(tmp_path) is None
