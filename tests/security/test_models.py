"""A model or tokenizer from somebody else: the code that it comes with is never run, and nobody is
asked to agree."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from drillyard.cli import main as cli
from drillyard.config.run_model import ModelConfig
from drillyard.data.tokenizer import open_tokenizer
from drillyard.errors import UserError
from drillyard.models import meta_model
from drillyard.models.meta_model import build_spec, load_config
from drillyard.models.pretrained import StoredTensors

CODE = "open({ran!r}, 'w')\n"
TINY = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 64,
}


@pytest.fixture(autouse=True)
def questions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was asked on the terminal; each question is answered with yes."""
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda text="": asked.append(text) or "y")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return asked


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """A directory whose tokenizer and model are Python code, which would make the file `ran`."""
    directory = tmp_path / "foreign"
    directory.mkdir()
    (directory / "evil.py").write_text(CODE.format(ran=str(tmp_path / "ran")))
    auto_map = {name: "evil.Evil" for name in ("AutoConfig", "AutoModelForCausalLM")}
    (directory / "config.json").write_text(json.dumps({"auto_map": auto_map, **TINY}))
    tokenizer = {
        "tokenizer_class": "EvilTokenizer",
        "auto_map": {"AutoTokenizer": ["evil.Evil", None]},
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    return directory


def test_a_tokenizer_with_code_is_refused_without_a_question(
    foreign: Path, questions: list[str]
) -> None:
    with pytest.raises(UserError, match=r"auto_map in its tokenizer_config\.json.*data\.tokenizer"):
        open_tokenizer(str(foreign))
    assert questions == [] and not (foreign.parent / "ran").exists()


def test_a_model_with_code_is_refused_without_a_question(
    foreign: Path, questions: list[str]
) -> None:
    with pytest.raises(UserError, match=r"auto_map in its config\.json(?s:.*)llama"):
        load_config(ModelConfig(id=str(foreign)))
    assert questions == [] and not (foreign.parent / "ran").exists()


@pytest.mark.parametrize(
    "content", ["[" * 100_000, "[]", '{"model_type": 5}'], ids=["deep", "list", "number"]
)
def test_a_config_json_that_is_no_config_is_named(content: str, foreign: Path) -> None:
    (foreign / "config.json").write_text(content)
    with pytest.raises(UserError, match=foreign.name):
        load_config(ModelConfig(id=str(foreign)))


@pytest.mark.parametrize("content", ["[" * 100_000, "[]"], ids=["deep", "list"])
def test_a_generation_config_that_is_none_is_named(content: str, foreign: Path) -> None:
    (foreign / "generation_config.json").write_text(content)
    with pytest.raises(UserError, match=r"generation_config\.json"):
        meta_model.load_generation_config(ModelConfig(id=str(foreign), init="pretrained"))


@pytest.mark.parametrize("model_type", ["vit", "t5"])
def test_an_estimate_of_a_family_without_a_causal_model_asks_nothing(
    model_type: str, questions: list[str]
) -> None:
    with pytest.raises(UserError, match="cannot build"):
        build_spec(
            {
                "model_type": model_type,
                "auto_map": {"AutoModelForCausalLM": "someone/kernels--evil.Evil"},
            }
        )
    assert questions == []


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
def test_an_estimate_fetches_no_attention_kernel_that_a_config_names(key: str) -> None:
    plain = build_spec({"model_type": "llama", **TINY})
    assert build_spec({"model_type": "llama", **TINY, key: "someone/kernel"}) == plain


def test_a_preview_with_such_a_tokenizer_ends_with_2(
    foreign: Path, tmp_path: Path, questions: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": f"row {n}"}) + "\n" for n in range(20)))
    config: dict[str, Any] = {
        "name": "foreign",
        "output": str(tmp_path / "runs"),
        "model": {"config": {"architecture": "llama", **TINY}},
        "data": {
            "source": str(rows),
            "format": "text",
            "tokenizer": str(foreign),
            "sequence_length": 16,
        },
        "training": {"steps": 1, "device": "cpu", "optimizer": {"learning_rate": 0.001}},
    }
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(config))
    with pytest.raises(SystemExit) as ended:
        cli.main(["data", "preview", str(path)])
    printed = capsys.readouterr()
    assert ended.value.code == 2 and "auto_map" in printed.err, printed
    assert questions == [] and not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "name",
    ["../elsewhere.safetensors", "/tmp/elsewhere.safetensors", "a/../../elsewhere.safetensors"],
)
def test_an_index_of_weights_leads_to_no_other_directory(name: str, foreign: Path) -> None:
    (foreign.parent / "elsewhere.safetensors").write_bytes(b"")
    index = foreign / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": name}}))
    with (
        pytest.raises(UserError, match=r"model\.safetensors\.index\.json names"),
        StoredTensors(foreign),
    ):
        pass
