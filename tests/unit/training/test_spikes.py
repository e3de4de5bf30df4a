"""Steps that stand out are found in every step and reported with their samples; an ordinary
training has none."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drillyard.config.run import RunConfig
from drillyard.data.sampler import BatchShape, Mixture
from drillyard.telemetry import RunLog
from drillyard.training.spikes import (
    FIRST_JUDGED,
    SIGMA_PER_MAD,
    WINDOW,
    Anomaly,
    RecentSteps,
    RobustWindow,
    SpikeDetector,
    SpikeReporter,
    StepFigures,
)


def training_curve(
    steps: int, seed: int, warmup: int = 100, noise: float = 0.02
) -> Iterator[StepFigures]:
    """A loss that falls by a power of the step, a gradient norm that rises in the warm-up and then
    falls; noisy."""
    generator = random.Random(seed)
    for step in range(1, steps + 1):
        loss = (1.7 + 9.0 * (step + 5) ** -0.4) * math.exp(generator.gauss(0, noise))
        rise = 1.0 + min(step, warmup) / warmup
        yield StepFigures(
            step,
            loss,
            rise * (0.3 + 4 * (step + 3) ** -0.5) * math.exp(generator.gauss(0, 8 * noise)),
        )


def anomalies(
    figures: Iterator[StepFigures] | list[StepFigures], warmup: int = 100
) -> list[Anomaly]:
    detector = SpikeDetector(warmup)
    return [anomaly for each in figures for anomaly in detector.judge(each)]


@pytest.mark.parametrize("noise", [0.0, 0.001, 0.02, 0.1])
@pytest.mark.parametrize("warmup", [1, 100, 1000])
def test_an_ordinary_training_has_no_spikes(warmup: int, noise: float) -> None:
    assert anomalies(training_curve(6000, 1, warmup, noise), warmup) == []


def test_a_spike_is_reported_with_the_level_it_is_against() -> None:
    figures = list(training_curve(600, 2))
    usual = float(np.median([each.loss for each in figures[500 - WINDOW : 500]]))
    figures[500] = StepFigures(501, 1.5 * usual, figures[500].grad_norm)
    (found,) = anomalies(figures)
    assert (found.kind, found.figures) == ("loss_spike", figures[500])
    assert found.median == pytest.approx(usual, rel=1e-2)
    assert found.limit is not None
    assert usual < found.limit < 1.5 * usual


def test_a_gradient_may_spike_without_its_loss() -> None:
    figures = list(training_curve(600, 3))
    figures[300] = StepFigures(301, figures[300].loss, 20 * figures[300].grad_norm)
    (found,) = anomalies(figures)
    assert (found.kind, found.figures.step) == ("gradient_spike", 301)


def test_a_second_spike_is_found_beside_the_first() -> None:
    figures = list(training_curve(600, 4))
    for index in (400, 401, 404):
        figures[index] = StepFigures(index + 1, 3 * figures[index].loss, figures[index].grad_norm)
    assert [found.figures.step for found in anomalies(figures)] == [401, 402, 405]


def test_a_level_that_stays_is_the_new_usual() -> None:
    figures = list(training_curve(1000, 5))
    raised = [
        StepFigures(each.step, each.loss + (each.step > 500), each.grad_norm) for each in figures
    ]
    steps = [found.figures.step for found in anomalies(raised)]
    assert steps[:3] == [501, 502, 503]
    assert steps[-1] <= 501 + WINDOW // 2


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_steps_are_distinguished_from_the_first_on_and_change_no_level(
    value: float,
) -> None:
    figures = list(training_curve(300, 6))
    clean = SpikeDetector(100)
    for each in figures:
        list(clean.judge(each))
    broken = [
        StepFigures(1, value, 1.0),
        *figures[1:200],
        StepFigures(201, 2.0, value),
        *figures[201:],
    ]
    found = anomalies(broken)
    assert [(each.kind, each.figures.step) for each in found] == [
        ("nonfinite_step", 1),
        ("nonfinite_step", 201),
    ]
    assert found[0].median is None


def test_nothing_is_judged_before_enough_was_seen() -> None:
    figures = [
        StepFigures(step, 1.0 if step % 5 else 100.0, 1.0) for step in range(1, FIRST_JUDGED + 1)
    ]
    assert anomalies(figures, warmup=1) == []


@settings(max_examples=100)
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=400))
def test_the_window_is_that_of_the_definition(values: list[float]) -> None:
    window = RobustWindow()
    for number, value in enumerate(values, 1):
        window.add(value)
        recent = sorted(values[max(0, number - WINDOW) : number])
        median = recent[len(recent) // 2]
        distances = sorted(abs(other - median) for other in recent)
        assert window.median() == median
        assert window.deviation() == SIGMA_PER_MAD * distances[len(distances) // 2]
        assert len(window) == min(number, WINDOW)


def test_every_step_since_the_last_read_is_there_in_order() -> None:
    recent = RecentSteps(5, torch.device("cpu"))
    for step in range(23):
        recent.keep(
            step,
            torch.tensor(float(step), dtype=torch.float64),
            torch.tensor(step / 3, dtype=torch.float64),
        )
        values = recent.values.flatten().tolist()
        for count in range(1, min(step + 1, 5) + 1):
            message = recent.of(values, step, count)
            assert message == [
                StepFigures(s + 1, float(s), s / 3) for s in range(step + 1 - count, step + 1)
            ]


class Source:
    """A stand-in for the sequences of a source: a name, a key and a number."""

    def __init__(self, name: str, size: int) -> None:
        self.name, self.key, self.size = name, name, size

    def __len__(self) -> int:
        return self.size


def watch(directory: Path, config: RunConfig, batch: int = 6) -> tuple[SpikeReporter, RunLog]:
    sources: Any = [Source("a", 50), Source("b", 30)]
    log = RunLog(directory, rank=0, config=config, console="none")
    return SpikeReporter(
        log, directory, Mixture(sources, [3, 1], 0), BatchShape(batch, 1, 1), warmup_steps=0
    ), log


@pytest.fixture
def config() -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": "test",
            "model": {"config": {"architecture": "llama"}, "init": "random"},
            "data": {"source": "builtin:python-stdlib", "sequence_length": 64, "tokenizer": "t"},
            "training": {"steps": 1000, "optimizer": {"learning_rate": 1e-3}},
            "logging": {"tensorboard": False},
        }
    )


def events(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "events.jsonl").read_text().splitlines()]


def test_the_event_names_the_samples_of_the_batch(tmp_path: Path, config: RunConfig) -> None:
    figures = list(training_curve(300, 7))
    figures[249] = StepFigures(250, 30.0, math.nan)
    figures[250] = StepFigures(251, 30.0, figures[250].grad_norm)
    spikes, log = watch(tmp_path, config)
    for first in range(0, 300, 20):  # as a run reads them that logs every 20 steps
        spikes.examine(figures[first : first + 20])
    log.close()
    bad, spike = events(tmp_path)
    assert (bad["event"], bad["step"], bad["grad_norm"]) == ("nonfinite_step", 250, None)
    assert bad["nonfinite"]["grad_norm"] == "nan"
    assert (spike["event"], spike["step"], spike["num_samples"]) == ("loss_spike", 251, 6)
    assert spike["median"] < spike["limit"] < spike["loss"]
    named = [(name, index) for name, indices in spike["samples"].items() for index in indices]
    expected = [("ab"[source], index) for source, index in spikes.data.indices(250, BatchShape(6))]
    assert sorted(named) == sorted(expected)


def test_the_level_survives_a_restart(tmp_path: Path, config: RunConfig) -> None:
    figures = list(training_curve(220, 8))
    lines = [
        json.dumps({"step": each.step, "loss": each.loss, "grad_norm": each.grad_norm})
        for each in figures
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 221, "lo')
    spikes, log = watch(tmp_path, config)
    spikes.examine([StepFigures(201, 4 * figures[200].loss, figures[200].grad_norm)])
    log.close()
    (spike,) = events(tmp_path)
    assert (spike["event"], spike["step"]) == ("loss_spike", 201)
    median = float(np.median([each.loss for each in figures[200 - WINDOW : 200]]))
    assert spike["median"] == pytest.approx(median, rel=1e-2)
