"""Megatron data as a source of a run: what training reads, in which order, and what bad files and
settings get."""

from __future__ import annotations

import itertools
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from drillyard.cli.main import app
from drillyard.config.run import RunConfig
from drillyard.config.run_checks import check_run
from drillyard.data.mapped_sequences import IGNORED
from drillyard.data.megatron.export import write_megatron
from drillyard.data.megatron.indexed_file import IndexedFileWriter, open_indexed
from drillyard.data.prepared_data import prepare
from drillyard.data.sampler import BatchShape
from drillyard.errors import UserError
from drillyard.export_directory import locked

MakeConfig = Callable[..., RunConfig]
WriteRows = Callable[..., Path]
DOCUMENTS = [list(range(10, 10 + length)) for length in (5, 70, 1, 0, 33, 64, 200, 3)]


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    """Files of `DOCUMENTS`; returns the path of `.bin`."""
    with IndexedFileWriter(tmp_path / "corpus", 320) as writer:
        writer.add(
            np.concatenate([np.array(document, np.int64) for document in DOCUMENTS]),
            map(len, DOCUMENTS),
        )
    return tmp_path / "corpus.bin"


def learnt(batch: Any) -> list[tuple[int, int]]:
    """(token, next token) of all positions with loss."""
    mask = batch.labels != IGNORED
    return sorted(zip(batch.input_ids[mask].tolist(), batch.labels[mask].tolist(), strict=True))


@pytest.mark.parametrize("form", ["corpus.bin", "corpus.idx", "corpus"])
def test_an_epoch_learns_every_pair_of_neighbours_within_a_document_once(
    form: str, pair: Path, make_config: MakeConfig
) -> None:
    data = prepare(make_config(pair.with_name(form))).train
    assert data.sources[0].name == "corpus"
    number = len(data.sources[0])
    assert number == -(-(sum(map(len, DOCUMENTS)) - 1) // 64)
    batch = data.read([ref for step in range(number) for ref in data.indices(step, BatchShape(1))])
    assert learnt(batch) == sorted(
        each for document in DOCUMENTS for each in itertools.pairwise(document)
    )
    assert data.sources[0].num_valid_tokens == (batch.labels != IGNORED).sum()


def test_without_isolation_every_token_but_the_first_is_learnt(
    pair: Path, make_config: MakeConfig
) -> None:
    source = prepare(make_config(pair, megatron={"isolation": "none"})).train.sources[0]
    batch = source.read(range(len(source)))
    stream = [token for document in DOCUMENTS for token in document]
    assert learnt(batch) == sorted(itertools.pairwise(stream))
    assert set(batch.document_ids.ravel().tolist()) == {0, -1}


def test_nothing_is_copied_into_the_cache(
    pair: Path, make_config: MakeConfig, tmp_path: Path
) -> None:
    prepare(make_config(pair))
    assert list((tmp_path / "cache" / "tokenized").iterdir()) == []


def test_a_split_trains_and_evaluates_different_documents(
    pair: Path, make_config: MakeConfig
) -> None:
    config = make_config(
        pair,
        megatron={"split": "75,25"},
        held_out={"source": {"path": str(pair), "split": "valid", "name": "valid"}},
    )
    data = prepare(config)
    held_out = data.held_out["valid"]
    parts = [part.read(range(len(part))) for part in (data.train.sources[0], held_out)]
    for batch, documents in zip(parts, (DOCUMENTS[:6], DOCUMENTS[6:]), strict=True):
        assert learnt(batch) == sorted(
            each for document in documents for each in itertools.pairwise(document)
        )


def test_megatrons_order_is_taken_on_request(make_config: MakeConfig) -> None:
    reference = Path(__file__).parent / "reference"
    weights = {"a": 0.5, "b": 0.3, "c": 0.2}
    config = make_config(
        "builtin:python-stdlib", sequence_length=32, megatron={"samples": 1000, "isolation": "none"}
    )
    sources = [
        {"path": str(reference / f"{name}.bin"), "weight": weight}
        for name, weight in weights.items()
    ]
    values = config.model_dump()
    values["data"]["source"] = sources
    mixture = prepare(RunConfig.model_validate(values)).train
    batches = [mixture.read(mixture.indices(step, BatchShape(10))) for step in range(100)]
    expected = np.load(reference / "orders.npz")["blend.tokens"]
    np.testing.assert_array_equal(
        np.concatenate([batch.input_ids for batch in batches]), expected[:, :-1]
    )
    np.testing.assert_array_equal(
        np.concatenate([batch.labels for batch in batches]), expected[:, 1:]
    )


def test_places_name_the_document_of_the_file(pair: Path, make_config: MakeConfig) -> None:
    source = prepare(make_config(pair)).train.sources[0]
    assert source.places(1) == [("", f"document {number}") for number in (1, 2, 4, 5)]


@pytest.mark.parametrize("form", ["corpus.bin", "corpus"])
def test_a_resume_finds_the_same_data(form: str, pair: Path, make_config: MakeConfig) -> None:
    config = make_config(pair.with_name(form))
    record = prepare(config).record
    again = prepare(config, known=record)
    assert again.record == record and again.report.notes == []


def test_a_changed_file_is_refused_on_resume(pair: Path, make_config: MakeConfig) -> None:
    config = make_config(pair)
    record = prepare(config).record
    content = bytearray(pair.read_bytes())
    content[0] += 1
    pair.write_bytes(content)
    with pytest.raises(UserError, match=r"\.bin: other content"):
        prepare(config, known=record)


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (
            lambda tokens, index: tokens.write_bytes(tokens.read_bytes()[:-2]),
            ("corpus.idx", "corpus.bin", "does not fit"),
        ),
        (lambda tokens, index: index.write_bytes(index.read_bytes()[:-8]), ("corpus.idx",)),
        (
            lambda tokens, index: index.write_bytes(index.read_bytes()[:20]),
            ("corpus.idx", "20 bytes"),
        ),
        (lambda tokens, index: index.write_bytes(b"hello"), ("corpus.idx", "MMIDIDX")),
        (lambda tokens, index: index.unlink(), ("corpus.idx", "no such file")),
        (
            lambda tokens, index: patch(index, 17, struct.pack("<B", 6)),
            ("corpus.idx", "dtype code 6"),
        ),
        (lambda tokens, index: patch(index, 34, struct.pack("<i", -5)), ("corpus.idx", "negative")),
        (
            lambda tokens, index: patch(index, 34, struct.pack("<i", 6)),
            ("corpus.idx", "do not follow"),
        ),
        (
            lambda tokens, index: patch(tokens, 4, struct.pack("<H", 500)),
            ("corpus.bin", "token 500", "320"),
        ),
    ],
)
def test_files_that_cannot_be_right_are_refused_by_name(
    damage: Callable[[Path, Path], object],
    named: tuple[str, ...],
    pair: Path,
    make_config: MakeConfig,
) -> None:
    damage(pair, pair.with_suffix(".idx"))
    with pytest.raises(UserError) as caught:
        prepare(make_config(pair))
    message = str(caught.value)
    assert message.count("\n") <= 1
    assert all(word in message for word in named)


def patch(path: Path, at: int, data: bytes) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:at] + data + content[at + len(data) :])


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"held_out": {"fraction": 0.1}}, "data.held_out.fraction"),
        ({"format": "prompt-completion"}, "data.format"),
        ({"packing": False}, "data.packing"),
        ({"too_long": "drop"}, "data.too_long"),
        ({"tokenizer": {"train": "bpe", "vocab_size": 300}}, "data.tokenizer"),
    ],
)
def test_settings_that_megatron_data_do_not_follow_are_refused(
    settings: dict[str, Any], key: str, pair: Path, make_config: MakeConfig
) -> None:
    with pytest.raises(UserError) as caught:
        prepare(make_config(pair, **settings))
    assert str(caught.value).startswith(key)


def test_rows_of_megatron_data_cannot_be_counted(pair: Path, make_config: MakeConfig) -> None:
    with pytest.raises(UserError, match="max_samples"):
        prepare(make_config([{"path": str(pair), "max_samples": 3}]))


def test_settings_of_megatron_need_megatron_data(
    write_rows: WriteRows, pair: Path, make_config: MakeConfig
) -> None:
    rows = write_rows([{"text": "some text to train on"}])
    with pytest.raises(UserError, match=r"^data\.megatron:"):
        prepare(make_config(rows, megatron={"isolation": "none"}))
    with pytest.raises(UserError, match=r"^data\.megatron\.samples:"):
        prepare(make_config([pair, rows], megatron={"samples": 10}))


def test_megatrons_order_must_last_for_all_steps(pair: Path, make_config: MakeConfig) -> None:
    config = make_config(pair, megatron={"samples": 10})
    enough, short, epochs = ({"steps": 5}, {"steps": 6}, {"steps": None, "epochs": 1.0})
    problems = []
    for length in (enough, short, epochs):
        training = config.training.model_copy(update={**length, "micro_batch_size": 2})
        found = check_run(config.model_copy(update={"training": training}), num_ranks=1)
        problems.append([problem.path for problem in found])
    assert problems == [[], [("data", "megatron", "samples")], [("data", "megatron", "samples")]]


def test_build_writes_documents_that_a_run_then_reads(
    write_rows: WriteRows, make_config: MakeConfig, tmp_path: Path
) -> None:
    rows = write_rows(
        [{"text": f"text number {number} " * (1 + number % 40)} for number in range(200)],
        "texts.jsonl",
    )
    config = make_config(rows)
    (tmp_path / "run.yaml").write_text(config.model_dump_json())
    command = [
        "data",
        "build",
        str(tmp_path / "run.yaml"),
        "--to",
        "megatron",
        "--output",
        str(tmp_path / "out"),
    ]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["texts.bin", "texts.idx"]
    file = open_indexed(tmp_path / "out" / "texts.bin", tmp_path / "out" / "texts.idx")
    assert len(file.lengths) == 200
    packed = prepare(config).train.sources[0]
    mapped = prepare(make_config(tmp_path / "out" / "texts.bin")).train.sources[0]
    # The packed cache cuts long documents with one token of overlap, which learns the same pairs.
    assert learnt(packed.read(range(len(packed)))) == learnt(mapped.read(range(len(mapped))))
    again = CliRunner().invoke(app, command)
    assert isinstance(again.exception, UserError) and "texts.bin" in str(again.exception)


def test_build_writes_the_tokenizer_that_it_trains_and_never_replaces_one(
    write_rows: WriteRows, make_config: MakeConfig, tmp_path: Path
) -> None:
    rows = write_rows(
        [{"text": f"text number {number} " * 5} for number in range(50)], "texts.jsonl"
    )
    config = make_config(rows, tokenizer={"train": "bpe", "vocab_size": 270})
    (tmp_path / "run.yaml").write_text(config.model_dump_json())
    out = tmp_path / "out"
    command = [
        "data",
        "build",
        str(tmp_path / "run.yaml"),
        "--to",
        "megatron",
        "--output",
        str(out),
    ]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0 and "out/tokenizer" in result.output.replace("\n", ""), (
        result.output
    )
    # A class that transformers 4 has too.
    written = json.loads((out / "tokenizer/tokenizer_config.json").read_text())
    assert written["tokenizer_class"] == "PreTrainedTokenizerFast"
    packed = prepare(config).train.sources[0]
    mapped = prepare(
        make_config(out / "texts.bin", tokenizer=str(out / "tokenizer"))
    ).train.sources[0]
    assert learnt(packed.read(range(len(packed)))) == learnt(mapped.read(range(len(mapped))))
    for path in out.glob("texts.*"):
        path.unlink()
    before = (out / "tokenizer/tokenizer.json").read_bytes()
    again = CliRunner().invoke(app, command)
    assert isinstance(again.exception, UserError) and "out/tokenizer: exists" in str(
        again.exception
    )
    assert (out / "tokenizer/tokenizer.json").read_bytes() == before and not list(
        out.glob("texts.*")
    )


def test_build_writes_the_held_out_documents_apart(
    write_rows: WriteRows, make_config: MakeConfig, tmp_path: Path
) -> None:
    rows = write_rows([{"text": f"text number {number}"} for number in range(300)], "texts.jsonl")
    (tmp_path / "run.yaml").write_text(
        make_config(rows, held_out={"fraction": 0.2}).model_dump_json()
    )
    command = [
        "data",
        "build",
        str(tmp_path / "run.yaml"),
        "--to",
        "megatron",
        "--output",
        str(tmp_path / "out"),
    ]
    assert CliRunner().invoke(app, command).exit_code == 0
    names = ("texts", "texts.held_out")
    counts = [
        len(open_indexed(*(tmp_path / "out" / f"{n}{s}" for s in (".bin", ".idx"))).lengths)
        for n in names
    ]
    assert sum(counts) == 300 and 30 < counts[1] < 90


def test_a_build_that_fails_leaves_nothing(
    write_rows: WriteRows, make_config: MakeConfig, tmp_path: Path
) -> None:
    rows = write_rows([{"text": "good"}, {"wrong": "column"}], "texts.jsonl")
    config = make_config(rows, on_error="refuse")
    (tmp_path / "run.yaml").write_text(config.model_dump_json())
    command = [
        "data",
        "build",
        str(tmp_path / "run.yaml"),
        "--to",
        "megatron",
        "--output",
        str(tmp_path / "out"),
    ]
    assert isinstance(CliRunner().invoke(app, command).exception, UserError)
    assert list((tmp_path / "out").iterdir()) == []


def test_a_build_leaves_out_rows_at_fault_and_names_the_first(
    write_rows: WriteRows, make_config: MakeConfig, tmp_path: Path
) -> None:
    rows = write_rows([{"text": "good"}, {"wrong": "column"}, {"text": 3}], "texts.jsonl")
    lines = write_megatron(make_config(rows), tmp_path / "out")
    assert any("2 of 3 rows" in line and "line 2" in line for line in lines)
    assert (
        len(open_indexed(*(tmp_path / "out" / f"texts{s}" for s in (".bin", ".idx"))).lengths) == 1
    )
    rows = write_rows([{"wrong": "column"}], "none.jsonl")
    with pytest.raises(UserError, match="line 1: no column 'text'"):
        write_megatron(make_config(rows), tmp_path / "none")


@pytest.mark.parametrize("split", ["0", "0,0", ".", "1.2.3", "1,2,3,4", ",1"])
def test_shares_that_split_nothing_are_refused(
    split: str, make_config: MakeConfig, pair: Path
) -> None:
    with pytest.raises((ValueError, UserError), match="split"):
        make_config(pair, megatron={"split": split})


def test_two_builds_do_not_write_into_one_directory(
    make_config: MakeConfig, write_rows: WriteRows, tmp_path: Path
) -> None:
    config = make_config(write_rows([{"text": "some words"}], "rows.jsonl"))
    output = tmp_path / "out"
    output.mkdir()
    with locked(output), pytest.raises(UserError, match="another export is writing it"):
        write_megatron(config, output)
    assert not list(output.iterdir())
    write_megatron(config, output)
    assert sorted(path.name for path in output.iterdir()) == ["rows.bin", "rows.idx"]


def test_a_source_named_like_a_path_writes_nothing(
    make_config: MakeConfig, write_rows: WriteRows, tmp_path: Path
) -> None:
    path = write_rows([{"text": "some words"}], "rows.jsonl")
    with pytest.raises(UserError, match="cannot be that of a file"):
        write_megatron(make_config({"path": str(path), "name": "../out"}), tmp_path / "new")
    assert not list(tmp_path.glob("**/*.bin"))
