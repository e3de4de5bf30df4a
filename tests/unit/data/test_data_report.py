"""What a reader must know about the data is said with a count and a place, on every start."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import Result
from tests.facts import says
from tests.unit.data.chat_templates import QWEN3
from typer.testing import CliRunner

from drillyard.cli.main import app
from drillyard.config.run import RunConfig
from drillyard.data.data_report import coloured_tokens, loss_problems, spans_of
from drillyard.data.held_out_parts import evaluation_rows, held_out_names
from drillyard.data.prepared_data import prepare
from drillyard.errors import UserError

MakeConfig = Callable[..., RunConfig]
WriteRows = Callable[..., Path]

CHATML = "{% for m in messages %}<{{ m.role }}>{{ m.content }};{% endfor %}"


@pytest.fixture
def chat(chat_tokenizer: Callable[[str], Path]) -> dict[str, Any]:
    return {"format": "chat", "tokenizer": str(chat_tokenizer(CHATML))}


def previewed(config: RunConfig, tmp_path: Path) -> list[str]:
    """The lines of `drillyard data preview` that hold neither samples nor counts of a part."""
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    result = CliRunner().invoke(
        app, ["data", "preview", str(tmp_path / "run.yaml"), "--samples", "1"]
    )
    assert result.exit_code == 0, result.output
    after = result.output.splitlines()
    end = max(number for number, line in enumerate(after) if line.endswith("% filled"))
    return after[end + 1 :]


def talk(*roles: str, n: int = 0) -> list[dict[str, str]]:
    return [{"role": role, "content": f"words {n}"} for role in roles]


def test_rows_without_an_assistant_turn_are_counted_with_the_first_line(
    make_config: MakeConfig, write_rows: WriteRows, chat: dict[str, Any]
) -> None:
    rows = [
        {"messages": talk("user", *(["assistant"] if n % 6 else ["system"]), n=n)}
        for n in range(60)
    ]
    path = write_rows([{"messages": talk("user", "assistant", n=-1)}, *rows])
    for _ in range(2):  # built, and from the cache
        (note,) = prepare(make_config(path, **chat)).report.notes
        assert says(note, "data: 10 of 61 rows ... assistant")
        assert says(note, f"{path}, line 2")


def test_data_without_any_assistant_turn_are_refused_with_the_role_to_use(
    make_config: MakeConfig, write_rows: WriteRows, chat: dict[str, Any]
) -> None:
    path = write_rows([{"messages": talk("user", "system")}])
    with pytest.raises(UserError, match=r"assistant.*data\.loss_on: all"):
        prepare(make_config(path, **chat))
    assert prepare(make_config(path, **chat, loss_on="all")).train.num_sequences == 1


def test_tools_that_the_template_ignores_are_counted(
    make_config: MakeConfig, write_rows: WriteRows, chat: dict[str, Any]
) -> None:
    rows = [
        {"messages": talk("user", "assistant"), "tools": [{"name": "f"}] if n else []}
        for n in range(3)
    ]
    path = write_rows(rows, "x/rows.jsonl")
    (note,) = prepare(make_config(path.parent, **chat)).report.notes
    assert says(note, "x: 2 of 3 rows ... tools")
    assert says(note, f"{path}, line 2")


def test_rows_left_out_cut_off_or_without_loss_are_counted_with_the_first_line(
    make_config: MakeConfig, write_rows: WriteRows
) -> None:
    long, short = {"prompt": "p" * 500, "completion": "c"}, {"prompt": "p", "completion": "c"}
    path = write_rows([short, long, long])
    notes = prepare(make_config(path, format="prompt-completion")).report.notes
    assert [note.split(" are longer")[0] for note in notes] == ["data: 2 of 3 rows"]
    assert f"{path}, line 2" in notes[0]
    notes = prepare(make_config(path, format="prompt-completion", too_long="truncate")).report.notes
    assert len(notes) == 2, "cut off, and thereby without their completion"
    assert all("2 of 3 rows" in note and f"{path}, line 2" in note for note in notes)


@pytest.mark.parametrize("separate", [True, False])
def test_held_out_rows_that_are_trained_on_are_counted(
    separate: bool, make_config: MakeConfig, write_rows: WriteRows, tmp_path: Path
) -> None:
    path = write_rows([{"text": f"text {n}"} for n in range(20)])
    held = (
        write_rows([{"text": f"text {n}"} for n in range(17, 30)], "held.jsonl")
        if separate
        else path
    )
    config = make_config(path, held_out={"source": str(held)})
    for _ in range(2):  # built, and from the cache
        (note,) = previewed(config, tmp_path)
        assert ("3 of 13" if separate else "20 of 20") in note
        assert says(note, f"{held}, line 1 ... {path}, line {18 if separate else 1}")


def test_rows_shared_across_a_split_by_column_are_counted_and_a_split_by_hash_has_none(
    make_config: MakeConfig, write_rows: WriteRows, tmp_path: Path
) -> None:
    path = write_rows([{"text": f"text {n % 10}", "db": str(n % 30)} for n in range(60)])
    split = {"fraction": 0.5, "split_by": "db"}
    (note,) = previewed(make_config(path, held_out=split), tmp_path)
    assert says(note, "held-out ... 'data'")
    assert previewed(make_config(path, held_out={"fraction": 0.5}), tmp_path) == []


@pytest.mark.parametrize(
    ("settings", "count"),
    [
        ({"micro_batch_size": 2}, None),
        ({"micro_batch_size": 3}, 3),
        ({"gradient_accumulation": 4}, 4),
        ({"global_batch_size": 5}, 5),
    ],
)
def test_fewer_sequences_than_a_batch_are_said(
    settings: dict[str, int],
    count: int | None,
    make_config: MakeConfig,
    write_rows: WriteRows,
    tmp_path: Path,
) -> None:
    config = make_config(write_rows([{"text": "a"}, {"text": "b"}]), packing=False)
    config = config.model_copy(update={"training": config.training.model_copy(update=settings)})
    notes = previewed(config, tmp_path)
    assert len(notes) == (count is not None)
    assert all(says(note, f"2 sequences (2 documents) ... {count}") for note in notes)


def test_what_is_held_out_of_a_source_has_a_name_of_its_own(
    make_config: MakeConfig, write_rows: WriteRows
) -> None:
    path = write_rows([{"text": f"text {n}"} for n in range(30)], "train.jsonl")
    config = make_config(path, held_out={"fraction": 0.5})
    data = prepare(config)
    assert list(data.held_out) == held_out_names(config) == ["train/held_out"]
    assert list(data.report.parts) == ["train", "train/held_out"]
    # Configs of earlier versions name the part as its source.
    assert evaluation_rows(config, "train", 3) == evaluation_rows(config, "train/held_out", 3)
    other = write_rows([{"text": "other"}], "other/train.jsonl")
    config = make_config(path, held_out={"source": str(other)})
    assert list(prepare(config).held_out) == held_out_names(config) == ["train/held_out"]


def test_a_row_that_became_several_documents_is_counted_once(
    chat_tokenizer: Callable[[str], Path], make_config: MakeConfig, write_rows: WriteRows
) -> None:
    roles = ("user", "assistant", "user", "assistant")
    long = {"messages": [{"role": role, "content": "words " * 60} for role in roles]}
    short = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    settings = {"format": "chat", "tokenizer": str(chat_tokenizer(QWEN3)), "sequence_length": 128}
    data = prepare(make_config(write_rows([short, long]), **settings))
    counts = data.train.sources[0].counts
    assert (counts["rows"], counts["cut_by_turn"], counts["dropped"]) == (2, 1, 1)


@pytest.mark.parametrize("changed", ["key order", "weight", "parts"])
def test_a_conversation_is_the_same_however_it_is_written(
    changed: str, chat: dict[str, Any], make_config: MakeConfig, write_rows: WriteRows
) -> None:
    rows = [{"messages": talk("user", "assistant", n=n)} for n in range(8)]
    same: dict[str, Callable[[dict[str, str]], dict[str, Any]]] = {
        "key order": lambda message: dict(reversed(message.items())),
        "weight": lambda message: {
            **message,
            "weight": 0 if message["content"] == "words 7" else 1,
        },
        "parts": lambda message: {
            **message,
            "content": [{"type": "text", "text": message["content"]}],
        },
    }
    other = write_rows(
        [{"messages": list(map(same[changed], row["messages"]))} for row in rows], "other.jsonl"
    )
    config = make_config(write_rows(rows), held_out={"source": str(other)}, **chat)
    num_shared = (
        7 if changed == "weight" else 8
    )  # nothing is learnt from the row that is all weight 0
    assert (
        f"{num_shared} of {num_shared} held-out rows"
        in prepare(config).before_training(config, 1)[0]
    )


def test_the_preview_separates_learnt_tokens_from_context(
    make_config: MakeConfig, write_rows: WriteRows
) -> None:
    path = write_rows(
        [
            {"prompt": "first prompt", "completion": " one"},
            {"prompt": "second", "completion": " two"},
        ]
    )
    data = prepare(make_config(path, format="prompt-completion"))
    batch = data.train.read([(0, 0)])
    spans = spans_of(batch, 0)
    assert [(document, is_learnt) for document, _, _, is_learnt in spans] == [
        (0, False),
        (0, True),
        (1, False),
        (1, True),
    ]
    text = coloured_tokens(batch, 0, data.tokenizer.backend_tokenizer)
    green = [
        "".join(text.plain[s.start : s.end]) for s in text.spans if str(s.style).startswith("green")
    ]
    assert green == [" one<|endoftext|>", " two<|endoftext|>"]
    assert "padding" in text.plain
    assert loss_problems(batch, 0, completions_only=True) == []


def test_a_document_that_is_learnt_whole_is_a_fault(
    make_config: MakeConfig, write_rows: WriteRows
) -> None:
    data = prepare(
        make_config(write_rows([{"prompt": "", "completion": "c"}]), format="prompt-completion")
    )
    batch = data.train.read([(0, 0)])
    (fault,) = loss_problems(batch, 0, completions_only=True)
    assert says(fault, "all of")
    assert loss_problems(batch, 0, completions_only=False) == []


def test_a_document_of_which_nothing_is_learnt_is_a_fault(
    make_config: MakeConfig, write_rows: WriteRows
) -> None:
    batch = prepare(make_config(write_rows([{"text": "abc"}]))).train.read([(0, 0)])
    batch.labels[:] = -100
    (fault,) = loss_problems(batch, 0, completions_only=False)
    assert says(fault, "none of")


def test_a_piece_of_one_token_is_no_fault(make_config: MakeConfig, write_rows: WriteRows) -> None:
    batch = prepare(make_config(write_rows([{"text": "abc"}]))).train.read([(0, 0)])
    batch.document_ids[0, 1:] = -1
    assert (
        loss_problems(batch, 0, completions_only=False)
        == loss_problems(batch, 0, completions_only=True)
        == []
    )


def preview(config: RunConfig, tmp_path: Path) -> Result:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    return CliRunner().invoke(
        app, ["data", "preview", str(tmp_path / "run.yaml"), "--samples", "1"]
    )


def test_the_command_shows_samples_and_counts(
    make_config: MakeConfig, write_rows: WriteRows, tmp_path: Path
) -> None:
    path = write_rows([{"prompt": f"prompt {n}", "completion": " answer"} for n in range(9)])
    result = preview(make_config(path, format="prompt-completion"), tmp_path)
    assert result.exit_code == 0, result.output
    output = result.output
    assert "data, sequence 1 of" in output
    assert "data: 9 documents" in output
    assert "% filled" in output


def test_the_command_stops_at_a_fault(
    make_config: MakeConfig, write_rows: WriteRows, tmp_path: Path
) -> None:
    path = write_rows([{"prompt": "", "completion": "answer"}])
    result = preview(make_config(path, format="prompt-completion"), tmp_path)
    error = result.exception
    assert isinstance(error, UserError)
    assert says(str(error), "data, sequence 1, document 1: all")


def test_a_preview_reads_the_first_rows_of_a_large_source_and_writes_no_cache(
    make_config: MakeConfig, write_rows: WriteRows, tmp_path: Path
) -> None:
    """The last row is damaged: who reads all of them finds it."""
    path = write_rows([{"text": f"document {n} " + "words " * 40} for n in range(20_000)])
    with path.open("a", encoding="utf-8") as file:
        file.write('{"text": 3}\n')
    config = make_config(path)
    result = preview(config, tmp_path)
    assert result.exit_code == 0, result.output
    (line,) = [line for line in result.output.splitlines() if "documents" in line]
    assert 0 < int(line.split(" documents")[0].split()[-1].replace(",", "")) < 10_000
    assert "--all" in result.output.splitlines()[-1]
    cache = Path(str(config.data.cache_directory))
    assert not list(cache.glob("tokenized/*")) and not list(cache.glob("hashes/*"))

    everything = CliRunner().invoke(
        app,
        ["data", "preview", str(tmp_path / "run.yaml"), "--all", "--set", "data.on_error=refuse"],
    )
    assert isinstance(everything.exception, UserError)
    assert says(str(everything.exception), "line 20001")
