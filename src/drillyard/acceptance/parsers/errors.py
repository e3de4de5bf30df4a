"""What parsers of a tool's output raise, and how much of it they read."""

from __future__ import annotations

MOST_CHARACTERS = 8 << 20


class NotThisOutput(Exception):
    """The text is not what was expected, or is only a part of it; the message says why."""
