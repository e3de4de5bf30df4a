"""What recipes carry beside their configs."""

from __future__ import annotations

import importlib.util
import json
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

from drillyard.config.load import load_cluster_config, load_launch_config

ROOT = Path(__file__).parents[3]
GLAIVE = ROOT / "recipes/qwen2-7b-glaive-soperator"


@pytest.mark.parametrize("run", sorted((ROOT / "recipes").glob("*/run.yaml")), ids=lambda path: path.parent.name)
def test_every_recipe_loads(run):
    load_launch_config(run, resolve_environment=False)
    load_cluster_config(run.with_name("cluster.yaml"), resolve_environment=False)


@pytest.mark.parametrize("script", sorted((ROOT / "recipes").glob("*/*.sh")), ids=lambda path: path.name)
def test_scripts_are_bash(script):
    assert subprocess.run(["bash", "-n", str(script)], capture_output=True).returncode == 0


@pytest.fixture
def convert() -> ModuleType:
    spec = importlib.util.spec_from_file_location("convert", GLAIVE / "convert.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SYSTEM = 'SYSTEM: You may call functions -\n{"name": "get_weather"}\n'
CHAT = (
    "USER: What is the weather in Paris?\n\n\n"
    'ASSISTANT: <functioncall> {"name": "get_weather", "arguments": \'{"city": "Paris"}\'} <|endoftext|>\n\n\n'
    'FUNCTION RESPONSE: {"temperature": 21}\n\n\n'
    "ASSISTANT: It is 21 degrees.\nNOTE: the USER: asked.<|endoftext|>\n\n\n"
)


def test_a_conversation_of_glaives_becomes_messages(convert):
    assert convert.messages_of(SYSTEM, CHAT) == [
        {"role": "system", "content": 'You may call functions -\n{"name": "get_weather"}'},
        {"role": "user", "content": "What is the weather in Paris?"},
        {"role": "assistant", "content": '<functioncall> {"name": "get_weather", "arguments": \'{"city": "Paris"}\'}'},
        {"role": "tool", "content": '{"temperature": 21}'},
        {"role": "assistant", "content": "It is 21 degrees.\nNOTE: the USER: asked."},
    ]


@pytest.mark.parametrize("chat", ["", "USER: hello\n\n\n", "prose before\nUSER: a\n\nASSISTANT: b"])
def test_a_conversation_without_an_answer_teaches_nothing(convert, chat):
    assert convert.messages_of("", chat) == []


def test_the_file_is_there_whole_or_not_at_all(convert, tmp_path, monkeypatch, capsys):
    target = tmp_path / "glaive.jsonl"
    monkeypatch.setattr("sys.argv", ["convert.py", str(target)])
    monkeypatch.setattr(convert, "rows", lambda: iter([{"system": SYSTEM, "chat": CHAT}, {"system": "", "chat": ""}]))
    convert.main()
    (line,) = target.read_text(encoding="utf-8").splitlines()
    assert [each["role"] for each in json.loads(line)["messages"]] == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    assert "1 conversations; 1 without an answer" in capsys.readouterr().out

    def broken():
        yield {"system": SYSTEM, "chat": CHAT}
        raise OSError("connection lost")

    monkeypatch.setattr(convert, "rows", broken)
    monkeypatch.setattr("sys.argv", ["convert.py", str(tmp_path / "other.jsonl")])
    with pytest.raises(OSError, match="connection lost"):
        convert.main()
    assert not (tmp_path / "other.jsonl").exists()
