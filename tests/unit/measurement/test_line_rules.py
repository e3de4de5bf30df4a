"""Notes are found wherever their literals stand, also where these overlap or share a line."""

from __future__ import annotations

from drillyard.loglines.blocks import LineBlock, line_ends
from drillyard.measurement.formats.line_rules import LineRule, RuleSearch


def _note(name: str, literal: bytes, pattern: bytes = b".", *, once: bool = False) -> LineRule:
    return LineRule(literal, pattern, lambda book, match: book.learn(model=name), once)


def _found(search: RuleSearch, text: bytes, notes: list[LineRule]) -> list[tuple[str, int]]:
    names = {note.action: name for name, note in zip("abcdefg", notes, strict=False)}
    block = LineBlock(text, text, 1, line_ends(text))
    return [
        (names[action], text.count(b"\n", 0, begin) + 1)
        for begin, _, _, action in search.find(block)
    ]


def test_each_note_of_a_line_is_found_once_and_lines_come_in_order() -> None:
    notes = [
        _note("a", b"saving checkpoint"),
        _note("b", b"checkpoint at"),
        _note("c", b"check"),
        _note("d", b"done"),
        _note("e", b"done", rb"done in \d+"),
    ]
    text = (
        b"nothing\n"
        b"saving checkpoint at step 4, saving checkpoint at step 5\n"
        b"done, and a check\n"
        b"done in 5 s\n"
        b"nothing\n"
        b"checkpoint at 9"
        b"\n"
    )
    expected = [
        ("a", 2),
        ("b", 2),
        ("c", 2),
        ("c", 3),
        ("d", 3),
        ("d", 4),
        ("e", 4),
        ("b", 6),
        ("c", 6),
    ]
    assert _found(RuleSearch(notes), text, notes) == expected


def test_what_is_said_once_is_not_looked_for_again() -> None:
    notes = [_note("a", b"model", once=True), _note("b", b"model"), _note("c", b"size", once=True)]
    search = RuleSearch(notes)
    assert _found(search, b"model\nmodel\n", notes) == [("a", 1), ("b", 1), ("a", 2), ("b", 2)]
    assert _found(search, b"model size\n", notes) == [("b", 1), ("c", 1)]
    assert _found(search, b"model size\n", notes) == [("b", 1)]


def test_what_is_said_at_the_beginning_is_not_looked_for_later() -> None:
    notes = [_note("a", b"model", once=True), _note("b", b"end")]
    search = RuleSearch(notes)
    search.end_of_beginning()
    assert _found(search, b"model\nend\n", notes) == [("b", 2)]
