"""One conversation under one chat template, each part of it rendered once.

Templates are compiled by transformers, in Jinja's sandbox. A template is a program, so whatever it
raises is a `TemplateRefusal`, with the line of the template.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from drillyard.data.raw_batches import Row
from drillyard.errors import UserError

CLOCK = "strftime_now"
"""The function by which a template asks for the date (Llama 3.2's does)."""
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")  # as transformers looks for it
_SOURCE = "<template>"
"""The file name of a template's frames in a traceback."""
Span = tuple[int, int]


class TemplateRefusal(UserError):
    """A chat template raised an error for a conversation."""


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template, or several by name (`default`, `tool_use`), with the special tokens that
    they may name. `origin`: what an error calls it. `date`: the day, as 2026-01-31, that a template
    with a clock sees; None: today."""

    source: str | Mapping[str, str]
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    origin: str = "the chat template"
    date: str | None = None

    def text(self, tools: list[Row] | None) -> str:
        """The template for a conversation with these tools, chosen as transformers does. UserError
        if there is none."""
        if isinstance(self.source, str):
            return self.source
        name = "tool_use" if tools is not None and "tool_use" in self.source else "default"
        if name not in self.source:
            raise UserError(
                f"{self.origin}: the tokenizer's chat templates are named"
                f" {', '.join(self.source)}, and none is named default. Set data.chat_template."
            )
        return self.source[name]


class Chat:
    """One conversation with one template. Every method raises TemplateRefusal."""

    def __init__(
        self, template: ChatTemplate, messages: list[Row], tools: list[Row] | None, where: str
    ) -> None:
        self.template, self.messages, self.tools, self.where = template, messages, tools, where
        self.source = template.text(tools)
        self.marks_generation = _GENERATION.search(self.source) is not None
        self._texts: dict[tuple[int, bool], str] = {}
        self._spans: dict[int, list[Span]] = {}

    def with_messages(self, messages: list[Row]) -> Chat:
        """The same with other messages."""
        return Chat(self.template, messages, self.tools, self.where)

    def text(self, stop: int | None = None, prompt: bool = False) -> str:
        """The first `stop` messages as text; with `prompt`, plus the start of the assistant's
        turn."""
        key = (len(self.messages) if stop is None else stop, prompt)
        if key not in self._texts:
            if self.marks_generation and not prompt:
                self.marked(key[0])
            else:
                self._texts[key], _ = self._render(key[0], prompt=prompt)
        return self._texts[key]

    def marked(self, stop: int) -> list[Span]:
        """The characters of the first `stop` messages that the template's generation blocks
        mark."""
        if stop not in self._spans:
            self._texts[stop, False], spans = self._render(stop, marked=True)
            if any(end > begin for (_, end), (begin, _) in itertools.pairwise(spans)):
                raise UserError(
                    f"{self.where}: the blocks {{% generation %}} of {self.template.origin}"
                    " overlap. Correct the template."
                )
            self._spans[stop] = spans
        return self._spans[stop]

    def _render(
        self, stop: int, prompt: bool = False, marked: bool = False
    ) -> tuple[str, list[Span]]:
        from transformers.utils.chat_template_utils import render_jinja_template

        kwargs: dict[str, Any] = {**self.template.special_tokens, "tools": self.tools}
        try:
            with _clock_of(self.source, self.template.date):
                # Annotated as `str` in transformers; it is (texts, the assistant's spans of
                # characters per text).
                result: Any = render_jinja_template(
                    [self.messages[:stop]],
                    chat_template=self.source,
                    add_generation_prompt=prompt,
                    return_assistant_tokens_mask=marked,
                    **kwargs,
                )
        except Exception as error:  # a template is a program, which may raise anything
            reason = str(error).rstrip(".") or type(error).__name__
            line = template_line(error)
            place = "" if line is None else f", line {line},"
            raise TemplateRefusal(
                f"{self.where}: {self.template.origin}{place} refuses this conversation: {reason}."
                " Correct the row or the template."
            ) from None
        rendered, spans = result
        return rendered[0], [(start, end) for start, end in spans[0]] if marked else []


@contextlib.contextmanager
def _clock_of(source: str, date: str | None) -> Iterator[None]:
    """Let the template see the day `date`. transformers keeps what it has compiled, and takes no
    function as an argument of a template."""
    if date is None:
        yield
        return
    from transformers.utils.chat_template_utils import _compile_jinja_template

    own = _compile_jinja_template(source).globals
    before = own[CLOCK]
    own[CLOCK] = datetime.fromisoformat(date).strftime
    try:
        yield
    finally:
        own[CLOCK] = before


def template_line(error: BaseException) -> int | None:
    """The line of a template at which an error was raised; None if that is not known."""
    line = getattr(error, "lineno", None)
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == _SOURCE:
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


def require_valid_template(source: str, origin: str) -> None:
    """Raise UserError, with the line, for a template that cannot be compiled."""
    from jinja2 import TemplateSyntaxError
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        render_jinja_template([[]], chat_template=source)
    except TemplateSyntaxError as error:
        raise UserError(
            f"{origin}, line {error.lineno}: not a valid chat template: {error.message}. Correct"
            " the file."
        ) from None
    except Exception:  # it needs a conversation
        return
