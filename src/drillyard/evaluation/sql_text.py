"""Reading SQL as tokens: enough to find a top-level ORDER BY, the literals of a query and the columns it compares.

A lexer, not a parser: strings, quoted names and comments are recognised, so that nothing inside them counts; nesting is
counted by parentheses. sqlite itself judges whether a text is SQL.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

_TOKEN = re.compile(
    r"""(?P<skip>\s+|--[^\n]*|/\*.*?(?:\*/|\Z))
      | (?P<string>'(?:[^']|'')*')
      | (?P<name>"(?:[^"]|"")*"|`[^`]*`|\[[^\]]*(?:\]|\Z)|[^\W\d]\w*)
      | (?P<number>(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?)
      | (?P<mark><=|>=|<>|!=|==|\|\||.)""",
    re.VERBOSE | re.DOTALL,
)

Kind = Literal["string", "name", "number", "mark"]


@dataclass(frozen=True)
class Token:
    """One token. `text` of a string or a quoted name is without its quotes; `quote` is the quote, or empty."""

    kind: Kind
    text: str
    quote: str = ""

    def is_word(self, word: str) -> bool:
        """Whether this is the given keyword (upper case), unquoted."""
        return self.kind == "name" and not self.quote and self.text.upper() == word


def tokens(sql: str) -> Iterator[Token]:
    """The tokens of an SQL text, comments and white space left out. Any text has tokens; nothing raises."""
    for match in _TOKEN.finditer(sql):
        kind, text = match.lastgroup, match.group()
        if kind == "string":
            yield Token("string", text[1:-1].replace("''", "'"), "'")
        elif kind == "name" and text[0] in '"`[':
            closing = {"[": "]"}.get(text[0], text[0])
            yield Token("name", text[1:-1].replace(closing * 2, closing), text[0])
        elif kind in ("name", "number", "mark"):
            yield Token(kind, text)  # type: ignore[arg-type]


def has_top_level_order_by(sql: str) -> bool:
    """Whether the outermost query is ordered: ORDER BY outside of parentheses (subqueries, windows) and strings."""
    depth, previous = 0, False
    for token in tokens(sql):
        if depth == 0 and previous and token.is_word("BY"):
            return True
        previous = token.is_word("ORDER")
        if token.kind == "mark":
            depth += {"(": 1, ")": -1}.get(token.text, 0)
    return False
