"""Blocks hold whole lines only, whatever the pieces; colours and redraws are taken out."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from drillyard.loglines import blocks as module
from drillyard.loglines.blocks import LineSplitter, without_colours

LINES = st.lists(
    st.sampled_from(["", "a", "bc d", "\x1b[31mred\x1b[0m", "x\ry", "\r", "long " * 9]), max_size=12
)


@given(LINES, st.lists(st.integers(1, 40), max_size=20), st.booleans())
def test_pieces_make_no_difference(lines: list[str], cuts: list[int], ended: bool) -> None:
    content = ("\n".join(lines) + ("\n" if ended and lines else "")).encode()
    blocks = LineSplitter()
    text, position, finished = b"", 0, 0
    for cut in [*cuts, len(content)]:
        block = blocks.feed(content[position : position + cut])
        position += cut
        if block is not None:
            assert block.first_line == finished + 1
            finished += len(block.ends)
            assert block.text.endswith(b"\n")
            text += block.text
    blocks.finish()
    assert blocks.lines == content.count(b"\n")
    # CR LF ends a line, once or several times over; a CR alone redraws it.
    clean = re.sub(rb"\r+\n", b"\n", without_colours(content)).replace(b"\r", b"\n")
    assert clean.startswith(text)
    rest = clean[len(text) :]
    assert b"\n" not in rest.rstrip(b"\n")
    assert blocks.unfinished == int(bool(rest))


def test_lines_that_end_as_on_other_systems_are_not_redrawn() -> None:
    block = LineSplitter().feed(b"one\r\ntwo\r\r\nthree\x1b[0m\r\x1b[K\nfour\n")
    assert block is not None
    assert block.text == b"one\ntwo\nthree\nfour\n"
    assert not block.redrawn and len(block.ends) == 4


def test_lines_are_numbered_as_in_the_file() -> None:
    blocks = LineSplitter()
    first = blocks.feed(b"one\ntwo a\rtwo b\nthree\nfo")
    second = blocks.feed(b"ur\n")
    assert first is not None and second is not None
    assert (first.first_line, len(first.ends)) == (1, 3)
    assert (second.text, second.first_line) == (b"four\n", 4)


def test_a_redrawn_line_keeps_its_head_over_blocks() -> None:
    blocks = LineSplitter()
    first = blocks.feed(b"0: 10%\r20%\r")
    second = blocks.feed(b"30%\r40%\n1: next\n")
    assert first is not None and second is not None
    assert first.line_head(first.text.index(b"10%")).startswith(b"0: ")
    assert second.line_head(second.text.index(b"40%")).startswith(b"0: ")
    assert second.line_head(second.text.index(b"next")).startswith(b"1: ")


def test_a_line_without_end_does_not_fill_the_memory(monkeypatch) -> None:
    monkeypatch.setattr(module, "LONGEST_LINE", 1000)
    blocks = LineSplitter()
    content = b"a\n" + b"x" * 5000 + b"\nb\n"
    found = [blocks.feed(content[begin : begin + 100]) for begin in range(0, len(content), 100)]
    blocks.finish()
    assert b"".join(block.text for block in found if block is not None) == b"a\nb\n"
    assert (blocks.lines, blocks.overlong, blocks.unfinished) == (3, 1, 0)


@given(st.lists(st.integers(0, 300), max_size=60))
def test_many_colours(codes: list[int]) -> None:
    text = b"".join(b"\x1b[38;5;%dmx" % code for code in codes)
    assert without_colours(text) == b"x" * len(codes)


def test_a_long_row_of_carriage_returns_is_one_lines_end() -> None:
    blocks = LineSplitter()
    assert blocks.feed(b"a" + b"\r" * 500_000) is None
    block = blocks.feed(b"\nb\r\r\n")
    assert block is not None and (block.text, len(block.ends)) == (b"a\nb\n", 2)
