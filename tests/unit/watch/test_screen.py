"""The watch's screen fits its window and says what is known, at any moment of a run."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from tests.unit.reporting import runs
from tests.unit.watch.test_live_run import followed, index_of

from drillyard.reporting.gpu_price import GpuPrice
from drillyard.telemetry.events import read_events
from drillyard.watch.live_run import LiveRun
from drillyard.watch.screen import progress_line, screen, sparkline, text_lines


def shown(run, width=80, height=23, now_us=None, unicode=True):
    console = Console(
        width=width, height=height, color_system=None, legacy_windows=False, force_terminal=True
    )
    with console.capture() as capture:
        now = now_us if now_us is not None else run.last_us or 0
        console.print(
            screen(run, now, width=width, height=height, hint="q leaves", unicode=unicode)
        )
    return capture.get().splitlines()


@pytest.mark.parametrize(("width", "height"), [(80, 23), (80, 24), (100, 30), (200, 48)])
def test_a_screen_fills_its_window_and_no_more(run_directory, width, height):
    lines = shown(followed(run_directory), width, height)
    assert len(lines) == height
    assert all(len(line) <= width for line in lines)


def test_a_screen_fits_80_by_24_at_every_moment_of_a_run(run_directory):
    for until in range(1, len(read_events(run_directory)), 11):
        lines = shown(followed(run_directory, until))
        assert len(lines) == 23 and all(len(line) <= 80 for line in lines), until


def test_a_screen_says_what_is_known(run_directory):
    run = followed(run_directory, index_of(run_directory, "evaluation", 1))
    run.price = GpuPrice(8.05, "as given")
    text = "\n".join(shown(run))
    for part in (
        *("trial  running", "16 GPUs (b200)", "step 80 of 160  50.0%", " left, until "),
        *("Step time 14.53 s", "per GPU", "MFU       42.4% (6N)", "141.5 GiB per GPU"),
        *(
            "Goodput ",
            "Cost     $",
            "/M tokens",
            "Held out SQL 40.0%, questions",
            "Restarts 0 (0 failures)",
        ),
        *("Evaluation: questions: loss", "step 60", "lowest", "q leaves"),
    ):
        assert part in text, part


def test_a_run_that_has_not_begun_has_a_screen():
    lines = shown(LiveRun("trial"))
    assert len(lines) == 23
    assert "no step yet" in "\n".join(lines)


def test_a_silent_run_is_called_so(run_directory):
    run = followed(run_directory, index_of(run_directory, "step", 20))
    assert "silent for 5:00 min" in shown(run, now_us=run.last_us + 300_000_000)[0]


def test_a_terminal_without_unicode_gets_stars(run_directory):
    lines = shown(followed(run_directory), unicode=False)
    assert any("**" in line for line in lines)
    assert not any("⠀" <= character <= "⣿" for line in lines for character in line)


def test_the_lines_without_a_terminal_say_the_same(run_directory):
    run = followed(run_directory)
    run.price = GpuPrice(8.05, "as given")
    line = progress_line(run, run.last_us)
    for part in (
        "step 160 of 160",
        f"loss {runs.loss_of(160):.4f}",
        "14.53 s a step",
        "tokens/s/GPU",
        "MFU 42.4%",
        "$",
    ):
        assert part in line, part
    assert text_lines(run, run.last_us)[0] == "Run        trial: completed, step 160 of 160"


VALUES = st.lists(st.floats(-1e3, 1e3) | st.just(math.nan), max_size=200)


@given(VALUES, st.integers(1, 60), st.integers(1, 10), st.booleans())
def test_a_sketch_has_its_size_and_touches_top_and_bottom(values, width, height, unicode):
    lines = sparkline(values, width, height, unicode=unicode)
    assert [len(line) for line in lines] == [width] * height
    finite = [value for value in values if math.isfinite(value)]
    columns = 2 * width if unicode else width
    if len(finite) == len(values) and 0 < len(values) <= columns:
        assert set(lines[-1]) - {"⠀", " "}
        if max(finite) > min(finite) and len(values) > 1 and columns > 1:
            assert set(lines[0]) - {"⠀", " "}


def test_a_sketch_falls_with_its_values():
    assert sparkline([3.0, 2.0, 1.0, 0.0], 2, 1) == ["⠑⢄"]
    assert sparkline([4.0, 3.0, 2.0, 1.0], 4, 4, unicode=False) == ["*   ", " *  ", "  * ", "   *"]
    assert sparkline([], 3, 1) == ["⠀⠀⠀"]
