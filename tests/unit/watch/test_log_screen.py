"""Following the log of a launched workload."""

from __future__ import annotations

import io
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from rich.console import Console
from tests.facts import says

from drillyard.errors import UserError
from drillyard.hardware import catalog
from drillyard.measurement.user_facts import UserFacts
from drillyard.watch.log_screen import watch_log

STEPS = [
    f" [2026-01-31 12:00:{step:02}] iteration {step:8}/ 100 | consumed samples: {64 * step:12} |"
    " elapsed time per iteration (ms): 1000.0 | learning rate: 1.0E-04 | global batch size:    64"
    f" | lm loss: {5 / step:.6E} |\n".encode()
    for step in range(1, 20)
]


def watched(pieces: Iterator[bytes]) -> str:
    launcher = SimpleNamespace(logs=lambda run, selection: pieces)
    console = Console(width=120, file=io.StringIO(), record=True)
    watch_log(launcher, "tiny", console, UserFacts(num_gpus=8), catalog(), 0.05)
    return console.export_text()


def test_a_log_is_followed_until_the_run_is_over() -> None:
    text = watched(iter(STEPS))
    assert says(text, "19") and "Megatron" in text


def test_a_log_that_cannot_be_read_any_more_is_an_error() -> None:
    def broken() -> Iterator[bytes]:
        yield from STEPS[:5]
        raise UserError("the host is away")

    with pytest.raises(UserError, match="the host is away"):
        watched(broken())


@pytest.mark.parametrize("pieces", [[], [b"no step\n"], [b"one line\n"] * 3])
def test_a_log_without_steps_ends_with_the_command_that_shows_its_lines(
    pieces: list[bytes],
) -> None:
    assert says(watched(iter(pieces)), "drillyard runs logs tiny")
