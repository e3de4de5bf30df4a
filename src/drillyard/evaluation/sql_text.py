"""SQL as text: its tokens, its statements, and which statements of a schema are not executed.

The lexer does not parse: it knows strings, quoted names, numbers and comments as sqlite has them.

A schema may be what `sqlite3 FILE .schema` or `.dump` prints, or the like of another database.
Statements without tables or rows are left out of it (`left_out`): those on sqlite's own tables
(sqlite_sequence, sqlite_stat1), triggers, settings of a session, users, comments, transactions. So
are virtual tables, whose modules are not part of the sandbox; a query that needs one cannot be
judged.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

_TOKEN = re.compile(
    r"""(?P<skip>\s+|--[^\n]*|/\*.*?(?:\*/|\Z))
      | (?P<string>'(?:[^']|'')*')
      | (?P<name>"(?:[^"]|"")*"|`[^`]*`|\[[^\]]*(?:\]|\Z)|[^\W\d]\w*)
      | (?P<number>(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?)
      | (?P<symbol><=|>=|<>|!=|==|\|\||.)""",
    re.VERBOSE | re.DOTALL,
)

Kind = Literal["string", "name", "number", "symbol"]


@dataclass(frozen=True)
class Token:
    """One token. `text` of a string or a quoted name is without its quotes; `quote` is the quote,
    or empty."""

    kind: Kind
    text: str
    quote: str = ""

    def is_word(self, word: str) -> bool:
        """Whether this is the given keyword (upper case), unquoted."""
        return self.kind == "name" and not self.quote and self.text.upper() == word


def tokens(sql: str) -> Iterator[Token]:
    """The tokens of an SQL text, comments and white space left out. Any text has tokens; nothing
    raises."""
    for match in _TOKEN.finditer(sql):
        if (token := _token_of(match)) is not None:
            yield token


def _token_of(match: re.Match[str]) -> Token | None:
    """The token of a match; None for comments and white space."""
    kind, text = match.lastgroup, match.group()
    if kind == "string":
        return Token("string", text[1:-1].replace("''", "'"), "'")
    if kind == "name" and text[0] in '"`[':
        closing = {"[": "]"}.get(text[0], text[0])
        return Token("name", text[1:-1].replace(closing * 2, closing), text[0])
    if kind in ("name", "number", "symbol"):
        return Token(kind, text)  # type: ignore[arg-type]
    return None


def has_top_level_order_by(sql: str) -> bool:
    """Whether the outermost query is ordered: ORDER BY outside of parentheses (subqueries, windows)
    and strings."""
    depth, previous = 0, False
    for token in tokens(sql):
        if depth == 0 and previous and token.is_word("BY"):
            return True
        previous = token.is_word("ORDER")
        if token.kind == "symbol":
            depth += {"(": 1, ")": -1}.get(token.text, 0)
    return False


@dataclass(frozen=True)
class Statement:
    """One statement of a schema. `table`: the virtual table that it would create, in lower case."""

    text: str
    is_left_out: bool = False
    table: str = ""


_SESSION = """
ANALYZE BEGIN COMMENT COMMIT DELIMITER END GRANT LOCK PRAGMA RELEASE REVOKE ROLLBACK SAVEPOINT
SELECT SET SHOW START UNLOCK USE VACUUM
""".split()  # noqa: SIM905
"""First words of statements that bring neither tables nor rows."""
_OTHER_OBJECTS = """
DATABASE EXTENSION FUNCTION PROCEDURE ROLE SCHEMA SEQUENCE TRIGGER TYPE USER
""".split()  # noqa: SIM905
"""What CREATE, ALTER or DROP may be about besides tables, views and indexes."""
_MODIFIERS = frozenset(["OR", "REPLACE", "TEMP", "TEMPORARY", "IF", "NOT", "EXISTS"])


@lru_cache(maxsize=64)
def statements(schema: str) -> tuple[Statement, ...]:
    """The statements of a schema in their order, without those that are comments alone."""
    found, begin = [], 0
    words: list[Token] = []
    for match in _TOKEN.finditer(schema):
        token = _token_of(match)
        if token is None:
            continue
        if token == Token("symbol", ";"):
            text = schema[begin : match.end()]
            # A trigger has statements of its own.
            if _is_trigger(words) and not sqlite3.complete_statement(text):
                continue
            if words:
                found.append(_statement(text, words))
            words, begin = [], match.end()
        elif len(words) < _WORDS_READ:
            words.append(token)
    if words:
        found.append(_statement(schema[begin:], words))
    return tuple(found)


_WORDS_READ = 12


def _statement(text: str, words: list[Token]) -> Statement:
    upper = [word.text.upper() if not word.quote else "" for word in words]
    first = upper[0]
    if first in _SESSION:
        return Statement(text, is_left_out=True)
    # What it is about, and its name: the words that say neither are skipped.
    place = next((n for n in range(1, len(words)) if upper[n] not in _MODIFIERS), 0)
    kind = upper[place]
    if first in ("CREATE", "ALTER", "DROP") and kind in _OTHER_OBJECTS:
        return Statement(text, is_left_out=True)
    if first == "CREATE" and kind == "VIRTUAL":
        return Statement(text, is_left_out=True, table=_name(words, place + 2).lower())
    start = {"CREATE": place + 1, "DROP": place + 1, "ALTER": place + 1}.get(first, 1)
    if first in ("INSERT", "REPLACE", "DELETE"):
        start = next((n + 1 for n, word in enumerate(upper) if word in ("INTO", "FROM")), 1)
    is_internal = _name(words, start).lower().startswith("sqlite_")
    return Statement(text, is_left_out=is_internal and first != "WITH")


def _name(words: list[Token], place: int) -> str:
    """The name of a table at a place, without its database; words such as IF NOT EXISTS come
    before it."""
    while place < len(words) and any(map(words[place].is_word, _MODIFIERS)):
        place += 1
    if place + 2 < len(words) and words[place + 1].text == ".":
        place += 2
    return words[place].text if place < len(words) else ""


def _is_trigger(words: list[Token]) -> bool:
    return any(word.is_word("TRIGGER") for word in words[1:4]) and words[0].is_word("CREATE")
