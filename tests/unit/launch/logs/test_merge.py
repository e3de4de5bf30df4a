"""Merged logs: every line once, in order within its log, by time across logs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import UTC, datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.module_time import set_time

from drillyard.launch.logs.merge import LONGEST_LINE, LogMerge, LogSource, StampKeys, key_of

NOON = 1_763_985_600_000_000  # 2025-11-24T12:00:00Z


def merged(streams: Iterable[tuple[bytes, Iterable[bytes]]]) -> Iterator[bytes]:
    """Merge streams, each a prefix and blocks of bytes, into pieces of whole lines.

    A stream's next block is read only when its lines are used up.
    """
    merge = LogMerge()
    reading = [
        (merge.add(LogSource(number, prefix)), iter(blocks))
        for number, (prefix, blocks) in enumerate(streams)
    ]
    while reading:
        for source, blocks in reading:
            while not source.held_lines and not source.ended:
                block = next(blocks, None)
                if block is None:
                    source.finish()
                else:
                    source.feed(block)
        reading = [(source, blocks) for source, blocks in reading if not source.ended]
        if piece := merge.final():
            yield piece
    if piece := merge.final():
        yield piece


def stamped(second: int, text: bytes) -> bytes:
    return key_of(NOON + second * 1_000_000) + text


def cut(data: bytes, size: int) -> Iterator[bytes]:
    for begin in range(0, len(data), size):
        yield data[begin : begin + size]


def merge_of(*logs: bytes, size: int = 7) -> bytes:
    return b"".join(merged([(b"%d: " % number, cut(log, size)) for number, log in enumerate(logs)]))


TEXTS = st.binary(max_size=12).map(lambda text: text.replace(b"\n", b""))
LINES = st.tuples(st.one_of(st.none(), st.integers(0, 5)), TEXTS).map(
    lambda line: line[1] if line[0] is None else stamped(line[0], line[1])
)
LOGS = st.lists(st.lists(LINES, max_size=12), min_size=1, max_size=4)


@settings(max_examples=60)
@given(LOGS, st.integers(1, 40), st.booleans())
def test_a_merged_log_is_a_permutation_of_its_lines_that_keeps_the_order_of_each_log(
    logs: list[list[bytes]], size: int, ended: bool
) -> None:
    texts = [b"\n".join(lines) + (b"\n" if lines and ended else b"") for lines in logs]
    # A log whose last line is empty and has no end has one line less.
    expected = [
        text.split(b"\n")[: -1 if text.endswith(b"\n") or not text else None] for text in texts
    ]

    lines = merge_of(*texts, size=size).split(b"\n")

    assert lines.pop() == b""
    for number, log in enumerate(expected):
        prefix = b"%d: " % number
        assert [line[len(prefix) :] for line in lines if line.startswith(prefix)] == log
    assert len(lines) == sum(map(len, expected))


@settings(max_examples=60)
@given(
    st.lists(st.lists(st.integers(0, 50)).map(sorted), min_size=1, max_size=5), st.integers(1, 200)
)
def test_stamps_that_rise_in_every_log_rise_in_the_merged_one_and_equal_ones_are_in_order_of_logs(
    times: list[list[int]], size: int
) -> None:
    logs = [
        b"".join(stamped(second, b"%d\n" % place) for place, second in enumerate(log))
        for log in times
    ]

    lines = merge_of(*logs, size=size).split(b"\n")[:-1]

    message = [(line[3:31], int(line[:1]), int(line[31:])) for line in lines]
    assert message == sorted(message)


@settings(max_examples=60)
@given(
    st.lists(st.lists(LINES, max_size=8), min_size=1, max_size=3),
    st.integers(1, 50),
    st.integers(51, 500),
)
def test_the_order_does_not_depend_on_the_pieces_in_which_logs_come(
    logs: list[list[bytes]], small: int, large: int
) -> None:
    texts = [b"\n".join(lines) for lines in logs]

    assert merge_of(*texts, size=small) == merge_of(*texts, size=large)


def test_a_line_without_a_stamp_stays_with_the_line_before_it() -> None:
    first = stamped(1, b"Traceback\n") + b"  File x\n" + b"ValueError\n" + stamped(4, b"end\n")
    second = stamped(2, b"other\n")

    texts = [line.removeprefix(b"0: ")[-10:] for line in merge_of(first, second).split(b"\n")[:3]]
    assert texts == [b" Traceback", b"  File x", b"ValueError"]


def test_a_clock_that_was_set_back_reorders_nothing_within_its_log() -> None:
    back = stamped(5, b"a\n") + stamped(1, b"b\n") + stamped(6, b"c\n")

    assert [
        line[-1:] for line in merge_of(back, stamped(3, b"x\n"), size=1000).split(b"\n")[:-1]
    ] == [
        b"x",
        b"a",
        b"b",
        b"c",
    ]


def test_a_last_line_without_an_end_gets_one() -> None:
    assert merge_of(stamped(1, b"whole\n") + stamped(2, b"cut of")).endswith(b"cut of\n")


def test_garbage_passes_through() -> None:
    garbage = bytes(range(256)).replace(b"\n", b"") + b"\n\r\n\x00\n"

    assert merge_of(garbage, size=100).replace(b"0: ", b"") == garbage


def test_a_line_without_end_is_broken_before_it_fills_the_memory() -> None:
    source = LogSource(0, b"")
    for _ in range(5):
        source.feed(b"x" * (LONGEST_LINE // 2))

    assert source.held_lines >= 1


def test_a_source_at_the_end_of_what_is_there_holds_back_no_other() -> None:
    merge = LogMerge()
    quiet, busy = merge.add(LogSource(0, b"0: ")), merge.add(LogSource(1, b"1: "))
    quiet.feed(stamped(1, b"a\n"))
    busy.feed(stamped(2, b"b\n") + stamped(3, b"c\n"))
    assert merge.final().endswith(b"a\n")

    quiet.paused = True

    assert merge.final().count(b"\n") == 2


def test_final_lines_go_no_further_than_asked() -> None:
    merge = LogMerge()
    source = merge.add(LogSource(0, b""))
    source.feed(stamped(1, b"a\n") + stamped(2, b"b\n"))

    assert merge.final(key_of(NOON + 1_500_000)) == stamped(1, b"a\n")


def test_lines_before_a_time_are_left_out() -> None:
    source = LogSource(0, b"", since=key_of(NOON + 2_000_000))
    source.feed(b"no time yet\n" + stamped(1, b"a\n") + stamped(2, b"b\n") + b"more\n")

    assert source.take(b"\xff", 0)[1] == [stamped(2, b"b"), b"more"]


def test_stamps_of_other_forms_are_times_too() -> None:
    lines = [
        b"2025-11-24 12:00:01,250 INFO start",
        b"[2025-11-24T13:00:02+01:00] later",
        b"Mon Nov 24 12:00:03 2025 ctime",
        b"no stamp",
        b"1763985604.5 epoch",
        b"2999-01-01 00:00:00 a date in the text of a line is not the time of the line",
    ]

    keys = StampKeys().keys(lines, b"")

    seconds = [b"01.250000", b"02.000000", b"03.000000", b"03.000000", b"04.500000", b"04.500000"]
    assert keys == [b"2025-11-24T12:00:" + second + b"Z " for second in seconds]


def test_who_follows_for_days_does_not_take_todays_lines_for_tomorrows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stamps, line = StampKeys(), b"2025-11-24 12:00:00 text"
    set_time(monkeypatch, "drillyard.launch.logs.merge", time=lambda: NOON / 1e6 - 3 * 86_400)
    assert stamps.keys([line], b"") == [b""]
    set_time(monkeypatch, "drillyard.launch.logs.merge", time=lambda: NOON / 1e6)
    assert stamps.keys([line], b"") == [key_of(NOON)]


def test_a_stamp_without_a_year_is_a_time_of_day_too() -> None:
    (key,) = StampKeys().keys([b"W0131 12:00:03.5 123 file.cc:1] glog"], b"")

    assert key[4:] == b"-01-31T12:00:03.500000Z "


FRACTIONS = {"": 0, ",%03d": 1000, ".%06d": 1, ".%09d": 0}
"""How many microseconds the unit of each has; of nanoseconds, only those below one are drawn."""
ZONES = {"": 0, "Z": 0, "+01:00": 3600, "-0530": -19_800}


@settings(max_examples=100)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["iso", "iso", "iso", "agent", "none", "far"]),
            st.integers(0, 10_000),
            st.integers(0, 999),
        )
    ),
    st.sampled_from(sorted(FRACTIONS)),
    st.sampled_from(sorted(ZONES)),
    st.sampled_from(["", "[", "INFO: "]),
    st.booleans(),
)
def test_lines_with_stamps_of_one_form_have_their_times_and_others_among_them_too(
    drawn: list[tuple[str, int, int]], fraction: str, zone: str, before: str, at_once: bool
) -> None:
    lines, expected, last = [], [], b""
    for kind, second, part in drawn:
        micros = NOON + second * 1_000_000
        if kind == "iso":
            last = key_of(micros - ZONES[zone] * 1_000_000 + part * FRACTIONS[fraction])
            moment = datetime.fromtimestamp(NOON // 1_000_000 + second, UTC)
            lines.append(
                f"{before}{moment:%Y-%m-%d %H:%M:%S}{fraction % part if fraction else ''}{zone}"
                " text".encode()
            )
        elif kind == "agent":
            last = key_of(micros + part)
            lines.append(last + b"text")
        else:
            lines.append(
                b"  File train.py"
                if kind == "none"
                else before.encode() + b"2999-01-01 00:00:00 a date, no time"
            )
        expected.append(last)
    stamps, keys = StampKeys(), []
    for line in () if at_once else lines:
        keys += stamps.keys([line], keys[-1] if keys else b"")

    assert (stamps.keys(lines, b"") if at_once and lines else keys) == expected
