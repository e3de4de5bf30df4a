"""A small valid run.yaml, and ways to load changed copies of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from drillyard.config.load import load_run_config
from drillyard.config.run import RunConfig
from drillyard.errors import UserError

RUN = """\
name: small
model:
  config: {architecture: llama, hidden_size: 64}
  init: random
data:
  source: builtin:text-to-sql
  format: text-to-sql
  sequence_length: 128
  tokenizer: {train: bpe, vocab_size: 1024}
training:
  steps: 100
  precision: fp32
  optimizer:
    learning_rate: 4e-3
"""

Load = Callable[..., RunConfig]
Refuse = Callable[..., list[str]]


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """load(text, *overrides): the run config of a run.yaml with this text, in the working
    directory."""
    monkeypatch.chdir(tmp_path)

    def load_text(text: str = RUN, *overrides: str) -> RunConfig:
        Path("run.yaml").write_text(text, encoding="utf-8")
        return load_run_config("run.yaml", overrides)

    return load_text


@pytest.fixture
def refuse(load: Load) -> Refuse:
    """refuse(text, *overrides): the lines of the error that loading ends in."""

    def lines(text: str = RUN, *overrides: str) -> list[str]:
        with pytest.raises(UserError) as caught:
            load(text, *overrides)
        return str(caught.value).splitlines()

    return lines
