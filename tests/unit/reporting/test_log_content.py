"""A report from the log of another framework: what `drillyard metrics` measured, in curves."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import numpy as np
import pytest

from drillyard.measurement.read_logs import read_logs
from drillyard.measurement.run_result import measure
from drillyard.measurement.user_facts import UserFacts
from drillyard.reporting.charts import charts
from drillyard.reporting.log_content import measured_content
from drillyard.reporting.page import render

STEPS, STALLED = 60, {20: 80.0}
ASKED = UserFacts(
    accelerator="b200",
    num_gpus=16,
    params=70_550_000_000,
    batch_size_per_gpu=8,
    sequence_length=4096,
    price_per_gpu_hour=8.05,
)


def seconds_of(step):
    return 27.0 if step == 1 else STALLED.get(step, 14.5 + 0.02 * (step % 5))


def write_log(path, *, stamps=True):
    """Lines of the PerfLogger, behind a time stamp of kubectl."""
    moment = datetime(2026, 3, 1, 8, tzinfo=UTC)
    lines = []
    for step in range(1, STEPS + 1):
        seconds = seconds_of(step)
        moment += timedelta(seconds=seconds)
        stamp = f"{moment:%Y-%m-%dT%H:%M:%S.%f}000Z " if stamps else ""
        rate = 8 * 4096 / seconds
        rates = f"TFLOPs/s/GPU: {rate * 6 * 70.55e9 / 1e12:.1f} | Tokens/s/GPU: {rate:.0f}"
        lines.append(f"{stamp}Step: {step} | Time: {seconds:.2f}s | {rates} | Loss: {3 / step:.4f}")
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    return measure(read_logs([write_log(tmp_path_factory.mktemp("logs") / "run.log")]), ASKED)


@pytest.fixture(scope="module")
def content(result):
    return measured_content(result)


def test_curves_are_the_log_s_steps_and_rates_follow_from_each_step(content, result):
    curves = content.curves
    assert curves.step.tolist() == list(range(1, STEPS + 1))
    assert curves.loss.tolist() == [float(f"{3 / step:.4f}") for step in range(1, STEPS + 1)]
    assert curves.step_seconds.tolist() == [
        pytest.approx(seconds_of(step)) for step in range(1, STEPS + 1)
    ]
    assert np.allclose(curves.tokens_per_second_per_gpu, 8 * 4096 / curves.step_seconds)
    assert np.allclose(curves.mfu, curves.tokens_per_second_per_gpu * 6 * 70.55e9 / 2250e12)
    assert curves.step[curves.stalls].tolist() == list(STALLED)
    assert bool(curves.warm_up[0]) and not curves.warm_up[-1]


def test_figures_are_those_of_the_measurement(content, result):
    tiles = {tile.label: tile.value for tile in content.tiles}
    assert tiles["Step time"] == f"{result.timing.times.p50:.2f} s"
    assert tiles["MFU"] == f"{result.speed.mfu:.1%}"
    assert tiles["Cost"] == f"${result.cost.so_far:.2f}"
    assert content.goodput == result.goodput.seconds()
    assert content.status == "PerfLogger"


def test_what_a_log_does_not_say_is_listed_with_its_flag(tmp_path):
    content = measured_content(measure(read_logs([write_log(tmp_path / "run.log", stamps=False)])))
    assert not content.goodput
    text = "\n".join(content.missing)
    assert "goodput" in text and "--price-per-gpu-hour" in text and "--accelerator" in text
    assert {chart.name for chart in charts(content)} == {"loss", "step-time", "tokens", "tflops"}
    page = render(content)
    assert "Where the time went" not in page and "--price-per-gpu-hour" in page


def test_the_page_says_what_the_log_is_called_and_not_where_it_lies(content):
    assert content.title == "run.log"
    assert "<h1>run.log" in render(content)
