"""Printed numbers are read as `float` reads them, in logs of many step lines too."""

from __future__ import annotations

import math
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.measurement.lines import write

from drillyard.measurement.formats.nemo import clock_seconds
from drillyard.measurement.formats.values import Value, half_unit, numbers, precisions
from drillyard.measurement.read_logs import read_logs

STEPS = 12_000
ODD = ["nan", "inf", "-inf", "1e300", "007.50", "5.", ".5"]


@given(
    st.lists(st.floats().map(repr) | st.sampled_from(ODD), min_size=1, max_size=20), st.booleans()
)
def test_numbers_and_precisions_of_a_group(printed: list[str], optional: bool) -> None:
    texts = [text.encode() for text in printed] + [None] * optional
    expected = np.array([float(text) if text else np.nan for text in texts]) * 1e-3
    np.testing.assert_array_equal(
        numbers(Value("loss", 1e-3), texts).view(np.int64), expected.view(np.int64)
    )
    halves = [half_unit(text) * 1e-3 if text else 0.0 for text in texts]
    np.testing.assert_allclose(precisions(texts, 1e-3), np.array(halves, np.float32))


def test_thousands_may_be_grouped_where_the_format_says_so() -> None:
    values = [round(10**place / 7) for place in range(2, 9)]
    texts = [f"{value:,}".encode() for value in values]
    assert numbers(Value("loss", commas=True), texts).tolist() == values
    with pytest.raises(ValueError, match="could not convert"):
        numbers(Value("loss"), texts)


@pytest.mark.parametrize(
    ("text", "half"), [(b"14.54", 0.005), (b"2e+3", 500), (b"nan", 0), (b"7", 0.5)]
)
def test_half_a_unit_of_the_last_digit(text: bytes, half: float) -> None:
    assert half_unit(text) == pytest.approx(half)


@given(st.integers(0, 400_000))
def test_clocks_of_bars_are_seconds(seconds: int) -> None:
    assert (
        clock_seconds(f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}".encode())
        == seconds
    )


def _line(kind: str, step: int, time: str, seconds: float, loss: str) -> str:
    if kind == "megatron":
        return (
            f" [{time}] iteration {step:8}/   25000 | consumed samples: {step * 128:12} | elapsed"
            f" time per iteration (ms): {seconds * 1e3:.1f} | throughput per GPU (TFLOP/s/GPU):"
            f" {300 / seconds:.1f} | global batch size: {128:5} | lm loss: {loss} | number of"
            " skipped iterations:   0 |"
        )
    if kind == "torchtitan":
        return (
            f"[titan] {time[:23].replace('.', ',')} - root - INFO - step: {step:2}  loss: {loss} "
            f" memory: 45.12GiB(57.01%)  tps: {int(5000 / seconds):,}  tflops: {300 / seconds:,.2f}"
            f"  mfu: {30 / seconds:.2f}%"
        )
    if kind == "nemo2":
        return (
            f"Training epoch 0, iteration {step}/30000 | global_batch_size: 512 | global_step:"
            f" {step} | reduced_train_loss: {loss} | train_step_timing in s: {seconds:.4f} |"
            f" consumed_samples: {step * 512}"
        )
    return (
        f"Step: {step} | Time: {seconds:.4f}s | TFLOPs/s/GPU: 500.1 | Tokens/s/GPU: 9000 | Loss:"
        f" {loss}"
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["megatron", "torchtitan", "nemo2", "perflogger"])
@pytest.mark.parametrize(
    "prefix", ["", "{rank}: ", "{time}Z [rank{rank}]: ", "[pod/job-0-{rank}/main] {time}000Z "]
)
def test_a_log_of_step_lines_gives_every_number_that_was_printed(
    kind: str, prefix: str, tmp_path: Path
) -> None:
    draw = random.Random(5)
    lines, losses, durations = [], [], []
    for step in range(1, STEPS + 1):
        time = (
            "2026-08-01"
            f" {12 + step // 3600:02}:{step // 60 % 60:02}:{step % 60:02}.{draw.randrange(10**6):06}"  # noqa: E501
        )
        seconds = round(
            draw.uniform(0.1, 1200) if draw.random() < 0.01 else draw.uniform(0.5, 0.6), 4
        )
        loss = (
            draw.choice(["nan", "inf", "NaN"])
            if draw.random() < 1e-3
            else f"{draw.uniform(0, 12):.6E}"
        )
        before = prefix.format(time=time.replace(" ", "T"), rank=step % 3)
        lines.append(f"{before}{_line(kind, step, time, seconds, loss)}\n")
        losses.append(float(loss))
        durations.append(np.nan if kind == "torchtitan" else seconds)
    log = read_logs([write(tmp_path / "run.log", "".join(lines))])
    assert log.steps.step.tolist() == list(range(1, STEPS + 1))
    np.testing.assert_array_equal(log.steps.loss, losses)
    np.testing.assert_allclose(log.steps.seconds, durations, rtol=1e-3 if kind == "megatron" else 0)
    assert log.ranks == ((0, 1, 2) if prefix else ())
    assert log.steps.has("time_us") == ("time" in prefix or kind in ("megatron", "torchtitan"))


@pytest.mark.parametrize("prefix", ["", "2026-08-01T12:00:00Z {rank}: "])
def test_a_log_of_redrawn_bars_gives_every_step(prefix: str, tmp_path: Path) -> None:
    text = "".join(
        (prefix.format(rank=step // 40 % 2) if step % 40 == 0 else "")
        + f"Epoch 0: : 7%|#| {step + 1}/30000"
        f" [{step // 3600:02}:{step // 60 % 60:02}:{step % 60:02}<00:00, reduced_train_loss=2.5,"
        f" global_step={float(step):.3g}, train_step_timing in s=0.5]"
        + ("\n" if step % 40 == 39 else "\r")
        for step in range(STEPS)
    )
    steps = read_logs([write(tmp_path / "run.log", text)]).steps
    assert dict(zip(steps.step.tolist(), steps.rank.tolist(), strict=True)) == {
        step: step // 40 % 2 if prefix else -1 for step in range(STEPS)
    }
    assert steps.elapsed_seconds.tolist() == list(range(STEPS))


@pytest.mark.parametrize(
    ("printed", "value"),
    [
        ("nan.0", math.nan),
        ("inf.0", math.inf),
        ("-inf.", -math.inf),
        ("-Infinity.0", -math.inf),
        ("2,5", 2.5),
        ("-0,25", -0.25),
        ("1,5e-3", 0.0015),
    ],
)
def test_numbers_that_float_does_not_read(printed: str, value: float) -> None:
    read = numbers(Value("loss"), [b"1.5", printed.encode()])
    assert read.tolist() == pytest.approx([1.5, value], nan_ok=True)


@pytest.mark.parametrize("printed", [b"nan.1", b"2,5,5", b"2.5,5", b",5", b"2,", b"nan,0"])
def test_what_is_no_number(printed: bytes) -> None:
    with pytest.raises(ValueError, match="could not convert"):
        numbers(Value("loss"), [printed])
