"""Logs are text of anybody: reading one takes time in proportion to its length, and bounded memory,
whatever it holds.

Time is the processor's, compared between two lengths of the same line. A quadratic pattern takes 64
times as long for eight times the length, each time; what takes under 50 ms is fast enough whatever
the ratio.
"""

from __future__ import annotations

import gc
import time
import tracemalloc
from collections.abc import Callable
from functools import partial

import pytest

from drillyard.loglines.blocks import LONGEST_LINE
from drillyard.loglines.prefixes import split_prefix
from drillyard.loglines.sources import LogFile
from drillyard.measurement.formats import BUILT_IN
from drillyard.measurement.formats.log_format import TextFormat
from drillyard.measurement.source_reader import TextSourceReader
from drillyard.supervise.cause import innermost_frame, last_words, speaks_of_lost_peer

TEXT_FORMATS = [kind for kind in BUILT_IN if issubclass(kind, TextFormat)]

FAST_SECONDS = 0.05
MAX_RATIO = 24
SHORT, LONG = 25_000, 200_000

ANCHORS = b"".join(kind.anchor for kind in TEXT_FORMATS)
LITERALS = b" ".join(sorted({note.literal for kind in TEXT_FORMATS for note in kind.rules}))
REPEATED = [
    b"0: ",
    b"1",
    b" ",
    b"{",
    b"[a1",
    b"[rank0]: ",
    b"(a, pid=1",
    b"2025-01-01T00:00:00Z ",
    b"1|",
    b"%||1/1 [1<",
    b"a: 1 | ",
    b"a ",
    b"Model ",
    b"capacity: ",
    b"Finished saving the checkpoint",
    b"successfully loaded checkpoint from ",
    b"validation loss at iteration 1",
    b"Total train batch size ",
    b"sync checkpoint save for step 1 (",
    b"Epoch 1: | 1/1 [1<",
    b'"event": "a"',
    b'DLLL {"PARAMETER"',
    b"{'loss': 1, ",
]


def read(text: bytes) -> TextSourceReader:
    reading = TextSourceReader(LogFile("hostile.log"), 0, None)
    reading.feed(text)
    reading.finish()
    return reading


def takes_linear_time(work: Callable[[int], object]) -> bool:
    """Whether `work` on a line of some length takes time in proportion to it, in one of three
    attempts: a busy machine makes one of two measurements slow now and then, but not a quadratic
    pattern fast. The garbage collector, whose time is that of all tests before, waits."""

    def seconds(length: int) -> float:
        gc.disable()
        try:
            started = time.process_time()
            work(length)
            return time.process_time() - started
        finally:
            gc.enable()

    return any(
        (long := seconds(LONG)) < FAST_SECONDS
        or long < MAX_RATIO * max(seconds(SHORT), FAST_SECONDS / MAX_RATIO)
        for _ in range(3)
    )


@pytest.mark.parametrize("repeated", REPEATED, ids=lambda text: text.decode().strip() or "blanks")
def test_a_line_of_anything_repeated_is_read_in_linear_time(repeated: bytes) -> None:
    """The line is met by every format's step pattern (through `ANCHORS`) and by every note's
    (through `LITERALS`)."""

    def read_line(before: bytes, after: bytes, length: int) -> None:
        read(before + repeated * (length // len(repeated)) + after + b"\n")

    for before, after in ((ANCHORS, LITERALS), (b"", ANCHORS)):
        assert takes_linear_time(partial(read_line, before, after))


@pytest.mark.parametrize(
    "repeated", [b"0: ", b"[a1", b"(a, pid=1", b"[rank0]: ", b"2025-01-01T00:00:00Z "]
)
def test_a_prefix_is_looked_for_in_the_first_bytes_of_a_line(repeated: bytes) -> None:
    *_, end = split_prefix(repeated * (LONG // len(repeated)))
    assert end <= 1024


def test_step_lines_that_all_differ_are_not_learned_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each is read by a pattern of its own, which takes a thousand times as long to make as to
    use."""
    monkeypatch.setattr("drillyard.measurement.formats.log_format._MOST_LEARNED", 100)
    keys = [
        str(number).translate(str.maketrans("0123456789", "abcdefghij")) for number in range(300)
    ]
    reading = read(
        "".join(
            f"iteration {i}/9 | {key}: 3 | loss: 1.0 |\n" for i, key in enumerate(keys)
        ).encode()
    )
    (megatron,) = [reader for reader, _ in reading._candidates if reader.format.name == "megatron"]
    assert megatron.step_lines == megatron._compiled == 100
    assert megatron.damaged == 200


def test_one_long_number_does_not_widen_the_column_of_all_lines() -> None:
    """Numbers of a block are converted as one array of texts, as wide as the longest: here 5 GB."""
    line = b"step: 1 loss: 1.0 memory: 1GiB(1%) tps: 1\n"
    text = line.replace(b"1.0", b"1" * 500_000) + line * ((LONGEST_LINE - 600_000) // len(line))
    tracemalloc.start()
    try:
        read(text)
        assert tracemalloc.get_traced_memory()[1] < 100 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "repeated",
    [
        "Step: 1 | Time: 1s | ",
        "error: ",
        "::",
        " ",
        "a.",
        "[F",
        "timed",
        'hread 0x1\n  File "',
        "[rank0]: ",
    ],
)
def test_what_a_rank_prints_is_searched_in_linear_time(repeated: str) -> None:
    def search(length: int) -> None:
        text = repeated * (length // len(repeated))
        speaks_of_lost_peer(last_words(text))
        last_words("terminate called after throwing an instance of '" + text)
        innermost_frame(text)

    assert takes_linear_time(search)
