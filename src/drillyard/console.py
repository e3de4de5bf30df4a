"""rich's console for untrusted texts: only rich itself may move the cursor or set a colour.

Use it instead of `rich.console.Console`: standard output removes the colours of that
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
    """A console that cleans texts before layout, so that tables keep their columns."""

    def render(
        self,
        renderable: rich.console.RenderableType,
        options: rich.console.ConsoleOptions | None = None,
    ) -> Iterable[Segment]:
        """The segments of `renderable`, with cleaned text; control segments are rich's own."""
        if isinstance(renderable, Text):
            renderable = _redacted(renderable)
        for segment in super().render(renderable, options):
            text = segment.text
            yield (
                segment
                if segment.control or text == (safe := clean(text))
                else Segment(safe, segment.style)
            )

    def render_str(self, text: str, **options: Any) -> Text:
        """`text` as rich's Text, without secrets."""
        return _redacted(super().render_str(text, **options))

    def _render_buffer(self, buffer: Iterable[Segment]) -> str:
        return CleanedText(super()._render_buffer(buffer))


def _redacted(text: Text) -> Text:
    """`text` without secrets; the stream would miss a value that a line break or a colour cuts in
    two."""
    if (safe := redact(text.plain)) == text.plain:
        return text
    return text.blank_copy(safe)
