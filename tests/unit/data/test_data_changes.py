"""Data that change under a run are noticed, named and refused; data that are merely gone do not
stop it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.facts import says

from drillyard.config.run import RunConfig
from drillyard.data.data_changes import DATA_RECORD, DataRecord, read_record, write_record
from drillyard.data.prepared_data import prepare
from drillyard.data.sampler import BatchShape
from drillyard.errors import UserError

MakeConfig = Callable[..., RunConfig]
WriteRows = Callable[..., Path]
ROWS = [{"text": f"text number {n}"} for n in range(40)]


@pytest.fixture
def source(write_rows: WriteRows) -> Path:
    return write_rows(ROWS)


@pytest.fixture
def config(make_config: MakeConfig, source: Path) -> RunConfig:
    return make_config(source)


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """A directory source of three files."""
    (tmp_path / "texts").mkdir()
    for name in "abc":
        (tmp_path / "texts" / f"{name}.txt").write_text(f"the text of {name}. " * 20)
    return tmp_path / "texts"


def refusal(config: RunConfig, known: DataRecord) -> str:
    """What a later attempt reads."""
    caches = tokenized(config)
    with pytest.raises(UserError) as raised:
        prepare(config, known=known)
    assert tokenized(config) == caches, "something was tokenised before it was refused"
    return str(raised.value)


def tokenized(config: RunConfig) -> list[Path]:
    assert config.data.cache_directory is not None
    return sorted((Path(config.data.cache_directory) / "tokenized").iterdir())


def test_an_appended_row_is_refused(config: RunConfig, source: Path) -> None:
    known = prepare(config).record
    with source.open("a") as file:
        file.write('{"text": "one more"}\n')
    message = refusal(config, known)
    assert says(message, f"{source} ... content changed ... another `name`")


def test_an_edited_byte_is_refused_though_size_and_time_stay(
    config: RunConfig, source: Path
) -> None:
    known = prepare(config).record
    times = (source.stat().st_atime_ns, source.stat().st_mtime_ns)
    source.write_bytes(source.read_bytes().replace(b"number 7", b"number 8"))
    os.utime(source, ns=times)
    assert says(refusal(config, known), "changed")


def test_the_same_content_written_again_is_the_same_source(config: RunConfig, source: Path) -> None:
    first = prepare(config)
    source.write_bytes(source.read_bytes())
    again = prepare(config, known=first.record)
    assert again.record == first.record
    assert again.report.notes == []


def test_files_of_a_directory_are_named(make_config: MakeConfig, texts: Path) -> None:
    config = make_config(texts)
    known = prepare(config).record
    (texts / "b.txt").write_text("other")
    (texts / "d.txt").write_text("new")
    (texts / "a.txt").unlink()
    assert says(refusal(config, known), "b.txt: other content ... d.txt: new ... a.txt: missing")


def test_a_source_that_is_gone_is_read_from_its_cache(config: RunConfig, source: Path) -> None:
    first = prepare(config)
    source.unlink()
    with pytest.raises(UserError, match="no such file"):
        prepare(config)
    again = prepare(config, known=first.record)
    assert again.train.fingerprint == first.train.fingerprint
    assert again.record == first.record
    refs = first.train.indices(3, BatchShape(8))
    assert np.array_equal(again.train.read(refs).input_ids, first.train.read(refs).input_ids)
    (note,) = again.report.notes
    assert str(source) in note
    assert says(note, "missing ... tokenised cache")


def test_a_file_that_is_gone_from_a_directory_is_read_from_the_cache(
    make_config: MakeConfig, texts: Path
) -> None:
    config = make_config(texts)
    first = prepare(config)
    (texts / "b.txt").unlink()
    again = prepare(config, known=first.record)
    assert again.train.fingerprint == first.train.fingerprint
    (note,) = again.report.notes
    assert "b.txt: missing" in note


def test_a_source_and_a_cache_that_are_both_missing_are_an_error(
    config: RunConfig, source: Path
) -> None:
    known = prepare(config).record
    source.unlink()
    shutil.rmtree(tokenized(config)[0])
    with pytest.raises(UserError, match=r"data\.jsonl.*missing"):
        prepare(config, known=known)


def test_metrics_that_need_rows_do_not_go_on_without_them(config: RunConfig, source: Path) -> None:
    known = prepare(config).record
    source.unlink()
    needs_rows = config.model_copy(
        update={
            "evaluation": config.evaluation.model_copy(
                update={"metrics": ["loss", "sql-execution"]}
            )
        }
    )
    assert says(refusal(needs_rows, known), "evaluation.metrics")


def test_held_out_data_that_changed_are_reported_and_used(
    make_config: MakeConfig, write_rows: WriteRows, source: Path
) -> None:
    held_out = write_rows(ROWS[:5], "held.jsonl")
    config = make_config(source, held_out={"source": str(held_out)})
    known = prepare(config).record
    write_rows(ROWS[:6], "held.jsonl")
    again = prepare(config, known=known)
    assert again.held_out["held"].counts["documents"] == 6
    (note,) = again.report.notes
    assert says(note, "held-out ... held changed")


def test_a_tokenizer_that_changed_is_refused(
    make_config: MakeConfig, source: Path, tokenizer_directory: Path, tmp_path: Path
) -> None:
    own = tmp_path / "tokenizer"
    shutil.copytree(tokenizer_directory, own)
    config = make_config(source, tokenizer=str(own))
    known = prepare(config).record
    path = own / "tokenizer.json"
    path.write_text(
        path.read_text()
        .replace('"add_prefix_space": false', '"add_prefix_space": true')
        .replace('"add_prefix_space":false', '"add_prefix_space":true')
    )
    message = refusal(config, known)
    assert str(own) in message
    assert says(message, "other tokens") and "under another `name`" in message
    with pytest.raises(UserError, match=r"other tokens.*shown$"):
        prepare(config, known=known, if_changed="Nothing can be shown")


def test_a_source_that_changes_while_it_is_tokenised_leaves_no_cache(
    config: RunConfig, source: Path
) -> None:
    def meddle(what: str, done: int, total: int | None) -> None:
        with source.open("a") as file:
            file.write('{"text": "too late"}\n')

    with pytest.raises(UserError, match=r"changed.*Start again"):
        prepare(config, on_progress=meddle)
    assert tokenized(config) == []


def test_the_record_is_read_as_it_was_written(config: RunConfig, tmp_path: Path) -> None:
    record = prepare(config).record
    assert read_record(tmp_path) is None
    write_record(tmp_path, record)
    assert read_record(tmp_path) == record
    whole = (tmp_path / DATA_RECORD).read_text()
    (tmp_path / DATA_RECORD).write_text(whole[: len(whole) // 2])
    assert read_record(tmp_path) is None
    write_record(tmp_path, record)
    assert (tmp_path / DATA_RECORD).read_text() == whole


def test_a_source_of_very_many_files_is_recorded_by_its_key(
    make_config: MakeConfig, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drillyard.data.data_changes.RECORDED_FILES", 2)
    config = make_config(texts)
    record = prepare(config).record
    write_record(tmp_path, record)
    known = read_record(tmp_path)
    assert known == replace(record, training={"texts": replace(record.training["texts"], files={})})
    (texts / "a.txt").write_text("other")
    assert says(refusal(config, known), "content changed")


def test_a_record_that_cannot_be_replaced_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = DataRecord("fingerprint", "tokenizer")
    write_record(tmp_path, good)

    def full(path: Path, *arguments: object, **options: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        write_record(tmp_path, replace(good, fingerprint="another"))
    assert read_record(tmp_path) == good and [path.name for path in tmp_path.iterdir()] == [
        DATA_RECORD
    ]


def test_a_record_that_a_killed_writer_left_half_made_goes_with_the_next(tmp_path: Path) -> None:
    (tmp_path / f"{DATA_RECORD}.tmp").write_text('{"version')
    record = DataRecord("fingerprint", "tokenizer")
    write_record(tmp_path, record)
    assert read_record(tmp_path) == record and [path.name for path in tmp_path.iterdir()] == [
        DATA_RECORD
    ]
