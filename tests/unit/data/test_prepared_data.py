"""From rows to batches: every token that should be learnt is learnt once, and nothing crosses a
document."""

from __future__ import annotations

import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.facts import says
from tokenizers import Tokenizer

from drillyard.config.run import RunConfig
from drillyard.data.held_out_parts import evaluation_rows, held_out_names, split_of, training_texts
from drillyard.data.mapped_sequences import IGNORED, Batch, Sequences
from drillyard.data.prepared_data import prepare
from drillyard.data.row_formats import render_prompt, row_format
from drillyard.data.sampler import BatchShape
from drillyard.data.sources import resolve_sources
from drillyard.data.tokenizer import prompt_tokens
from drillyard.errors import UserError

MakeConfig = Callable[..., RunConfig]
WriteRows = Callable[..., Path]


def whole(sequences: Sequences) -> Batch:
    return sequences.read(range(len(sequences)))


def learnt(batch: Batch) -> Counter[tuple[int, int]]:
    """Pairs (token, next token that is learnt from it)."""
    mask = batch.labels != IGNORED
    return Counter(zip(batch.input_ids[mask].tolist(), batch.labels[mask].tolist(), strict=True))


def check_layout(batch: Batch) -> None:
    """What holds for every batch, whatever the data."""
    ids, inside = batch.document_ids, batch.document_ids >= 0
    assert np.all(np.diff(inside.astype(int), axis=1) <= 0), "padding stands at the end only"
    step = np.diff(ids, axis=1)
    assert np.all((step == 0) | (step == 1) | (ids[:, 1:] == -1))
    same = (ids[:, 1:] == ids[:, :-1]) & inside[:, 1:]
    assert np.all(batch.position_ids[:, 0] == 0)
    assert np.array_equal(batch.position_ids[:, 1:][same], batch.position_ids[:, :-1][same] + 1)
    assert np.all(batch.position_ids[:, 1:][step != 0] == 0)
    assert np.all(batch.labels[:, -1] == IGNORED)
    predicted = batch.labels[:, :-1] != IGNORED
    assert np.all(same[predicted]), "no label stands in another document, nor in padding"
    assert np.array_equal(batch.labels[:, :-1][predicted], batch.input_ids[:, 1:][predicted])


@settings(
    max_examples=25,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    texts=st.lists(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=200), min_size=1, max_size=25
    ),
    packing=st.booleans(),
    length=st.sampled_from([8, 24, 64, 100]),
)
def test_every_token_of_every_document_is_learnt_once_per_epoch(
    texts: list[str], packing: bool, length: int, make_config: MakeConfig, tokenizer_directory: Path
) -> None:
    texts = [*texts, "x"]
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "data.jsonl"
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        config = make_config(
            path, sequence_length=length, packing=packing, cache_directory=directory + "/cache"
        )
        data = prepare(config)
        batch = data.train.read(
            [
                ref
                for step in range(data.train.num_sequences)
                for ref in data.train.indices(step, BatchShape(1))
            ]
        )
    tokenizer = Tokenizer.from_file(str(tokenizer_directory / "tokenizer.json"))
    tokenizer.encode_special_tokens = True
    end = tokenizer.token_to_id("<|endoftext|>")
    documents = [
        [end, *tokenizer.encode(text, add_special_tokens=False).ids, end] for text in texts if text
    ]
    expected = Counter(pair for tokens in documents for pair in pairwise(tokens))
    assert learnt(batch) == expected
    check_layout(batch)
    (sequences,) = data.train.sources
    assert sequences.document_bytes == sum(len(text.encode()) for text in texts)
    assert sequences.num_valid_tokens == expected.total()
    assert np.array_equal(sequences.valid_tokens, (whole(sequences).labels != IGNORED).sum(axis=1))


@pytest.mark.parametrize("too_long", ["truncate", "split", "drop"])
def test_documents_that_are_too_long_are_cut_or_dropped_and_counted(
    too_long: str, make_config: MakeConfig, write_rows: WriteRows
) -> None:
    path = write_rows([{"text": "ab" * 300}, {"text": "short"}])
    data = prepare(make_config(path, sequence_length=32, too_long=too_long))
    (sequences,) = data.train.sources
    check_layout(whole(sequences))
    name = {"truncate": "truncated", "split": "split", "drop": "dropped"}[too_long]
    assert data.report.parts["data"][name] == 1
    assert any(f"1 {name}" in line for line in data.report.lines())
    assert sequences.document_bytes == {"truncate": None, "split": 605, "drop": 5}[too_long]
    if too_long == "truncate":
        assert (
            sequences.num_tokens
            == 32 + len(data.tokenizer("short", add_special_tokens=False).input_ids) + 2
        )


def test_a_document_that_is_too_long_can_be_an_error(
    make_config: MakeConfig, write_rows: WriteRows
) -> None:
    path = write_rows([{"text": "short"}, {"text": "ab" * 300}])
    with pytest.raises(
        UserError, match=r"data\.jsonl, line 2: \d+ tokens.*data.sequence_length \(32\)"
    ):
        prepare(make_config(path, sequence_length=32, too_long="error"))


def test_loss_is_on_completions_only_and_ends_with_the_end_token(
    make_config: MakeConfig, write_rows: WriteRows
) -> None:
    rows = [{"prompt": f"question {n}?", "completion": f" answer {n}"} for n in range(9)]
    data = prepare(make_config(write_rows(rows), format="prompt-completion"))
    batch = whole(data.train.sources[0])
    check_layout(batch)
    end = data.tokenizer.eos_token_id
    text = data.tokenizer.decode(batch.labels[batch.labels != IGNORED])
    assert sorted(text.split("<|endoftext|>")[:-1]) == sorted(row["completion"] for row in rows)
    assert (batch.labels == end).sum() == len(rows)


def test_loss_can_be_on_prompts_too(make_config: MakeConfig, write_rows: WriteRows) -> None:
    path = write_rows([{"prompt": "question?", "completion": " answer"}])
    batch = whole(
        prepare(make_config(path, format="prompt-completion", loss_on="all")).train.sources[0]
    )
    assert (batch.labels != IGNORED).sum() == (batch.document_ids >= 0).sum() - 1


def test_a_prompt_has_the_same_tokens_in_training_and_in_generation(
    make_config: MakeConfig, write_rows: WriteRows
) -> None:
    row = {
        "schema": "CREATE TABLE t (a INTEGER)",
        "question": "What  is\nthe largest a?",
        "sql": "SELECT max(a) FROM t",
    }
    data = prepare(make_config(write_rows([row]), format="text-to-sql", sequence_length=256))
    batch = whole(data.train.sources[0])
    prompt = prompt_tokens(data.tokenizer, render_prompt(row))
    first_learnt = int(np.flatnonzero(batch.labels[0] != IGNORED)[0]) + 1
    assert batch.input_ids[0, :first_learnt].tolist() == prompt
    completion = batch.labels[0][batch.labels[0] != IGNORED]
    assert data.tokenizer.decode(completion) == row["sql"] + "<|endoftext|>"


def test_text_that_looks_like_a_special_token_stays_text(
    make_config: MakeConfig, write_rows: WriteRows
) -> None:
    path = write_rows([{"text": "a <|endoftext|> b"}])
    data = prepare(make_config(path))
    batch = whole(data.train.sources[0])
    assert (
        batch.input_ids[0][batch.document_ids[0] >= 0] == data.tokenizer.eos_token_id
    ).sum() == 2
    assert data.tokenizer.eos_token_id not in prompt_tokens(data.tokenizer, "a <|endoftext|> b")[1:]
    assert says(data.report.lines()[0], "1 special tokens")


def test_a_batch_from_several_sources_keeps_the_order_of_its_samples(
    make_config: MakeConfig, write_rows: WriteRows
) -> None:
    paths = [
        write_rows([{"text": f"{name}{n} " * 20} for n in range(20)], f"{name}.jsonl")
        for name in "ab"
    ]
    data = prepare(make_config(paths))
    refs = data.train.indices(0, BatchShape(12))
    assert {source for source, _ in refs} == {0, 1}
    together = data.train.read(refs)
    for place, (source, row) in enumerate(refs):
        alone = data.train.sources[source].read([row])
        for name in ("input_ids", "labels", "position_ids", "document_ids"):
            assert np.array_equal(getattr(together, name)[place], getattr(alone, name)[0])
    assert data.train.valid_tokens(refs) == (together.labels != IGNORED).sum()


@pytest.mark.parametrize(("num_data_ranks", "last_step", "left"), [(1, 4, 4), (2, 2, 4), (3, 1, 8)])
def test_data_ranks_share_out_a_step_in_padded_micro_batches(
    num_data_ranks: int, last_step: int, left: int, make_config: MakeConfig, write_rows: WriteRows
) -> None:
    path = write_rows([{"text": f"document {n}"} for n in range(20)])
    train = prepare(make_config(path, packing=False)).train
    shape = BatchShape(2, 2, num_data_ranks, by_epoch=True)
    refs, _ = train.read_step(last_step, shape, 0)
    assert len(refs) == left
    shares = [list(train.read_step(last_step, shape, rank)[1]) for rank in range(num_data_ranks)]
    batches = [batch for micro_batches in zip(*shares, strict=True) for batch in micro_batches]
    assert {len(batch.labels) for batch in batches} == {2}
    dealt = np.concatenate([batch.labels for batch in batches])
    assert np.array_equal(dealt[:left], train.read(refs).labels)
    assert (dealt[left:] == IGNORED).all()


def test_equal_documents_land_in_the_same_part(
    make_config: MakeConfig, write_rows: WriteRows
) -> None:
    texts = [f"document {n % 100}" for n in range(400)]
    config = make_config(
        write_rows([{"text": text} for text in texts]), held_out={"fraction": 0.3}, packing=False
    )
    data = prepare(config)
    parts = [
        {tuple(row) for row in whole(sequences).input_ids.tolist()}
        for sequences in (data.train.sources[0], data.held_out["data/held_out"])
    ]
    assert parts[0].isdisjoint(parts[1])
    assert len(parts[0]) + len(parts[1]) == 100
    assert 10 <= len(parts[1]) <= 55
    assert len(data.train.sources[0]) + len(data.held_out["data/held_out"]) == 400


def test_a_column_s_values_are_held_out_as_a_whole(
    make_config: MakeConfig, write_rows: WriteRows
) -> None:
    rows = [
        {
            "db_id": f"db{n % 20}",
            "schema": f"CREATE TABLE t{n % 20} (a)",
            "question": f"q{n}",
            "sql": "SELECT a",
        }
        for n in range(300)
    ]
    held_out = {"fraction": 0.3, "split_by": "db_id"}
    config = make_config(write_rows(rows), format="text-to-sql", held_out=held_out)
    kept_out = evaluation_rows(config, "data/held_out", 1000)
    databases = {row["db_id"] for row in kept_out}
    assert 0 < len(databases) < 20
    assert len(kept_out) == sum(row["db_id"] in databases for row in rows)
    data = prepare(config)
    assert data.report.parts["data/held_out"]["documents"] == len(kept_out)
    assert data.report.parts["data"]["documents"] == 300 - len(kept_out)


def test_evaluation_rows_are_a_fixed_choice_and_smaller_limits_are_prefixes(
    make_config: MakeConfig, write_rows: WriteRows
) -> None:
    rows = [{"prompt": f"p{n}", "completion": "c", "extra": n} for n in range(50)]
    held_out = str(write_rows(rows, "held.jsonl"))
    config = make_config(
        write_rows([{"prompt": "x", "completion": "y"}]),
        format="prompt-completion",
        held_out={"source": held_out},
    )
    assert held_out_names(config) == ["held"]
    ten = evaluation_rows(config, "held", 10)
    assert ten == evaluation_rows(config, "held", 30)[:10]
    assert ten != sorted(ten, key=lambda row: row["extra"])
    write_rows(rows[::-1], "held.jsonl")
    assert evaluation_rows(config, "held", 10) == ten
    with pytest.raises(UserError, match=r"'data'; .* held"):
        evaluation_rows(config, "data", 10)


def test_held_out_text_never_reaches_a_trained_tokenizer(
    make_config: MakeConfig, write_rows: WriteRows
) -> None:
    texts = {f"document {n}" for n in range(200)}
    config = make_config(
        write_rows([{"text": text} for text in sorted(texts)]), held_out={"fraction": 0.3}
    )
    held_out = {row["text"] for row in evaluation_rows(config, "data/held_out", 1000)}
    used = set(
        training_texts(
            resolve_sources(config.data.source),
            row_format(config.data),
            split_of(config.data),
            "refuse",
        )
    )
    assert held_out
    assert used == texts - held_out


def test_built_in_sets_bring_their_held_out_parts(make_config: MakeConfig) -> None:
    source = {"path": "builtin:text-to-sql", "options": {"examples": 60, "held_out_examples": 8}}
    config = make_config([source], format="text-to-sql", sequence_length=256)
    data = prepare(config)
    assert list(data.held_out) == held_out_names(config)
    assert all(name.startswith("text-to-sql/") for name in data.held_out)
    assert len(data.held_out) >= 2
    rows = evaluation_rows(config, next(iter(data.held_out)), 5)
    assert len(rows) == 5
    assert all({"schema", "question", "sql"} <= set(row) for row in rows)


def test_a_second_opening_builds_nothing_and_gives_the_same_bits(
    make_config: MakeConfig, write_rows: WriteRows, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(write_rows([{"text": "some text " * n} for n in range(1, 30)]))
    first = prepare(config)

    def refuse(*_arguments: Any, **_settings: Any) -> None:
        raise AssertionError("built again")

    monkeypatch.setattr(sys.modules["drillyard.data.prepared_data"], "build_cache", refuse)
    for second in (prepare(config), prepare(config, only_open=True)):
        assert second.train.fingerprint == first.train.fingerprint
        assert np.array_equal(
            whole(second.train.sources[0]).input_ids, whole(first.train.sources[0]).input_ids
        )


@pytest.mark.parametrize(
    "change",
    [
        {"sequence_length": 48},
        {"packing": False},
        {"too_long": "drop"},
        {"columns": {"text": "other"}},
        {"held_out": {"fraction": 0.5}},
    ],
    ids=str,
)
def test_every_setting_that_changes_tokens_changes_the_key(
    change: dict[str, Any], make_config: MakeConfig, write_rows: WriteRows
) -> None:
    path = write_rows([{"text": f"some text {n}", "other": f"other {n}"} for n in range(40)])
    before, after = prepare(make_config(path)), prepare(make_config(path, **change))
    assert before.train.sources[0].key != after.train.sources[0].key


def test_a_changed_file_is_tokenised_again(make_config: MakeConfig, write_rows: WriteRows) -> None:
    config = make_config(write_rows([{"text": "aaaa"}]))
    before = prepare(config)
    write_rows([{"text": "bbbb"}])
    assert prepare(config).train.fingerprint != before.train.fingerprint


def test_a_vocabulary_that_does_not_fit_is_reported_before_anything_is_tokenised(
    make_config: MakeConfig, write_rows: WriteRows, tmp_path: Path
) -> None:
    config = make_config(write_rows([{"text": "a text"}]))
    inline = {"architecture": "llama", "vocab_size": 100}
    config = config.model_copy(update={"model": config.model.model_copy(update={"config": inline})})
    with pytest.raises(UserError, match=r"320.*100"):
        prepare(config)
    assert list((tmp_path / "cache" / "tokenized").iterdir()) == []
