"""rich's console for texts from elsewhere: only what rich itself renders may move the cursor or set a colour.

Use it instead of `rich.console.Console`, which has no colours: standard output cleans what that writes
(control_characters.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import rich.console
from rich.segment import Segment
from rich.text import Text

from drillyard.control_characters import CleanedText, clean
from drillyard.redaction import redact


class SafeConsole(rich.console.Console):
    """A console whose texts are cleaned before they are laid out, so that tables keep their columns."""

    def render(
        self, renderable: rich.console.RenderableType, options: rich.console.ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """The segments of `renderable`: those of control are rich's, the text of others is cleaned."""
        if isinstance(renderable, Text):
            renderable = _redacted(renderable)
        for segment in super().render(renderable, options):
            text = segment.text
            yield segment if segment.control or text == (safe := clean(text)) else Segment(safe, segment.style)

    def render_str(self, text: str, **options: Any) -> Text:
        """`text` as rich's Text, with references in the place of secrets."""
        return _redacted(super().render_str(text, **options))

    def _render_buffer(self, buffer: Iterable[Segment]) -> str:
        return CleanedText(super()._render_buffer(buffer))


def _redacted(text: Text) -> Text:
    """`text` without secrets; the stream would not find a value that a line's end or a colour cuts in two."""
    if (safe := redact(text.plain)) == text.plain:
        return text
    return text.blank_copy(safe)
