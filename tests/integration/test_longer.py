"""A run that has ended goes on under its own name or another one, with more steps and another
rate."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from tests.integration.tiny_run import Run, contents, drillyard, write_config, write_rows

SHORT, LONG = 6, 9
MORE = ["--set", f"training.steps={LONG}", "--set", "training.optimizer.learning_rate=1e-3"]


def train(config: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """On one rank, to its end."""
    ended = drillyard("train", config, *arguments)
    assert ended.returncode == 0, ended.stderr
    return ended


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Run, dict[str, str], str]:
    """A run of 6 steps that was made longer, another that began from its end, and what the first
    had left."""
    folder = tmp_path_factory.mktemp("longer")
    write_rows(folder / "rows.jsonl", 40)
    first = Run(write_config(folder, "first", training__steps=SHORT))
    train(first.config)
    left = contents(first.directory)
    output = train(first.config, *MORE).stdout
    begun_from = f"checkpoint.resume={first.directory}/checkpoints/step-{SHORT:08d}"
    other = Run(write_config(folder, "other", training__steps=SHORT))
    train(other.config, *MORE, "--set", begun_from)
    # Its own end counts now, and nothing is left to do.
    assert "finished" in train(other.config, *MORE, "--set", begun_from).stdout
    return first, other, left, output


def test_both_go_on_alike_and_the_change_is_an_event(
    runs: tuple[Run, Run, dict[str, str], str],
) -> None:
    first, other, _, output = runs
    changes = {"training.steps": [SHORT, LONG], "training.optimizer.learning_rate": [4e-3, 1e-3]}
    for run in (first, other):
        (event,) = run.events("settings_changed")
        assert (event["step"], event["changes"]) == (SHORT, changes)
        assert run.events("end")[-1]["status"] == "completed"
    assert [step for step, _, _ in first.figures()] == list(range(1, LONG + 1))
    assert other.figures() == first.figures()[SHORT:]
    assert other.weights() == first.weights()
    assert f"training.steps: {SHORT} -> {LONG}" in output


def test_summary_and_model_are_those_of_the_new_end(
    runs: tuple[Run, Run, dict[str, str], str],
) -> None:
    first, _, left, _ = runs
    now = contents(first.directory)
    assert first.summary()["steps"] == LONG
    assert f"completed, {LONG} steps" in (first.directory / "summary.txt").read_text()
    assert now["final/model.safetensors"] != left["final/model.safetensors"]
    # The checkpoint of the first end is untouched.
    kept = f"checkpoints/step-{SHORT:08d}/"
    assert {name: digest for name, digest in now.items() if name.startswith(kept)} == {
        name: digest for name, digest in left.items() if name.startswith(kept)
    }


def test_the_summary_says_how_much_of_the_data_was_seen(
    runs: tuple[Run, Run, dict[str, str], str],
) -> None:
    first, _, _, _ = runs
    seen = first.summary()["sequences"]
    samples = 2 * LONG
    assert seen == {
        "seen": min(samples, seen["of"]),
        "of": seen["of"],
        "epochs": samples / seen["of"],
    }


def test_steps_before_and_after_the_change_can_be_replayed(
    runs: tuple[Run, Run, dict[str, str], str],
) -> None:
    first, _, _, _ = runs
    ended = drillyard("train", first.directory / "run.yaml", "--replay", LONG)
    assert (ended.returncode, ended.stdout.partition(":")[0]) == (0, "equal"), ended.stderr
