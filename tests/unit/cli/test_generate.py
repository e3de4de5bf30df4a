"""`drillyard generate`: the tokens of transformers' own `generate`, through the model's own
template, and nothing else on standard output."""

from __future__ import annotations

import copy
import io
import json
import os
import pty
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from tests.unit.data.chat_templates import FILES, plain
from tests.unit.data.test_chat_templates import byte_level
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from drillyard.cli import main as cli
from drillyard.control_characters import clean
from drillyard.evaluation.generate import Sampling
from drillyard.training.saved_generation import TextPieces

NEW = 12
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a place.",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
    },
}


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command sets the threads of its process, which other tests share: with more than one, a
    model this small waits for its threads most of the time."""
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)


def call(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main([str(argument) for argument in arguments])
    return int(ended.value.code or 0)


def write_model(directory: Path, template: str | None, seed: int = 0, **changes: Any) -> Path:
    """A random Llama of a few KB whose answers differ, with a byte-level tokenizer."""
    tokenizer = copy.deepcopy(byte_level())
    tokenizer.chat_template = template
    tokenizer.save_pretrained(directory)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 1024,
    }
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        initializer_range=0.5,
        eos_token_id=tokenizer.eos_token_id,
        **(sizes | changes),
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


def theirs(model: Any, directory: Path, messages: list[Any], tools: Any = None) -> list[int]:
    """The answer of plain transformers, without the token that ends it."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    prompt = tokenizer.apply_chat_template(
        messages, tools=tools, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**prompt, do_sample=False, max_new_tokens=NEW, pad_token_id=0)
    tokens: list[int] = output[0, prompt["input_ids"].shape[1] :].tolist()
    return tokens[:-1] if tokens[-1] == tokenizer.eos_token_id else tokens


def answers(capsys: pytest.CaptureFixture[str], *arguments: object) -> list[dict[str, Any]]:
    capsys.readouterr()
    assert call("generate", *arguments, "--max-new-tokens", NEW) == 0, capsys.readouterr().err
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize("name", sorted(FILES))
def test_gives_the_tokens_of_transformers_through_each_template(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = write_model(tmp_path / "model", plain(FILES[name]), seed=len(name))
    model = AutoModelForCausalLM.from_pretrained(directory)
    decode = AutoTokenizer.from_pretrained(directory).decode
    talks = [
        [{"role": "user", "content": "Hello, who are you?"}],
        [
            {"role": "user", "content": "One ✓"},
            {"role": "assistant", "content": "Two"},
            {"role": "user", "content": "Three?"},
        ],
    ]
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    found = answers(capsys, directory, "--input", rows)
    expected = [theirs(model, directory, talk) for talk in talks]
    assert [each["answer"] for each in found] == [decode(tokens) for tokens in expected]
    assert [each["answer_tokens"] for each in found] == [len(tokens) for tokens in expected]
    (alone,) = answers(capsys, directory, "--prompt", "Hello, who are you?", "--json")
    assert alone["answer"] == found[0]["answer"]
    capsys.readouterr()
    assert call("chat", directory, "--prompt", "Hello, who are you?", "--max-new-tokens", NEW) == 0
    assert capsys.readouterr().out == clean(found[0]["answer"]) + "\n"


def test_tools_are_in_the_prompt_and_said_where_the_template_has_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tools = tmp_path / "tools.json"
    tools.write_text(json.dumps([TOOL]))
    with_tools = write_model(tmp_path / "qwen", FILES["qwen3"])
    question = ["--prompt", "And in Rome?", "--tools", tools, "--json"]
    (found,) = answers(capsys, with_tools, *question)
    model = AutoModelForCausalLM.from_pretrained(with_tools)
    expected = theirs(
        model, with_tools, [{"role": "user", "content": "And in Rome?"}], tools=[TOOL]
    )
    assert "The weather of a place." in found["prompt"]
    assert found["answer"] == AutoTokenizer.from_pretrained(with_tools).decode(expected)
    without = write_model(tmp_path / "chatml", plain(FILES["chatml"]))
    assert call("generate", without, *question, "--max-new-tokens", NEW) == 0
    assert "does not render tools" in capsys.readouterr().err


def test_a_system_message_opens_every_conversation_that_has_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever layout a line has; a model that continues text refuses it."""
    directory = write_model(tmp_path / "model", plain(FILES["chatml"]))
    user = {"role": "user", "content": "Who?"}
    rows: list[Any] = [
        "Who?",
        {"prompt": "Who?"},
        {"messages": [user]},
        {"conversations": [{"from": "human", "value": "Who?"}]},
        {"messages": [{"role": "system", "content": "Mine."}, user]},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = answers(capsys, directory, "--input", path, "--system", "Be brief.")
    assert ["Be brief." in each["prompt"] for each in found] == [True] * 4 + [False]
    assert len({each["prompt"] for each in found}) == 2
    plainly = ["--prompt", "a", "--system", "b"]
    assert call("generate", write_model(tmp_path / "text", None), *plainly) == 2
    assert "--system" in capsys.readouterr().err


def test_an_adapter_and_its_base_side_by_side(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = write_model(tmp_path / "base", plain(FILES["chatml"]))
    model = AutoModelForCausalLM.from_pretrained(base)
    adapted = peft.get_peft_model(
        model, peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear")
    )
    for key, parameter in adapted.named_parameters():
        if "lora_B" in key:
            parameter.data.normal_(0.0, 0.2, generator=torch.Generator().manual_seed(len(key)))
    adapted.save_pretrained(tmp_path / "adapter")
    question = [{"role": "user", "content": "Who?"}]
    with_adapter = theirs(adapted, base, question)
    plainly = theirs(AutoModelForCausalLM.from_pretrained(base), base, question)
    decode = AutoTokenizer.from_pretrained(base).decode
    (found,) = answers(
        capsys, tmp_path / "adapter", "--prompt", "Who?", "--compare", base, "--json"
    )
    assert found["answer"] == decode(with_adapter)
    assert found["compared"]["answer"] == decode(plainly) != found["answer"]
    assert found["compared"]["model"] == str(base)


def test_a_model_without_a_template_continues_text_and_lines_at_fault_cost_themselves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = write_model(tmp_path / "model", None, max_position_embeddings=64)
    rows = tmp_path / "rows.jsonl"
    good = ['{"prompt": "once"}', '"upon a time"']
    lines = [good[0], "[1]", good[1], '{"a": 1}', json.dumps("long " * 100), "{", '{"prompt": 3}']
    rows.write_text("\n".join(lines) + "\n")
    found = answers(capsys, directory, "--input", rows)
    assert [each["line"] for each in found if "answer" in each] == [1, 3]
    errors = {each["line"]: each["error"] for each in found if "error" in each}
    assert sorted(errors) == [2, 4, 5, 6, 7]
    assert "64 positions" in errors[5] and f"{rows}:5" in errors[5]
    rows.write_text("[1]\n")
    assert call("generate", directory, "--input", rows) == 2
    rows.write_text("\n")
    assert call("generate", directory, "--input", rows) == 2


def test_draws_are_those_of_the_seed_whatever_the_batch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = write_model(tmp_path / "model", None)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(text) + "\n" for text in ("a", "bcd", "ef", "a")))
    drawn = ["--input", rows, "--temperature", 2]
    alone = answers(capsys, directory, *drawn)
    assert answers(capsys, directory, *drawn, "--batch-size", 3) == alone
    assert alone[0]["answer"] != alone[3]["answer"]
    assert answers(capsys, directory, *drawn, "--seed", 1) != alone
    # A line at fault shifts no other line's draws.
    damaged = tmp_path / "damaged.jsonl"
    damaged.write_text('"a"\n[1]\n"ef"\n"a"\n')
    kept = answers(capsys, directory, "--input", damaged, "--temperature", 2, "--batch-size", 4)
    assert [kept[n]["answer"] for n in (0, 2, 3)] == [alone[n]["answer"] for n in (0, 2, 3)]
    greedy = answers(capsys, directory, "--input", rows)
    assert answers(capsys, directory, *drawn, "--top-k", 1) == greedy
    assert answers(capsys, directory, *drawn, "--top-p", 0) == greedy


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--prompt", "a", "--input", "b"], ["--prompt", "--input"]),
        (["--prompt", " "], ["--prompt"]),
        (["--prompt", "a", "--top-p", "0.5"], ["--temperature"]),
        (["--prompt", "a", "--no-template", "--system", "b"], ["--no-template"]),
        (["--prompt", "a", "--template"], ["no chat template", "--no-template"]),
        (["--prompt", "a", "--tools", "missing.json"], ["missing.json"]),
        (["--input", "missing.jsonl"], ["missing.jsonl"]),
        (["--prompt", "a", "--compare", "./missing"], ["missing: no such"]),
    ],
)
def test_what_contradicts_itself_or_is_missing_is_refused(
    arguments: list[str], named: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = write_model(tmp_path / "model", None)
    capsys.readouterr()
    assert call("generate", directory, *arguments) == 2
    caught = capsys.readouterr()
    assert caught.out == "" and all(word in caught.err for word in named), caught.err


def test_a_damaged_model_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = write_model(tmp_path / "model", None)
    model = AutoModelForCausalLM.from_pretrained(directory)
    model.lm_head.weight.data.fill_(float("nan"))
    model.save_pretrained(directory)
    for drawn in ([], ["--temperature", 1]):
        assert call("generate", directory, "--prompt", "a", *drawn) == 2
        assert "NaN" in capsys.readouterr().err


def test_a_pipe_is_a_prompt(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = write_model(tmp_path / "model", None)
    (expected,) = answers(capsys, directory, "--prompt", "once upon", "--json")
    monkeypatch.setattr("sys.stdin", io.StringIO("long " * (4 << 20)))
    assert call("generate", directory) == 2
    assert "--input" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin", io.StringIO("once upon"))
    assert call("generate", directory, "--max-new-tokens", NEW) == 0
    assert capsys.readouterr().out == clean(expected["answer"]) + "\n"


def test_a_terminal_gets_a_chat_that_remembers_and_forgets(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "model", plain(FILES["chatml"]))
    model = AutoModelForCausalLM.from_pretrained(directory)
    decode = AutoTokenizer.from_pretrained(directory).decode
    first = [{"role": "user", "content": "Who?"}]
    one = decode(theirs(model, directory, first))
    second = [*first, {"role": "assistant", "content": one}, {"role": "user", "content": "And?"}]
    two = decode(theirs(model, directory, second))
    shown = in_terminal(
        [sys.executable, "-m", "drillyard", "chat", str(directory), "--max-new-tokens", str(NEW)],
        ["Who?", "And?", "/clear", "Who?", "/exit"],
    )
    parts = [line.strip() for line in shown.replace("\r", "").split("> ")[1:]]
    shown_answers = [part.partition("\n")[2].strip() for part in parts]
    expected = [clean(each).strip() for each in (one, two, one)]
    assert [shown_answers[number] for number in (0, 1, 3)] == expected, shown


def in_terminal(command: list[str], lines: list[str]) -> str:
    """What a command shows in a terminal in which these lines are typed."""
    ours, its = pty.openpty()
    environment = os.environ | {"TERM": "dumb", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, stdin=its, stdout=its, stderr=its, env=environment, start_new_session=True
    )
    os.close(its)
    end = threading.Timer(120, process.kill)
    end.start()
    shown, waiting = b"", list(lines)
    try:
        while True:
            try:
                read = os.read(ours, 4096)
            except OSError:
                break
            shown += read
            # A prompt for each line that was not typed yet.
            if waiting and shown.count(b"> ") > len(lines) - len(waiting):
                os.write(ours, waiting.pop(0).encode() + b"\n")
    finally:
        end.cancel()
        process.wait(timeout=30)
        os.close(ours)
    assert process.returncode == 0, shown
    return shown.decode()


def test_pieces_of_text_are_whole_characters_and_add_up() -> None:
    text = "naïve ✓ 🦜 end"
    pieces: list[str] = []
    stream = TextPieces(
        lambda tokens: bytes(tokens).decode(errors="replace"), frozenset({0}), pieces.append
    )
    for token in [*text.encode(), 0, *b"dropped"]:
        stream.add([token])
    stream.end()
    assert "".join(pieces) == text
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


def test_an_answer_cut_in_a_character_ends_as_the_tokenizer_ends_it() -> None:
    pieces: list[str] = []
    stream = TextPieces(
        lambda tokens: bytes(tokens).decode(errors="replace"), frozenset(), pieces.append
    )
    for token in "a✓".encode()[:-1]:
        stream.add([token])
    stream.end()
    assert "".join(pieces) == "a\N{REPLACEMENT CHARACTER}"


def test_draws_have_the_shares_that_the_settings_say() -> None:
    logits_V = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    generator = Sampling(seed=1).generator(0, torch.device("cpu"))

    def shares(sampling: Sampling) -> list[float]:
        drawn = [int(sampling.draw(logits_V, generator)) for _ in range(4000)]
        return [drawn.count(token) / len(drawn) for token in range(4)]

    assert shares(Sampling()) == pytest.approx([0.5, 0.3, 0.15, 0.05], abs=0.03)
    assert shares(Sampling(top_k=2)) == pytest.approx([0.625, 0.375, 0, 0], abs=0.03)
    assert shares(Sampling(top_p=0.79)) == pytest.approx([0.625, 0.375, 0, 0], abs=0.03)
    assert shares(Sampling(top_p=0.81))[2] > 0.1
    squared = torch.tensor([0.5, 0.3, 0.15, 0.05]) ** 2
    expected = (squared / squared.sum()).tolist()
    assert shares(Sampling(temperature=0.5)) == pytest.approx(expected, abs=0.03)
