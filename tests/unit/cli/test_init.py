"""`drillyard init --model --data`: a run config of fifteen lines that trains, after a look at
both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.facts import says
from tests.unit.data.chat_templates import FILES, plain
from tests.unit.data.test_chat_templates import byte_level
from transformers import LlamaConfig, LlamaForCausalLM

from drillyard.cli.main import main
from drillyard.config.load import load_run_config
from drillyard.training.proposed_config import learning_rate, run_name, sequence_length_for


def call(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    return int(ended.value.code or 0)


def write_model(directory: Path, template: str | None, positions: int = 512) -> Path:
    tokenizer = byte_level()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(directory)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=positions,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("DRILLYARD_CACHE", str(tmp_path / "cache"))
    return tmp_path


def talk(number: int) -> list[dict[str, str]]:
    return [
        {"role": "user", "content": f"What is {number}?"},
        {"role": "assistant", "content": f"It is {number}. " * (1 + number % 7)},
    ]


LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "messages": ("chat", {"messages": talk(5)}),
    "sharegpt": (
        "chat",
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
    ),
    "alpaca": ("chat", {"instruction": "Add.", "input": "1, 2", "output": "3"}),
    "xlam": (
        "function-calling",
        {
            "query": "Add 1 and 2",
            "tools": '[{"name": "add", "description": "", "parameters": {"a": {"type": "int"}}}]',
            "answers": '[{"name": "add", "arguments": {"a": 1}}]',
        },
    ),
    "prompts": ("prompt-completion", {"prompt": "1 + 2 =", "completion": " 3"}),
    "sql": ("text-to-sql", {"schema": "CREATE TABLE t (a)", "question": "a?", "sql": "SELECT a"}),
    "text": ("text", {"text": "some words"}),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_format_follows_from_the_rows(
    name: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    form, row = LAYOUTS[name]
    base = write_model(place / "base", plain(FILES["qwen2"]), positions=1024)
    rows = write_rows(place / "rows.jsonl", [row] * 60)
    assert call("init", "My Run", "--model", base, "--data", rows) == 0, capsys.readouterr().err
    text = Path("My Run/run.yaml").read_text()
    assert len(text.splitlines()) <= 16
    config = load_run_config("My Run/run.yaml")
    assert (config.name, config.data.format) == ("my-run", form)
    assert config.data.sequence_length in (128, 256, 512, 1024)
    assert config.training.precision == "fp32"
    assert Path("My Run/cluster.yaml").is_file()
    assert call("train", "My Run/run.yaml", "--dry-run") == 0, capsys.readouterr().err


def test_lengths_and_memory_decide(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = write_model(place / "base", plain(FILES["chatml"]), positions=512)
    rows = [{"messages": talk(number)} for number in range(400)]
    rows[7]["messages"][1]["content"] = "long " * 3000
    path = write_rows(place / "rows.jsonl", rows)
    assert call("init", "x", "--model", base, "--data", path, "--lora") == 0
    config = yaml.safe_load(Path("x/run.yaml").read_text())
    assert config["model"]["lora"]["rank"] == 16
    assert config["data"]["sequence_length"] in (128, 256)
    (line,) = [
        line for line in Path("x/run.yaml").read_text().splitlines() if "sequence_length" in line
    ]
    assert says(line, "documents have ... tokens, at most ... % are longer ... 512 positions")
    assert config["training"]["optimizer"]["learning_rate"] == 2e-4


def test_rows_that_the_model_cannot_take_are_named(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = write_model(place / "base", None, positions=64)
    long = {"prompt": "a", "completion": "long " * 300}
    rows = write_rows(place / "rows.jsonl", [long] * 9)
    assert call("init", "x", "--model", base, "--data", rows) == 2
    assert says(capsys.readouterr().err, "tokens ... 64 positions")


def test_columns_that_no_format_has_are_asked_for_and_taken(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = write_model(place / "base", None)
    rows = write_rows(place / "rows.jsonl", [{"q": "What?", "a": "This."}] * 50)
    assert call("init", "x", "--model", base, "--data", rows) == 2
    error = capsys.readouterr().err
    assert says(error, "rows.jsonl, line 1 ... a, q ... --column prompt=NAME")
    assert not Path("x").exists()
    columns = ["--column", "prompt=q", "--column", "completion=a"]
    assert call("init", "x", "--model", base, "--data", rows, *columns) == 0
    data = yaml.safe_load(Path("x/run.yaml").read_text())["data"]
    assert data["columns"] == {"prompt": "q", "completion": "a"}


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--model", "base"], "--data"),
        (["--data", "chats.jsonl"], "--model"),
        (["--lora"], "--model"),
        (["--model", "base", "--data", "missing.jsonl"], "missing.jsonl"),
        (["--model", "./missing", "--data", "chats.jsonl"], "missing"),
        (["--model", "base", "--data", "empty.jsonl"], "empty.jsonl"),
        (["--model", "base", "--data", "chats.jsonl"], "no chat template"),
        (["--model", "base", "--data", "chats.jsonl", "--column", "x"], "--column"),
        (["--model", "base", "--data", "chats.jsonl", "--column", "x=y"], "--column"),
    ],
)
def test_what_cannot_be_used_is_named_and_nothing_is_written(
    arguments: list[str], named: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_model(place / "base", None)
    write_rows(place / "chats.jsonl", [{"messages": talk(1)}] * 4)
    (place / "empty.jsonl").write_text("")
    before = sorted(place.iterdir())
    assert call("init", "x", *arguments) == 2
    assert named in capsys.readouterr().err
    assert sorted(place.iterdir()) in (before, sorted([*before, place / "cache"]))


def test_nothing_is_overwritten(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Said before anything is looked at."""
    Path("run.yaml").write_text("mine")
    assert call("init", "--model", "base", "--data", "rows.jsonl") == 2
    assert "run.yaml" in capsys.readouterr().err
    assert Path("run.yaml").read_text() == "mine"


def test_names_lengths_and_rates() -> None:
    import numpy as np

    assert [run_name(name) for name in ("My Run", "a_b.c", "...", "É", "x" * 80)] == [
        "my-run",
        "a_b.c",
        "first-run",
        "first-run",
        "x" * 63,
    ]
    lengths = np.array([100] * 99 + [5000])
    assert sequence_length_for(lengths, 8192) == 128
    assert sequence_length_for(np.array([300, 129]), 8192) == 512
    assert sequence_length_for(np.array([9000]), 2048) == 2048
    rates = [learning_rate(size, lora=False) for size in (7e9, 6e8, 5e7, 1e6)]
    assert rates == sorted(rates) and rates[0] == 1e-5
