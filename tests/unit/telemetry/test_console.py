"""Console lines: the PerfLogger's shape, readable by its readers and by ours, at every
magnitude."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drillyard.telemetry.console import (
    count,
    format_evaluation_line,
    format_parameters_line,
    format_step_line,
    significant,
)

# What readers of the PerfLogger in the field look for.
NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
PERF_LOGGER = re.compile(
    rf"Step:\s*(\d+)\s*\|\s*Time:\s*({NUMBER})s\s*\|\s*TFLOPs/s/GPU:\s*({NUMBER})\s*\|\s*Tokens/s/GPU:\s*({NUMBER})"
    rf"\s*\|\s*Loss:\s*({NUMBER}|nan|inf)",
    re.I,
)


def step(**fields) -> dict:
    return {
        "step": 5,
        "step_seconds": 14.54,
        "tflops_per_gpu": 954.018,
        "tokens_per_second_per_gpu": 2253.645,
        "loss": 0.662,
    } | fields


def test_the_line_of_the_worked_example():
    line = "Step: 5 | Time: 14.54s | TFLOPs/s/GPU: 954.0 | Tokens/s/GPU: 2254 | Loss: 0.6620"
    assert format_step_line(step()) == line


def test_the_parameters_line_names_count_and_formula():
    assert (
        format_parameters_line(70_553_706_496, "6N", 423.322e9)
        == "[PerfLogger] Using 70.55B parameters for TFLOPs calculation. Formula 6N: 423.3 GFLOPs"
        " per token."
    )


positive = st.floats(1e-9, 1e12)


@given(positive)
def test_numbers_carry_four_significant_digits_and_no_exponent(value):
    text = significant(value)
    assert re.fullmatch(r"\d+(\.\d+)?", text)
    assert float(text) == pytest.approx(value, rel=0.5001e-3)


@given(
    st.integers(0, 10**9),
    positive,
    positive,
    positive,
    st.floats(0, 1e9) | st.sampled_from([math.nan, math.inf]),
)
def test_every_step_line_is_read_by_readers_of_the_perf_logger(
    number, seconds, tflops, tokens, loss
):
    line = format_step_line(
        step(
            step=number,
            step_seconds=seconds,
            tflops_per_gpu=tflops,
            tokens_per_second_per_gpu=tokens,
            loss=loss,
        )
    )
    match = PERF_LOGGER.search(line)
    assert match is not None, line
    assert int(match[1]) == number
    assert float(match[2]) == pytest.approx(seconds, rel=0.5001e-3)
    assert float(match[5]) == pytest.approx(loss, rel=0.5001e-3, abs=0.5001e-4, nan_ok=True)


def test_an_evaluation_is_reported_by_part_with_its_headlines():
    results = {
        "sql": {"loss": 0.51234, "sql_execution": 0.985, "tokens": 9},
        "other": {"questions": 200, "note": "x"},
    }
    assert format_evaluation_line(50, results).splitlines() == [
        "Evaluation after step 50",
        "  sql | Loss: 0.5123 | SQL execution accuracy: 98.5%",
        "  other | questions 200",
    ]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (70_553_706_496, "70.55B"),
        (493_000_000, "493.00M"),
        (1_400, "1.40K"),
        (512, "512"),
        (1.2e12, "1.20T"),
    ],
)
def test_counts_in_short(value, text):
    assert count(value) == text
