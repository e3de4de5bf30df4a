"""JSON files that are one document instead of a line per row.

An array of objects is read as a stream: memory holds a block and the largest row, not the file. Its
rows are parsed by the process that reads (about 80 MB/s), where JSON Lines are parsed
on all cores. Another document, such as an object that holds the rows under a key, is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from drillyard.data.raw_batches import RowOrError
from drillyard.errors import UserError

_SPACE = re.compile(r"[ \t\r\n]*")
_LONGEST_WORD = 16
"""No number's sign, literal or escape that the end of a buffer can cut is longer."""
_KEYS_OF_ROWS = ("data", "examples", "instances", "items", "records", "rows", "train")
_TYPES = {
    dict: "an object",
    list: "an array",
    str: "a string",
    bool: "a boolean",
    int: "a number",
    float: "a number",
    type(None): "null",
}
_ROWS_WANTED = "make the file one JSON array of objects, one for each row, or write one per line"


def json_type(value: Any) -> str:
    """`an array`, `a string`: the JSON type of a parsed value."""
    return _TYPES[type(value)]


def array_rows(pieces: Iterator[str], file: str) -> Iterator[tuple[int, RowOrError]]:
    """The objects of a JSON array with their numbers from 1; `pieces` are its text in order.

    A value that is not an object is a UserError in its place. UserError is raised, with the row,
    line and column, for what is not valid JSON.
    """
    text = _Text(pieces, file)
    text.expect("[")
    number = 0
    while text.next_character() != "]" or number > 0:
        number += 1
        yield number, text.object(number)
        if text.next_character() == "]":
            break
        text.expect(",", number)
    text.expect("]")
    if text.next_character():
        raise UserError(
            f"{file}, {text.place()}: there is text after the end of the JSON array. Remove it, or"
            " join the arrays to one."
        )


class _Text:
    """The part of a text that is not parsed yet."""

    def __init__(self, pieces: Iterator[str], file: str) -> None:
        self._pieces = pieces
        self._file = file
        self._text = ""
        self._at = 0
        self._line = 1  # of the start of _text
        self._column = 1
        self._decoder = json.JSONDecoder()

    def place(self, at: int | None = None) -> str:
        """Line and column of an index into the text; default: of what comes next."""
        line, column = self._line_and_column(self._at if at is None else at)
        return f"line {line}, column {column}"

    def next_character(self) -> str:
        """The next character that is not space; empty at the end."""
        while True:
            self._at = _SPACE.match(self._text, self._at).end()  # type: ignore[union-attr]
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._read_on():
                return ""

    def expect(self, character: str, number: int | None = None) -> None:
        """Pass over `character`. UserError where something else comes next."""
        if self.next_character() != character:
            after = "" if number is None else f" after row {number}"
            raise self._invalid(f"expected {character!r}{after}", self._at, "")
        self._at += 1

    def object(self, number: int) -> RowOrError:
        """The object that comes next, or the error of another value."""
        row_name = f"row {number}, "
        first = self.next_character()
        place = self.place()
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                if _is_cut(error, self._text) and self._read_on():
                    continue
                if first in ("{", ""):
                    raise self._invalid(error.msg, error.pos, row_name) from None
                found = "an array" if first == "[" else repr(first)
                raise self._no_object(place, row_name, found) from None
            except RecursionError:
                if first != "{":
                    raise self._no_object(place, row_name, "an array") from None
                raise UserError(
                    f"{self._file}, {row_name}{place}: JSON is nested too deeply. Fix or remove"
                    " this row."
                ) from None
            # A number that ends with the text may go on after it.
            if isinstance(value, int | float) and end == len(self._text) and self._read_on():
                continue
            self._at = end
            is_row = isinstance(value, dict)
            return value if is_row else self._no_object(place, row_name, json_type(value))

    def _no_object(self, place: str, row_name: str, found: str) -> UserError:
        return UserError(
            f"{self._file}, {row_name}{place}: each row of the JSON array must be an object; found"
            f" {found}. Fix or remove this row."
        )

    def _invalid(self, reason: str, at: int, row_name: str) -> UserError:
        if at >= len(self._text):
            reason = f"{reason}, and the file ends here"
        return UserError(
            f"{self._file}, {row_name}{self.place(at)}: not valid JSON ({reason}). The file is one"
            " JSON array; fix it there, or write the file again."
        )

    def _read_on(self) -> bool:
        """Drop what is parsed and append text until as much again is there; False at the end,
        which changes nothing."""
        added, size = [], 0
        for piece in self._pieces:
            added.append(piece)
            size += len(piece)
            if size > len(self._text) - self._at:
                break
        if size == 0:
            return False
        self._line, self._column = self._line_and_column(self._at)
        self._text, self._at = "".join([self._text[self._at :], *added]), 0
        return True

    def _line_and_column(self, at: int) -> tuple[int, int]:
        newline = self._text.rfind("\n", 0, at)
        column = self._column + at if newline < 0 else at - newline
        return self._line + self._text.count("\n", 0, at), column


def _is_cut(error: json.JSONDecodeError, text: str) -> bool:
    """Whether more text could make it valid."""
    return error.msg.startswith("Unterminated string") or error.pos >= len(text) - _LONGEST_WORD


def require_no_single_object(text: str, file: str, *, is_whole: bool, is_jsonl: bool) -> None:
    """Raise UserError where a file that begins with `text` is one object that is no row.

    That is an object over several lines, and on one line one of columns, or one that holds rows
    under a usual name for them, unless the file's suffix says that it is JSON Lines (`is_jsonl`).
    Any other object on one line is a row. `is_whole`: `text` is the file.
    """
    text = text.strip()
    spans_lines = _first_object_spans_lines(text, is_whole)
    if not spans_lines and (is_jsonl or "\n" in text):
        return
    members = _leading_members(text)
    lists = {key: value for key, value in members.items() if isinstance(value, list)}
    rows = {key for key, value in lists.items() if value and isinstance(value[0], dict)}
    named = sorted(rows if spans_lines else rows.intersection(_KEYS_OF_ROWS))
    if named:
        raise UserError(
            f"{file}: is one JSON object, and its key {named[0]!r} holds a list of objects. If they"
            f" are the rows, make that list the whole file, or write one of them per line."
        )
    # Of an object that goes on after `text`, other members may follow.
    if lists and not rows and len(lists) == len(members) and (is_whole or spans_lines):
        raise UserError(
            f"{file}: is one JSON object of columns ({', '.join(map(repr, lists))}), not rows;"
            f" {_ROWS_WANTED}."
        )
    if spans_lines:
        raise UserError(f"{file}: is a JSON object over several lines; {_ROWS_WANTED}.")


def _first_object_spans_lines(text: str, is_whole: bool) -> bool:
    if text.partition("\n")[0].strip() == "{":
        return True
    try:
        return "\n" in text[: json.JSONDecoder().raw_decode(text)[1]]
    except json.JSONDecodeError as error:
        return not is_whole and _is_cut(error, text) and "\n" in text[: error.pos]
    except RecursionError:
        return False


def _leading_members(text: str) -> dict[str, Any]:
    """The members of the object at the start of `text`, as far as it goes.

    Of a list that does not end in `text`, its first element alone.
    """
    decoder, members = json.JSONDecoder(), {}
    at = 1
    try:
        while True:
            key, at = decoder.raw_decode(text, _after_space(text, at))
            at = _after_space(text, _after_space(text, at) + 1)
            try:
                members[key], at = decoder.raw_decode(text, at)
            except json.JSONDecodeError:
                if text[at] == "[":
                    members[key] = [decoder.raw_decode(text, _after_space(text, at + 1))[0]]
                return members
            at = _after_space(text, at) + 1
    except (json.JSONDecodeError, IndexError, TypeError, RecursionError):
        return members


def _after_space(text: str, at: int) -> int:
    return _SPACE.match(text, at).end()  # type: ignore[union-attr]
