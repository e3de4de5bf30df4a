"""`drillyard chaos`: its kinds of faults, the campaign that its options make, and what it leaves
behind."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from drillyard.cli import main as cli
from drillyard.cli import process_exit
from drillyard.cli.chaos import _kinds
from drillyard.config import kernel_rules, load, run_checks
from drillyard.errors import UserError
from drillyard.faults import campaign, campaign_report


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("kill", ["kill"]),
        ("flip, kill,", ["kill", "flip"]),
        (" disk-full ,stop", ["stop", "disk-full"]),
    ],
)
def test_kinds_are_in_their_order(text: str, kinds: list[str]) -> None:
    assert _kinds(text) == kinds


@pytest.mark.parametrize(
    ("text", "named"), [("", "nothing"), (" , ", "nothing"), ("kill,flood,x", "flood")]
)
def test_no_kind_and_an_unknown_one_are_refused(text: str, named: str) -> None:
    with pytest.raises(UserError, match=f": {named} .*kill, stop, term, disk-full, flip"):
        _kinds(text)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The campaigns that were run, on a machine of two GPUs, without checking a config."""
    found: list[Any] = []

    def run_campaign(made: Any, run: Any, on_progress: Any) -> Any:
        made.directory.mkdir(exist_ok=True)
        on_progress("a run")
        found.append(made)
        return SimpleNamespace(passed=True)

    monkeypatch.setattr(campaign, "run_campaign", run_campaign)
    monkeypatch.setattr(
        campaign_report, "print_campaign", lambda outcome, console: print("the table")
    )
    monkeypatch.setattr(campaign_report, "as_json", lambda outcome: {"passed": outcome.passed})
    monkeypatch.setattr(process_exit, "require_training", lambda: None)
    monkeypatch.setattr(run_checks, "require_valid", lambda run, num_ranks: None)
    monkeypatch.setattr(kernel_rules, "num_gpus", lambda: 4)
    monkeypatch.setattr(
        load,
        "load_run_config",
        lambda path, sets: SimpleNamespace(training=SimpleNamespace(device=path.stem)),
    )
    return found


def call(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(["chaos", *map(str, arguments)])
    return int(ended.value.code or 0)


@pytest.mark.parametrize(
    ("device", "options", "ranks", "on_gpus"),
    [("auto", (), 4, True), ("cpu", (), 2, False), ("auto", ("--nproc-per-node", 3), 3, True)],
)
def test_ranks_are_the_gpus_or_two(
    made: list[Any],
    tmp_path: Path,
    device: str,
    options: tuple[object, ...],
    ranks: int,
    on_gpus: bool,
) -> None:
    assert call(f"{device}.yaml", "--directory", tmp_path / "work", *options) == 0
    assert (made[0].num_ranks, made[0].on_gpus) == (ranks, on_gpus)
    assert (made[0].count, made[0].seed, made[0].keep, made[0].watchdog_seconds) == (
        10,
        0,
        False,
        None,
    )
    assert made[0].kinds == ["kill", "stop", "term", "disk-full", "flip"]


def test_what_is_printed_and_the_directory_that_is_kept(
    made: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    work = tmp_path / "work"
    assert call("cpu.yaml", "--directory", work, "--keep", "--set", "a=1") == 0
    shown = capsys.readouterr()
    assert (
        shown.out == "the table\n" and "chaos: a run" in shown.err and f"kept: {work}" in shown.err
    )
    assert made[0].keep and made[0].overrides == ["a=1"] and made[0].directory == work
    assert call("cpu.yaml", "--directory", work, "--json") == 0
    assert capsys.readouterr().out.startswith("{")
