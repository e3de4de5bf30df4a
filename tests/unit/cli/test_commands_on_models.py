"""`drillyard eval`, `data preview` and `chaos`: what they start, what they refuse, and what they
leave behind."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from drillyard.cli import main as cli
from drillyard.faults import campaign, campaign_report
from drillyard.supervise import supervisor
from drillyard.training import saved_evaluation


def call(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main([str(argument) for argument in arguments])
    return int(ended.value.code or 0)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run config whose rows have a short prompt and a completion of several sequences."""
    rows = [{"prompt": f"row {n}", "completion": "words and words " * 40} for n in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config: dict[str, Any] = {
        "name": "small",
        "output": str(tmp_path / "runs"),
        "model": {
            "init": "random",
            "config": {"architecture": "llama", "hidden_size": 32, "num_hidden_layers": 1},
        },
        "data": {
            "source": str(tmp_path / "rows.jsonl"),
            "format": "prompt-completion",
            "tokenizer": {"train": "bpe", "vocab_size": 300},
            "sequence_length": 32,
            "too_long": "split",
        },
        "training": {"steps": 1, "device": "cpu", "optimizer": {"learning_rate": 0.001}},
    }
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(config))
    return path


def test_a_preview_accepts_pieces_that_are_all_completion_and_text_that_has_no_prompt(
    run: Path,
) -> None:
    assert call("data", "preview", run) == 0
    assert (
        call("data", "preview", run, "--set", "data.loss_on=all", "--set", "data.too_long=truncate")
        == 0
    )


def test_an_evaluation_on_two_ranks_starts_them_and_a_rank_of_it_evaluates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[int] = []

    def supervise(command: list[str], num_ranks: int, **others: Any) -> int:
        started.append(num_ranks)
        return 3

    monkeypatch.setattr(supervisor, "supervise", supervise)
    monkeypatch.setattr(saved_evaluation, "check_request", lambda request: None)
    monkeypatch.setattr(
        saved_evaluation, "evaluate_saved", lambda request, note: {"part": {"loss": 1.5}}
    )
    (tmp_path / "model").mkdir()
    evaluate = ("eval", tmp_path / "model", "--output", tmp_path / "out")
    assert call(*evaluate, "--nproc-per-node", 2) == 3 and started == [2]
    assert call(*evaluate) == 0 and started == [2]


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory for temporary files."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    return tmp_path / "temporary"


def test_a_campaign_that_cannot_go_on_raises_and_leaves_no_directory(
    run: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[Path] = []

    def break_off(plan: campaign.Campaign, *others: Any) -> None:
        made.append(plan.directory)
        raise OSError("no space left")

    monkeypatch.setattr(campaign, "run_campaign", break_off)
    assert call("chaos", run) != 0
    assert "no space left" in capsys.readouterr().err
    assert made[0].parent == temporary.resolve() and not made[0].exists()


@pytest.mark.parametrize("passed", [True, False])
def test_the_exit_code_of_a_campaign_says_whether_all_faults_passed(
    passed: bool, run: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(campaign, "run_campaign", lambda *others: SimpleNamespace(passed=passed))
    monkeypatch.setattr(campaign_report, "as_json", lambda outcome: {"passed": outcome.passed})
    assert call("chaos", run, "--json") == (0 if passed else 1)


def test_unknown_faults_are_refused_with_those_there_are(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("chaos", run, "--faults", "kill,flood") == 2
    printed = capsys.readouterr().err
    assert "flood" in printed and "disk-full" in printed
