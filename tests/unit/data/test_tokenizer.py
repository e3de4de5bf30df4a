"""Tokenizers: trained ones are exact, deterministic and load anywhere; missing ones are
reported."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from drillyard.config.run import RunConfig
from drillyard.data.mapped_sequences import IGNORED
from drillyard.data.prepared_data import prepare
from drillyard.data.tokenizer import _as_pretrained, _train, open_tokenizer, prompt_tokens
from drillyard.errors import UserError

MakeConfig = Callable[..., RunConfig]
WriteRows = Callable[..., Path]

TEXTS = [f"SELECT a{n} FROM t{n % 5}  WHERE b > {n};\n\n    indented , spaced ." for n in range(50)]


@cache
def trained() -> PreTrainedTokenizerFast:
    return _as_pretrained(_train(300, iter(TEXTS)))


@settings(max_examples=100)
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_decoding_gives_back_every_text(text: str) -> None:
    assert trained().decode(trained().encode(text, add_special_tokens=False)) == text


def test_training_is_deterministic() -> None:
    assert _train(330, iter(TEXTS)).to_str() == _train(330, iter(TEXTS)).to_str()


@pytest.mark.parametrize("model_type", [None, "llama", "qwen3", "gpt2", "olmo2", "mixtral"])
def test_a_saved_tokenizer_loads_in_plain_transformers_to_the_same_ids(
    model_type: str | None, make_config: MakeConfig, write_rows: WriteRows, tmp_path: Path
) -> None:
    path = write_rows([{"text": text} for text in TEXTS])
    tokenizer = prepare(make_config(path, tokenizer={"train": "bpe", "vocab_size": 310})).tokenizer
    tokenizer.save_pretrained(str(tmp_path / "final"))
    if model_type is not None:
        (tmp_path / "final" / "config.json").write_text(json.dumps({"model_type": model_type}))
    loaded = AutoTokenizer.from_pretrained(tmp_path / "final")
    for text in ("  leading", "don 't , stop .", "<|endoftext|>x", "naïve ✓\n\n  y"):
        ids = loaded(text).input_ids
        assert ids == tokenizer(text).input_ids
        assert ids[0] == loaded.bos_token_id, "plain transformers starts a prompt as training does"
        assert loaded.decode(ids[1:]) == text
    assert len(loaded) == 310
    assert (loaded.eos_token, loaded.bos_token, loaded.pad_token) == (
        "<|endoftext|>",
        "<|endoftext|>",
        "<|pad|>",
    )


def test_a_trained_tokenizer_is_kept_and_belongs_to_its_documents(
    make_config: MakeConfig, write_rows: WriteRows, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = {"train": "bpe", "vocab_size": 310}
    config = make_config(write_rows([{"text": text} for text in TEXTS]), tokenizer=wanted)
    first = prepare(config).tokenizer.get_vocab()
    other = make_config(
        write_rows([{"text": "different words"}] * 20, "other.jsonl"), tokenizer=wanted
    )
    assert prepare(other).tokenizer.get_vocab() != first
    monkeypatch.setattr("drillyard.data.tokenizer._train", None)
    assert prepare(config).tokenizer.get_vocab() == first


def test_a_damaged_trained_tokenizer_is_trained_again(
    make_config: MakeConfig, write_rows: WriteRows
) -> None:
    config = make_config(
        write_rows([{"text": text} for text in TEXTS]),
        tokenizer={"train": "bpe", "vocab_size": 310},
    )
    key = prepare(config).text_tokenizer.key
    assert config.data.cache_directory is not None
    (directory,) = (Path(config.data.cache_directory) / "tokenizers").iterdir()
    good = {path.name: path.read_bytes() for path in directory.iterdir()}
    for name, content in good.items():
        for damaged in (content[: len(content) // 2], content.replace(b"5", b"6", 1), b"", None):
            if damaged == content:
                continue
            (directory / name).unlink() if damaged is None else (directory / name).write_bytes(
                damaged
            )
            assert prepare(config).text_tokenizer.key == key
            assert {path.name: path.read_bytes() for path in directory.iterdir()} == good


def test_a_saved_tokenizer_goes_before_the_config_s(
    make_config: MakeConfig, write_rows: WriteRows, tokenizer_directory: Path
) -> None:
    config = make_config(write_rows([{"text": "a"}]), tokenizer={"train": "bpe", "vocab_size": 300})
    assert len(prepare(config, tokenizer_directory).tokenizer) == 320


def test_a_source_may_be_bound_to_the_thread_that_opened_it() -> None:
    opened_in = threading.get_ident()

    def documents() -> Iterator[str]:
        for text in TEXTS:
            assert threading.get_ident() == opened_in
            yield text

    _train(300, documents())


def test_an_error_in_the_source_ends_the_training_of_a_tokenizer(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": ')
    with pytest.raises(UserError, match="line 2, column 10"):
        prepare(
            make_config(
                tmp_path / "a.jsonl",
                tokenizer={"train": "bpe", "vocab_size": 300},
                on_error="refuse",
            )
        )


def test_a_tokenizer_that_cannot_be_had_is_reported(
    make_config: MakeConfig, write_rows: WriteRows, tmp_path: Path
) -> None:
    path = write_rows([{"text": "a"}])
    with pytest.raises(UserError, match=r"no tokenizer.*Set data.tokenizer"):
        prepare(make_config(path, tokenizer=str(tmp_path)))
    with pytest.raises(UserError, match=r"data\.tokenizer is missing"):
        prepare(make_config(path, tokenizer=None))


BOS_LAYOUTS = {
    "as transformers puts it": "<|endoftext|> $A",
    "two tokens": "<|endoftext|> <|pad|> $A",
    "end too": "<|endoftext|> $A <|pad|>",
    "GPT-2, which names a BOS and never puts it": None,
}


@pytest.mark.parametrize("layout", BOS_LAYOUTS)
@pytest.mark.parametrize("form", ["text", "prompt-completion"])
def test_documents_begin_as_plain_transformers_begins_a_prompt(
    layout: str, form: str, make_config: MakeConfig, write_rows: WriteRows, tmp_path: Path
) -> None:
    tokenizer = _as_pretrained(_train(300, iter(TEXTS)))
    template = BOS_LAYOUTS[layout]
    ids = [(name, tokenizer.convert_tokens_to_ids(name)) for name in ("<|endoftext|>", "<|pad|>")]
    tokenizer.backend_tokenizer.post_processor = (
        processors.ByteLevel(trim_offsets=False)
        if template is None
        else processors.TemplateProcessing(single=template, special_tokens=ids)
    )
    tokenizer.save_pretrained(tmp_path / "made")
    plain = AutoTokenizer.from_pretrained(tmp_path / "made")
    assert plain.bos_token == "<|endoftext|>"
    rows = [{"text": "naïve SELECT", "prompt": "naïve SELECT", "completion": " a"}]
    data = prepare(make_config(write_rows(rows), format=form, tokenizer=str(tmp_path / "made")))
    batch = data.train.read([(0, 0)])
    used = batch.input_ids[0][batch.document_ids[0] >= 0].tolist()
    expected = plain("naïve SELECT").input_ids
    expected = expected[:-1] if layout == "end too" else expected
    if form == "prompt-completion":
        assert prompt_tokens(data.tokenizer, "naïve SELECT") == expected
        expected = [*expected, *plain(" a", add_special_tokens=False).input_ids]
    assert used == [*expected, plain.eos_token_id]
    if form == "text":
        learnt = batch.labels[0][batch.labels[0] != IGNORED]
        assert learnt.tolist() == used[2 if layout == "two tokens" else 1 :]
        text = plain.decode(learnt, skip_special_tokens=True)
        assert data.train.sources[0].document_bytes == len(text.encode())


def test_a_saved_tokenizer_s_truncation_is_switched_off(
    tokenizer_directory: Path, tmp_path: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_directory)
    tokenizer.backend_tokenizer.enable_truncation(4)
    tokenizer.backend_tokenizer.enable_padding(length=9)
    tokenizer.save_pretrained(tmp_path / "cut")
    settled = json.loads(open_tokenizer(str(tmp_path / "cut")).json)
    assert settled["truncation"] is None
    assert settled["padding"] is None


def test_the_start_is_found_with_a_vocabulary_of_few_letters(tmp_path: Path) -> None:
    backend = Tokenizer(models.BPE(vocab={"<s>": 0, "A": 1, "C": 2, "G": 3, "T": 4}, merges=[]))
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>")
    tokenizer.save_pretrained(tmp_path)
    assert open_tokenizer(str(tmp_path)).start_ids == (0,)
    assert prompt_tokens(tokenizer, "GAT") == tokenizer("GAT").input_ids == [0, 3, 1, 4]


def test_an_address_is_refused_as_one() -> None:
    with pytest.raises(
        UserError, match=r"^data\.tokenizer: gs://b/x: .*not a path on this machine"
    ):
        open_tokenizer("gs://b/x")
