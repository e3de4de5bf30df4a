"""Lines read as a matrix of characters give what the pattern and `float` give, to the bit, or are left to them."""

from __future__ import annotations

import random
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.measurement.lines import write

from drillyard.measurement.formats import grid
from drillyard.measurement.formats.grid import Cells, Templates
from drillyard.measurement.formats.nemo1 import clocks
from drillyard.measurement.formats.text_format import NUMBER, StepLineReader
from drillyard.measurement.formats.values import Value, half_unit, numbers, precisions
from drillyard.measurement.parsed_log import Steps
from drillyard.measurement.read_logs import read_logs

VALUE = re.compile(rb"^at (\S+) a: *%s *\| b: *%s *\|(?: c: %s)?[^\n]*+\n" % (NUMBER, NUMBER, NUMBER))
FORMATS = [".2f", ".6f", ".3e", ".6E", "d", "6d", "+.1f", ".17g", ".0f", "g"]


def cells_of(lines: list[str], pattern: re.Pattern[bytes] = VALUE) -> list[Cells] | None:
    return Templates(pattern.match).read("".join(f"{line}\n" for line in lines).encode(), len(lines))


def texts_of(lines: list[str], group: int) -> list[bytes | None]:
    matches = [VALUE.match(f"{line}\n".encode()) for line in lines]
    return [match[group + 1] for match in matches if match is not None]


@settings(max_examples=60, deadline=None)
@given(
    st.tuples(*[st.sampled_from(FORMATS)] * 3),
    st.integers(0, 2**32),
    st.sampled_from([1.0, 1e-30, 1e30, 1e6, 123456789012345.0]),
    st.sampled_from([["nan", "inf", "-inf"], ["1e300", "007.50", "5.", ".5"], []]),
)
def test_values_are_those_of_the_pattern_and_of_float(
    formats: tuple[str, ...], seed: int, size: float, odd: list[str]
) -> None:
    draw = random.Random(seed)

    def printed(format: str) -> str:
        value = (draw.random() - 0.3) * size
        return odd[draw.randrange(len(odd))] if odd and draw.random() < 0.05 else f"{_like(value, format):{format}}"

    lines = []
    for row in range(300):
        last = f" c: {printed(formats[2])}" if row % 7 else ""
        lines.append(f"at {row:03} a: {printed(formats[0])} | b: {printed(formats[1])} |{last}")
    groups = cells_of(lines)
    if groups is None:
        return
    for index, cells in enumerate(groups):
        texts = texts_of(lines, index)
        assert list(cells) == texts
        assert [cells[0], cells[-1], len(cells)] == [texts[0], texts[-1], 300]
        expected = np.array([float(text) if text else np.nan for text in texts])
        got = numbers(Value("loss", 1e-3), cells)
        np.testing.assert_array_equal(got.view(np.int64), (expected * 1e-3).view(np.int64))
        halves = [half_unit(text) * 1e-3 if text else 0.0 for text in texts]
        np.testing.assert_allclose(precisions(cells, 1e-3), np.array(halves, np.float32), rtol=3e-7)


def _like(value: float, format: str) -> Any:
    return int(value) if format.endswith("d") else value


def test_numbers_printed_alike_are_read_from_their_digits_alone() -> None:
    lines = [f"at {row:03} a: {row / 7:.6E} | b: -{row * 11:06.2f} | c: {row}" for row in range(100)]
    groups = cells_of(lines)
    assert groups is not None
    for cells in groups:
        assert cells.numbers(integer=False, commas=False) is not None
        assert "_texts" not in vars(cells)
    steps = groups[0].numbers(integer=True, commas=False)
    assert steps is not None and steps.dtype == np.int64 and steps.tolist() == list(range(100))


def test_thousands_may_be_grouped_where_the_format_says_so() -> None:
    pattern = re.compile(rb"^tps: ([\d,.]+)\n")
    values = [round(10**place / 7) for place in range(2, 9) for _ in range(40)]
    groups = cells_of([f"tps: {value:,}" for value in values], pattern)
    assert groups is not None
    assert numbers(Value("loss", commas=True), groups[0]).tolist() == values
    with pytest.raises(ValueError, match="could not convert"):
        numbers(Value("loss"), groups[0])


def test_digits_that_the_pattern_insists_on_are_not_free() -> None:
    pattern = re.compile(rb"^v2 \[1\d{3}\] step (\d+)\n")
    lines = [f"v2 [1{row:03}] step {row:03}" for row in range(200)]
    groups = cells_of(lines, pattern)
    assert groups is not None and list(groups[0]) == [b"%03d" % row for row in range(200)]
    for other in ("v3 [1007] step 007", "v2 [2007] step 007", "v2 [1007] step 0x7", "v2 [1007] Step 007"):
        assert cells_of([*lines, other], pattern) is None


def test_other_lines_widths_and_counts_are_left_to_the_pattern() -> None:
    lines = [f"at {row:03} a: {row:.2f} | b: 1 |" for row in range(100)]
    templates = Templates(VALUE.match)
    text = "".join(f"{line}\n" for line in lines).encode()
    assert templates.read(text, 100) is not None
    assert templates.read(text, 99) is None
    assert templates.read(text + b"else\n", 101) is None
    assert templates.read(text + b"at 1 a: 1 | b: " + b"1" * 5000 + b" |\n", 101) is None
    assert templates.read(text, 100) is not None
    nul = "".join(f"at \0{row:03} a: 1 | b: 1 |\n" for row in range(100)).encode()
    assert Templates(VALUE.match).read(nul, 100) is None


def test_a_log_of_too_many_templates_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(0)
    lines = [f"at {row} a: {draw.random():.{row % 13}e} | b: {draw.random():.{row % 12}f} |" for row in range(2000)]
    templates = Templates(VALUE.match)
    text = "".join(f"{line}\n" for line in lines).encode()
    templates.read(text, 2000)
    monkeypatch.setattr(grid.np, "flatnonzero", lambda _: pytest.fail("looked again"))
    assert templates.read(text, 2000) is None


def _log(kind: str, prefix: str) -> str:
    draw = random.Random(5)
    lines = []
    for step in range(1, 25_001):
        time = f"2026-08-01 {12 + step // 3600:02}:{step // 60 % 60:02}:{step % 60:02}.{draw.randrange(10**6):06}"
        seconds = draw.uniform(0.1, 1200) if draw.random() < 0.01 else draw.uniform(0.5, 0.6)
        loss = draw.choice(["nan", "inf", "NaN"]) if draw.random() < 1e-4 else f"{draw.uniform(0, 12):.6E}"
        if kind == "megatron":
            line = (
                f" [{time}] iteration {step:8}/   25000 | consumed samples: {step * 128:12} | elapsed time per "
                f"iteration (ms): {seconds * 1e3:.1f} | throughput per GPU (TFLOP/s/GPU): {300 / seconds:.1f} | "
                f"learning rate: {10 ** draw.uniform(-9, 0):.6E} | global batch size: {128:5} | lm loss: {loss} | "
                f"loss scale: 1.0 | grad norm: {draw.random():.3f} | number of skipped iterations: "
                f"{int(draw.random() < 1e-3):3} |"
            )
        elif kind == "torchtitan":
            line = (
                f"[titan] {time[:23].replace('.', ',')} - root - INFO - step: {step:2}  loss: {float(loss):8.5f}  "
                f"grad_norm: {draw.random():7.4f}  memory: {draw.uniform(0, 99):5.2f}GiB({draw.uniform(0, 99):.2f}%)  "
                f"tps: {int(5000 / seconds):,}  tflops: {300 / seconds:,.2f}  mfu: {30 / seconds:.2f}%"
            )
        elif kind == "nemo2":
            line = (
                f"Training epoch 0, iteration {step}/30000 | lr: {draw.random():.3e} | global_batch_size: 512 | "
                f"global_step: {step} | reduced_train_loss: {float(loss):.4g} | train_step_timing in s: "
                f"{seconds:.4g} | consumed_samples: {step * 512}"
            )
        else:
            line = (
                f"Step: {step} | Time: {seconds:.2f}s | TFLOPs/s/GPU: {300 / seconds:.1f} | "
                f"Tokens/s/GPU: {5000 / seconds:.0f} | Loss: {float(loss):.4f}"
            )
        lines.append(prefix.format(time=time.replace(" ", "T"), rank=step % 3) + line + "\n")
    return "".join(lines)


@pytest.mark.parametrize("kind", ["megatron", "torchtitan", "nemo2", "perflogger"])
@pytest.mark.parametrize("prefix", ["", "{rank}: ", "{time}Z [rank{rank}]: ", "[pod/job-0-{rank}/main] {time}000Z "])
def test_a_log_of_step_lines_reads_the_same_without_the_grid(
    kind: str, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "run.log", _log(kind, prefix))
    used: list[bool] = []
    plain = Templates.read

    def watched(self: Templates, text: bytes, lines: int) -> list[Cells] | None:
        cells = plain(self, text, lines)
        used.append(cells is not None)
        return cells

    monkeypatch.setattr(Templates, "read", watched)
    fast = read_logs([path])
    assert used and all(used)
    monkeypatch.setattr(Templates, "read", lambda self, text, lines: None)
    slow = read_logs([path])
    assert len(fast.steps) == len(slow.steps) > 8000
    assert (fast.warnings, fast.sources) == (slow.warnings, slow.sources)
    for column in fields(Steps):
        np.testing.assert_array_equal(getattr(fast.steps, column.name), getattr(slow.steps, column.name), column.name)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 400_000), min_size=1, max_size=40), st.sampled_from(["{:02}:{:02}:{:02}", "{1:02}:{2:02}"])
)
def test_clocks_of_bars_are_seconds(seconds: list[int], format: str) -> None:
    if format.startswith("{1"):
        seconds = [second % 3600 for second in seconds]
    texts = [format.format(second // 3600, second // 60 % 60, second % 60).encode() for second in seconds]
    assert clocks(texts).tolist() == seconds
    assert clocks([*texts, b"1:02", None]).tolist() == [*seconds, 62, 0]


@pytest.mark.parametrize("prefix", ["", "2026-08-01T12:00:00Z {rank}: "])
def test_a_log_of_bars_reads_the_same_line_by_line(
    prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(3)
    text = "".join(
        (prefix.format(rank=step // 40 % 2) if step % 40 == 0 else "")
        + f"Epoch 0: : 7%|#| {step + 1}/30000 [{step // 3600:02}:{step // 60 % 60:02}:{step % 60:02}<00:00, "
        f"reduced_train_loss={draw.random():.3g}, global_step={float(step):.3g}, "
        f"train_step_timing in s={draw.random():.3g}]" + ("\n" if step % 40 == 39 else "\r")
        for step in range(30_000)
    )
    path = write(tmp_path / "run.log", text)
    dense: list[bool] = []
    plain = StepLineReader._feed_dense

    def watched(self: StepLineReader, block: Any) -> bool:
        dense.append(plain(self, block))
        return dense[-1]

    monkeypatch.setattr(StepLineReader, "_feed_dense", watched)
    fast = read_logs([path])
    # Where lines begin with a launcher's prefix, the drawings after the first one have another layout.
    assert any(dense) == (not prefix)
    monkeypatch.setattr(StepLineReader, "_feed_dense", lambda self, block: False)
    slow = read_logs([path])
    ranks = dict(zip(fast.steps.step.tolist(), fast.steps.rank.tolist(), strict=True))
    assert ranks == {step: step // 40 % 2 if prefix else -1 for step in range(30_000)}
    assert fast.sources == slow.sources and fast.warnings == slow.warnings
    for column in fields(Steps):
        np.testing.assert_array_equal(getattr(fast.steps, column.name), getattr(slow.steps, column.name), column.name)
