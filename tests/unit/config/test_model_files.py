"""What a model's own config forbids is found before anything starts, wherever the config is, and
without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.facts import says

from drillyard.config.model_files import local_model_config
from drillyard.config.problems import dotted
from drillyard.config.run_checks import check_run

from .conftest import RUN, Load


def found(load: Load, *overrides: str, has_gpu: bool | None = None) -> dict[str, str]:
    return {
        dotted(problem.path): problem.message
        for problem in check_run(load(RUN, *overrides), has_gpu=has_gpu)
    }


def write_model(directory: Path, **config: object) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def cached(home: Path, model_id: str, **config: object) -> None:
    """A model of the hub as huggingface_hub leaves it in its cache."""
    repository = home / "hub" / f"models--{model_id.replace('/', '--')}"
    write_model(repository / "snapshots" / "abc", **config)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")


@pytest.mark.parametrize(
    ("wrong", "meant"), [("lama", "llama"), ("Qwen3", "qwen3"), ("gemma3", "gemma3_text")]
)
def test_an_inline_architecture_that_is_not_proven_is_refused_with_the_nearest(
    wrong: str, meant: str, load: Load
) -> None:
    problems = found(load, f"model.config.architecture={wrong}")
    assert list(problems) == ["model.config.architecture"]
    message = problems["model.config.architecture"]
    assert says(message, f"'{wrong}' ... mean {meant}?")


def test_no_spelling_is_proposed_for_an_architecture_that_is_like_none(load: Load) -> None:
    message = found(load, "model.config.architecture=mamba")["model.config.architecture"]
    assert says(message, "'mamba' ... supported: cohere") and "?" not in message


def test_a_model_directory_is_judged_by_its_config(tmp_path: Path, load: Load) -> None:
    for model_type, refused in (("mamba", True), ("llama", False)):
        directory = write_model(tmp_path / model_type, model_type=model_type)
        problems = found(load, f"model={{id: {directory}}}", "data.tokenizer=null")
        assert list(problems) == (["model.id"] if refused else [])


def test_a_hub_id_is_judged_by_what_the_cache_holds_and_else_let_through(
    tmp_path: Path, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached(tmp_path / "home", "some/mamba", model_type="mamba")
    settings = ("model={id: some/mamba}", "data.tokenizer=null")
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    assert list(found(load, *settings)) == ["model.id"]
    monkeypatch.setenv("HF_HOME", str(tmp_path / "empty"))
    assert found(load, *settings) == {}
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "home" / "hub"))
    assert list(found(load, *settings)) == ["model.id"]


def test_the_cache_is_where_the_library_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import try_to_load_from_cache

    cached(tmp_path, "some/model", model_type="llama", hidden_size=7)
    path = try_to_load_from_cache("some/model", "config.json", cache_dir=tmp_path / "hub")
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert isinstance(path, str)
    assert local_model_config("some/model") == json.loads(Path(path).read_text()) != {}


@pytest.mark.parametrize("content", [b"", b"{broken", b"[1]", b"\xff\xfe"])
def test_a_damaged_config_is_left_to_the_room_that_reads_all_of_it(
    content: bytes, tmp_path: Path, load: Load
) -> None:
    directory = write_model(tmp_path / "model")
    (directory / "config.json").write_bytes(content)
    assert found(load, f"model={{id: {directory}}}", "data.tokenizer=null") == {}


@pytest.mark.parametrize(
    ("setting", "words"),
    [("output_router_logits: true", "auxiliary loss"), ("dtype: bfloat16", "training.precision")],
)
def test_an_inline_setting_that_training_does_not_follow_is_refused(
    setting: str, words: str, load: Load
) -> None:
    key = setting.partition(":")[0]
    problems = found(load, f"model.config={{architecture: mixtral, {setting}}}")
    assert list(problems) == [f"model.config.{key}"]
    assert (
        says(problems[f"model.config.{key}"], "no effect")
        and words in problems[f"model.config.{key}"]
    )


def test_a_setting_that_is_off_is_let_through(load: Load) -> None:
    assert found(load, "model.config={architecture: mixtral, output_router_logits: false}") == {}


@pytest.mark.parametrize("kernel", ["flex", "varlen"])
def test_a_kernel_of_gpus_is_refused_where_none_is_seen_unless_cuda_is_asked_for(
    kernel: str, load: Load
) -> None:
    settings = (f"model.attention={kernel}", "training.precision=bf16")
    problems = found(load, *settings, has_gpu=False)
    assert list(problems) == ["model.attention"]
    assert says(problems["model.attention"], f"{kernel} ... CPU ... GPU")
    assert found(load, *settings, has_gpu=True) == {}
    assert found(load, *settings) == {}, "a config may be checked on a host that will not train it"
    assert found(load, *settings, "training.device=cuda", has_gpu=False) == {}


def test_the_checks_import_no_torch() -> None:
    program = (
        "import sys, drillyard.config; sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
