"""`drillyard train` finds what the model's config and this host forbid before it makes a directory
or starts a rank."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.facts import says

from drillyard.cli.main import main

CONFIG = """\
name: x
model:
  config: {{architecture: {architecture}, hidden_size: 64}}
  init: random
  attention: {attention}
data: {{source: rows.jsonl, sequence_length: 64, tokenizer: {{train: bpe, vocab_size: 300}}}}
training: {{steps: 2, optimizer: {{learning_rate: 1e-3}}}}
"""


@pytest.mark.parametrize(
    ("architecture", "attention", "message"),
    [
        ("llama", "flex", "run.yaml:5: model.attention: flex ... CPU ... GPU"),
        ("mamba", "auto", "run.yaml:3: model.config.architecture: ... 'mamba'"),
    ],
)
def test_a_model_that_cannot_train_here_is_refused_at_once(
    architecture: str,
    attention: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for variable in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    Path("run.yaml").write_text(CONFIG.format(architecture=architecture, attention=attention))
    with pytest.raises(SystemExit) as ended:
        main(["train", "run.yaml"])
    assert ended.value.code == 2
    assert says(capsys.readouterr().err, f"error: {message}")
    assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"]


def test_weights_that_are_not_there_are_reported_before_ranks_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for variable in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    Path("base").mkdir()
    Path("base/config.json").write_text('{"model_type": "llama", "vocab_size": 300}')
    text = CONFIG.replace("config: {{architecture: {architecture}, hidden_size: 64}}", "id: base")
    text = text.replace("init: random", "init: pretrained").replace(
        ", tokenizer: {{train: bpe, vocab_size: 300}}", ""
    )
    Path("run.yaml").write_text(text.format(attention="auto"))
    with pytest.raises(SystemExit) as ended:
        main(["train", "run.yaml"])
    assert ended.value.code == 2
    assert says(capsys.readouterr().err, "base ... no model.safetensors")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "run.yaml"]


def test_a_rank_that_cannot_open_the_board_of_its_supervisor_ends_as_a_user_error(
    tmp_path: Path,
) -> None:
    """No traceback, and a code after which no attempt follows."""
    (tmp_path / "run.yaml").write_text(CONFIG.format(architecture="llama", attention="auto"))
    board = "/proc/self/fd/no-such-board"
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "DRILLYARD_SUPERVISED": "1"}
    rank = subprocess.run(
        [sys.executable, "-m", "drillyard", "train", "run.yaml"],
        cwd=tmp_path,
        env={**os.environ, **place, "DRILLYARD_LIFE_BOARD": board},
        capture_output=True,
        text=True,
        check=False,
    )
    assert rank.returncode == 2
    assert rank.stderr.startswith(f"error: {board}: ") and "Traceback" not in rank.stderr
