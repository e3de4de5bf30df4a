"""A run whose first step runs out of memory: settings that were left open change, those of the user
end it with what would fit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.integration.tiny_run import Run, train, write_config

PLANT = """
import os
if "RANK" in os.environ:
    from drillyard.supervise import rank_supervision
    attend = rank_supervision.RankSupervision

    def attend_and_plant(*arguments, **options):
        side = attend(*arguments, **options)
        import torch
        from drillyard.models import loss

        def run_out(*unused):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

        if side.attempt == 0:
            loss.loss_and_gradient = run_out
        return side

    rank_supervision.RankSupervision = attend_and_plant
"""
MODE = "training.activation_checkpointing"


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every first attempt runs out of memory in the loss of its first step."""
    (tmp_path / "planted").mkdir()
    (tmp_path / "planted" / "sitecustomize.py").write_text(PLANT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "planted"))


@pytest.mark.usefixtures("planted")
def test_an_open_setting_is_replaced_and_the_run_goes_on(workplace: Path) -> None:
    config = write_config(workplace, "open", training__steps=2)
    ended = train(config)
    assert ended.returncode == 0, ended.stderr
    assert "in the part `loss`" in ended.stderr and "the next start takes" in ended.stderr
    first, second = Run(config).events("resolved")
    assert first["settings"][MODE] == "none" and second["settings"][MODE] != "none"
    assert MODE in second["kept"]
    record = json.loads((Run(config).directory / "resolved.json").read_text())
    (entry,) = record["layouts"]
    assert entry["settings"][MODE] == second["settings"][MODE]
    again = train(config)
    assert again.returncode == 0 and "finished" in again.stdout


@pytest.mark.usefixtures("planted")
def test_a_setting_of_the_user_ends_the_run_with_what_would_fit(workplace: Path) -> None:
    config = write_config(
        workplace, "given", training__steps=2, training__activation_checkpointing="none"
    )
    ended = train(config)
    assert ended.returncode == 2, ended.stderr
    assert "in the part `loss`" in ended.stderr and "predicted:" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert len(Run(config).events("resolved")) == 1
