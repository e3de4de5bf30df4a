"""Facts in a text: keys, numbers, names and commands, in their order, whatever sentence they stand
in."""

from __future__ import annotations

import re
from collections.abc import Iterable


def says(text: str | Iterable[str], facts: str) -> bool:
    """Whether `text`, or one of several texts, has the parts of `facts` in order, as whole words;
    `...` parts them."""
    if not isinstance(text, str):
        return any(says(each, facts) for each in text)
    parts = (part.strip() for part in facts.split("..."))
    # A part that begins or ends with a letter or digit begins or ends a word.
    words = (
        re.sub(r"^(?=\w)", r"\\b", re.sub(r"(?<=\w)$", r"\\b", re.escape(part))) for part in parts
    )
    return re.search(".*?".join(words), text, re.DOTALL) is not None


def each_says(lines: list[str], facts: list[str]) -> bool:
    """Whether there are as many `lines` as `facts`, and each line begins with the facts of its
    place."""
    return len(lines) == len(facts) and all(
        line.startswith(fact.split("...")[0].strip()) and says(line, fact)
        for line, fact in zip(lines, facts, strict=True)
    )
