"""Which model is estimated: read from what is here, never downloaded; or counted, or built."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.facts import says
from tests.unit.estimation.requests import LLAMA_70B, run_config

from drillyard.errors import UserError
from drillyard.estimation.model_source import ModelOptions, find_model
from drillyard.modelspec import ModelSpec, model_spec

CONFIG = {**LLAMA_70B, "model_type": "llama"}


def with_id(name: str) -> Any:
    return run_config(model={"id": name, "init": "pretrained", "config": None})


def test_an_inline_config_is_read_as_it_stands() -> None:
    model = find_model(run_config(), ModelOptions())
    assert model.spec.total_parameters == 70_553_706_496
    assert model.source == "model.config"


def test_an_inline_config_follows_the_vocabulary_of_a_tokenizer_that_is_to_be_trained() -> None:
    small = {key: value for key, value in LLAMA_70B.items() if key != "vocab_size"}
    trained = run_config(small, data={"tokenizer": {"train": "bpe", "vocab_size": 1024}})
    assert find_model(trained, ModelOptions()).spec.vocab_size == 1024
    with pytest.raises(
        UserError, match=r"vocab_size: missing: .*\n.*--set model.config.vocab_size=N"
    ):
        find_model(run_config(small), ModelOptions())


def test_a_directory_and_a_file_that_is_given_are_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert (
        find_model(with_id(str(tmp_path)), ModelOptions()).spec.total_parameters == 70_553_706_496
    )
    file = tmp_path / "other.json"
    file.write_text(json.dumps({**CONFIG, "num_hidden_layers": 2}))
    given = find_model(with_id(str(tmp_path)), ModelOptions(file))
    assert (len(given.spec.blocks), given.source) == (2, str(file))


def test_a_hub_id_is_read_from_the_local_cache_and_never_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UserError) as caught:
        find_model(with_id("some/model"), ModelOptions())
    assert says(str(caught.value), "Hugging Face cache")
    assert "--config FILE" in str(caught.value) and "hf download some/model config.json" in str(
        caught.value
    )
    repository = tmp_path / "models--some--model"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc")
    with pytest.raises(UserError, match="Hugging Face cache"):
        find_model(with_id("some/model"), ModelOptions())
    (repository / "snapshots" / "abc").mkdir(parents=True)
    (repository / "snapshots" / "abc" / "config.json").write_text(json.dumps(CONFIG))
    assert find_model(with_id("some/model"), ModelOptions()).spec.total_parameters == 70_553_706_496


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not JSON: line 1"),
        ("[1]", "not a JSON object"),
        (json.dumps({"hidden_size": 64}), "model_type is missing"),
        (json.dumps({**CONFIG, "hidden_size": "8192"}), "hidden_size"),
        (json.dumps({**CONFIG, "num_attention_heads": 63}), "63 attention heads"),
        (json.dumps({**CONFIG, "model_type": "lama"}), r"llama\?"),
        (json.dumps({**CONFIG, "model_type": "unheard-of"}), r"(?s)shapes.*--params"),
        (json.dumps({**CONFIG, "bottleneck_size": 12}), "bottleneck_size"),
    ],
)
def test_a_config_that_says_too_little_or_too_much_is_refused(
    tmp_path: Path, content: str, message: str
) -> None:
    file = tmp_path / "config.json"
    file.write_text(content)
    with pytest.raises(UserError, match=message) as error:
        find_model(run_config(), ModelOptions(file))
    assert str(file) in str(error.value)


def test_a_model_may_be_given_by_its_numbers_of_parameters() -> None:
    model = find_model(with_id("some/unknown"), ModelOptions(None, 1000, 200))
    assert (model.spec.total_parameters, model.spec.active_parameters, model.config) == (
        1000,
        200,
        None,
    )
    with pytest.raises(UserError, match="give --params too"):
        ModelOptions(active_parameters=5)
    with pytest.raises(UserError, match="not both"):
        ModelOptions(Path("x"), 5)
    with pytest.raises(UserError, match="more than --params"):
        find_model(run_config(), ModelOptions(None, 5, 6))


def test_a_family_that_is_not_known_is_built_by_what_can() -> None:
    seen = {}

    def build(config: Any, *, source: str) -> ModelSpec:
        seen.update(config, source=source)
        return model_spec(CONFIG)

    find_model(run_config({**LLAMA_70B, "architecture": "new"}), ModelOptions(), build=build)
    assert (seen["model_type"], seen["source"]) == ("new", "model.config")
