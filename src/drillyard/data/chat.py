"""Conversations as documents: the tokenizer's own chat template, with loss on the assistant's turns only.

Two ways to find those turns, both exact or an error:
- a template with `{% generation %}` blocks says itself which characters the assistant wrote;
- otherwise the conversation is rendered up to each assistant turn, with and without the turn. If both are true
  prefixes of
  the whole rendering, the characters between them are the turn (its end-of-turn token included). A template
  that renders a turn differently when others follow (one that drops earlier reasoning, say) is refused: guessing
  would put loss on the wrong tokens.

Templates are compiled by transformers, so this is the one format whose workers import it.
"""

from __future__ import annotations

from typing import Any

from drillyard.data.batches import Row
from drillyard.data.formats import Segments
from drillyard.errors import UserError


class ChatRenderer:
    """Renders rows {messages, tools} with one chat template."""

    def __init__(self, template: str, special_tokens: dict[str, str], loss_on: str) -> None:
        self.template = template
        self.special_tokens = special_tokens
        self.everything = loss_on == "all"
        self.marks_generation = "{% generation" in template or "{%- generation" in template

    def segments(self, row: Row, where: str) -> Segments:
        """Segments of one conversation. UserError if it is malformed or the template cannot tell turns apart."""
        messages = normalised_messages(row["messages"], where)
        tools = row.get("tools") or None
        whole, spans = self._render(messages, tools, where, spans=self.marks_generation)
        if self.everything:
            return [(whole, True)]
        if not self.marks_generation:
            spans = self._spans_by_prefix(whole, messages, tools, where)
        segments: Segments = []
        position = 0
        for start, end in spans:
            segments += [(whole[position:start], False), (whole[start:end], True)]
            position = end
        return [*segments, (whole[position:], False)]

    def _spans_by_prefix(self, whole: str, messages: list[Row], tools: Any, where: str) -> list[tuple[int, int]]:
        spans = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before, _ = self._render(messages[:number], tools, where, prompt=True)
            through, _ = self._render(messages[: number + 1], tools, where)
            if not (whole.startswith(through) and through.startswith(before)):
                raise UserError(
                    f"{where}: the chat template renders message {number + 1} differently when others follow it, so "
                    f"its turn cannot be found. Use a template with {{% generation %}} blocks, or data.loss_on: all."
                )
            spans.append((len(before), len(through)))
        return spans

    def _render(
        self, messages: list[Row], tools: Any, where: str, prompt: bool = False, spans: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        from jinja2 import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        kwargs: dict[str, Any] = self.special_tokens
        try:
            # Annotated as `str` in transformers; it is (texts, character spans of the assistant per text).
            result: Any = render_jinja_template(
                [messages],
                tools=tools,
                chat_template=self.template,
                add_generation_prompt=prompt,
                return_assistant_tokens_mask=spans,
                **kwargs,
            )
        except (TemplateError, TypeError, KeyError, IndexError) as error:
            raise UserError(
                f"{where}: the chat template refuses this conversation: {error}. Mend or remove the row."
            ) from None
        rendered, indices = result
        return rendered[0], [(start, end) for start, end in indices[0]] if spans else []


def normalised_messages(messages: Any, where: str) -> list[Row]:
    """Messages as {role, content, ...}; the {from, value} form of ShareGPT is understood."""
    if not isinstance(messages, list) or not messages:
        raise UserError(
            f"{where}: column 'messages' must be a non-empty list of {{role, content}}; found {messages!r:.60}."
        )
    roles = {"human": "user", "gpt": "assistant"}
    settled = []
    for number, message in enumerate(messages, 1):
        if isinstance(message, dict) and "from" in message and "value" in message:
            message = {"role": roles.get(message["from"], message["from"]), "content": message["value"]}
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise UserError(f"{where}: message {number} is not {{role, content}}: found {message!r:.60}. Mend the row.")
        settled.append({key: value for key, value in message.items() if value is not None or key == "content"})
    return settled
