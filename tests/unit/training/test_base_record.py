"""The record of a run's base model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from drillyard.config.run_model import ModelConfig
from drillyard.training.base_record import (
    BASE_RECORD,
    SAVED_BASE,
    read_base_record,
    saved_base_documents,
)

RECORD = {"version": 1, "path": None, "dtypes": {"weight": "bfloat16"}}


@pytest.mark.parametrize("recorded", ["${env:MODELS_AT}/llama", "/models-of-a-run/llama"])
def test_a_base_named_by_a_variable_is_found_with_and_without_its_value(
    recorded: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Earlier versions recorded the value."""
    monkeypatch.setenv("MODELS_AT", "/models-of-a-run")
    (tmp_path / SAVED_BASE).mkdir()
    (tmp_path / SAVED_BASE / BASE_RECORD).write_text(json.dumps({**RECORD, "id": recorded}))
    resolved = ModelConfig(id="${env:MODELS_AT}/llama").id

    assert resolved == "/models-of-a-run/llama"
    assert read_base_record(tmp_path, resolved) == {**RECORD, "id": recorded}
    assert read_base_record(tmp_path, "another/model") is None


def test_a_base_named_by_a_variable_is_found_by_the_saved_config(tmp_path: Path) -> None:
    (tmp_path / SAVED_BASE).mkdir()
    record = {**RECORD, "id": "${env:MODELS_AT}/llama"}
    (tmp_path / SAVED_BASE / BASE_RECORD).write_text(json.dumps(record))
    assert read_base_record(tmp_path, "${env:MODELS_AT}/llama") == record


@pytest.mark.parametrize("init", ["pretrained", "random"])
def test_a_model_keeps_its_bases_config_and_with_its_weights_its_generation_settings(
    init: str, tmp_path: Path
) -> None:
    base, run = tmp_path / "base", tmp_path / "run"
    config = ModelConfig.model_validate({"id": str(base), "init": init})
    base.mkdir()
    expected = {"config.json": b'{"at": "first"}'}
    if init == "pretrained":
        expected["generation_config.json"] = b"{ }"
    (base / "config.json").write_bytes(expected["config.json"])
    (base / "generation_config.json").write_bytes(b"{ }")
    assert saved_base_documents(run, config, str(base)) == expected

    (run / SAVED_BASE).mkdir(parents=True)
    for name, content in expected.items():
        (run / SAVED_BASE / name).write_bytes(content)
    record = {**RECORD, "id": str(base)}
    (run / SAVED_BASE / BASE_RECORD).write_text(json.dumps(record))
    (base / "config.json").write_bytes(b'{"at": "last"}')
    assert saved_base_documents(run, config, str(base)) == expected
    assert saved_base_documents(run, ModelConfig(config={"architecture": "gpt2"}), None) == {}
