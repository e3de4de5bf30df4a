"""Launchers' prefixes tell rank and time, in any nesting; a shape matches all prefixes that look
the same."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drillyard.loglines.prefixes import NOWHERE, Origin, parse_origin, shape_of, split_prefix


@pytest.mark.parametrize(
    ("prefix", "expected", "stamp"),
    [
        (b"", NOWHERE, None),
        (b"0: ", Origin(0), None),
        (b" 12: ", Origin(12), None),
        (b"[1,3]<stdout>:", Origin(3), None),
        (b"[prterun-host-77@1,3]<stderr>: ", Origin(3), None),
        (b"[rank7]:", Origin(7), None),
        (b"1: [rank7]: ", Origin(7), None),
        # No rank has a number as long as a date.
        (b"[rank20260801120000]: ", Origin(None, ((-1, "20260801120000"),)), None),
        (b"1: [rank20260801120000]: ", Origin(None, ((1, ""), (-1, "20260801120000"))), None),
        (b"1: [default3]: ", Origin(None, ((1, ""), (3, ""))), None),
        (b"[pod/job-0-2/main] ", Origin(None, ((2, "job-0-2"),)), None),
        (b"(worker1, rank=1, pid=3432, ip=10.0.0.2) ", Origin(None, ((1, ""),)), None),
        (
            b"(head, rank=0, pid=1) [1,2]<stdout>:[default3]: ",
            Origin(None, ((0, ""), (2, ""), (3, ""))),
            None,
        ),
        (b"2026-01-02T03:04:05.123456789Z [rank3]:", Origin(3), b"2026-01-02T03:04:05.123456789Z"),
        (b"2026-01-02T03:04:05.123456789Z 3: ", Origin(3), b"2026-01-02T03:04:05.123456789Z"),
        (
            b"INFO 2026-01-02T03:04:05Z [resource.labels.containerName: job] ",
            NOWHERE,
            b"2026-01-02T03:04:05Z",
        ),
        (
            b"INFO 2026-01-02T03:04:05Z [resource.labels.podName: job-0-1] ",
            Origin(None, ((1, "job-0-1"),)),
            b"2026-01-02T03:04:05Z",
        ),
        (
            b"[rank1]:[titan] 2026-01-02 03:04:05,123 - root - INFO - ",
            Origin(1),
            b"2026-01-02 03:04:05,123",
        ),
        (
            b"[2026-01-02 03:04:05,1] [INFO] [a.b:12] [PID:1] [RANK:5] ",
            Origin(5),
            b"2026-01-02 03:04:05,1",
        ),
        (
            b"I0317 10:00:12.743313 125344476638336 metric_logger.py:181] ",
            NOWHERE,
            b"I0317 10:00:12.743313",
        ),
        (b"12:34:56 some text 9/9 ", NOWHERE, None),
    ],
)
def test_prefixes(prefix: bytes, expected: Origin, stamp: bytes | None) -> None:
    shape = shape_of(prefix)
    match = re.fullmatch(shape.pattern, prefix)
    assert match is not None
    assert (
        parse_origin(shape.parts, [match[f"o{index}"] for index in range(len(shape.parts))])
        == expected
    )
    assert (match["stamp"] if shape.style else None) == stamp


def test_a_shape_matches_what_differs_in_numbers_only() -> None:
    shape = shape_of(b"3: [NeMo I 2026-01-02 03:04:05 nemo_logging:393] took 1.5 s; ")
    other = b"12: [NeMo I 2027-11-12 13:14:15 nemo_logging:7] took 22.25 s; "
    match = re.fullmatch(shape.pattern, other)
    assert match is not None
    assert (match["o0"], match["stamp"]) == (b"12", b"2027-11-12 13:14:15")
    assert (
        re.fullmatch(
            shape.pattern, b"3: [NeMo W 2026-01-02 03:04:05 nemo_logging:393] took 1.5 s; "
        )
        is None
    )


@given(st.binary(max_size=80))
def test_a_shape_matches_the_prefix_that_it_was_made_from(prefix: bytes) -> None:
    assert re.fullmatch(shape_of(prefix).pattern, prefix, re.DOTALL) is not None


@given(st.binary(max_size=80))
def test_any_line_can_be_split(line: bytes) -> None:
    _, _, _, end = split_prefix(line)
    assert 0 <= end <= len(line)


def test_split_leaves_the_message() -> None:
    line = b"[pod/job-0-2/main] 2026-01-02T03:04:05Z 4: hello 2026"
    shape, stamp, where, end = split_prefix(line)
    assert (line[end:], stamp, shape.style) == (b"hello 2026", b"2026-01-02T03:04:05Z", "iso")
    assert where == Origin(None, ((2, "job-0-2"), (4, "")))


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b"2026-01-02T03:04:05Z [rank3]: Starting job: x", Origin(3)),
        (b"2026-01-02T03:04:05Z [default3]: Starting job: x", Origin(None, ((3, ""),))),
        (b"2026-01-02T03:04:05Z [1,3]<stdout>: Starting job: x", Origin(3)),
        (b"mbs/3  [2026-01-02 03:04:05] iteration 1/ 9", Origin(None, ((3, "mbs/3"),))),
        (b"[2026-01-02 03:04:05,1] [INFO] [a.b:12] [PID:1] [RANK:5] saved", Origin(5)),
        (b"1: [2026-01-02 03:04:05,1] [INFO] saved", Origin(1)),
    ],
)
def test_a_line_whose_message_is_not_known_has_the_origin_of_the_others(
    line: bytes, expected: Origin
) -> None:
    assert split_prefix(line)[2] == expected
