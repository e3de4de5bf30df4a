"""What the pattern of a setting or a fact allows, in words: a leaf, for configs and hardware."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Allowed:
    """Part of an annotation, beside its pattern: what errors say in place of it.

    Annotated[str, Field(pattern="^[a-z]{1,8}$"), Allowed("at most 8 lower-case letters")]
    """

    words: str
    is_name: bool = False
    """Whether it is lower-case words with '-' between them: errors then offer such a spelling."""
