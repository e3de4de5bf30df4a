"""Conversations as documents: the tokenizer's own chat template, with loss on the assistant's turns
only.

Two ways to find those turns, both exact or an error:
- a template with `{% generation %}` blocks marks the characters that the assistant wrote;
- otherwise the conversation is rendered up to each assistant turn, with and without the turn. If
  both are prefixes of the full rendering, the characters between them are the turn (with its
  end-of-turn token).

Some templates render a turn differently when others follow: Qwen3's writes an empty `<think>` block
only into the turns after the last question. With them a turn in the middle of a conversation is not
what the model has to write. Such turns are learnt from a separate document: the conversation up to
and including the turn, as rendered when the model writes it. A conversation becomes as few
documents as possible; each turn is learnt once, and with most templates one document is enough.

`train_on: last` learns the last assistant turn only, from one document that ends with it; `each`
learns every turn from a document of its own that ends with it.

Of format function-calling, a template that renders neither tools nor calls gets both as text
(`tool_prompt.py`).

Templates are compiled by transformers, so this is the one format whose workers import it.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from drillyard.data.chat_messages import (
    CALLS,
    insert_probes,
    message_variants,
    objects_in,
    strings_in,
)
from drillyard.data.function_rows import BROKEN_CALL
from drillyard.data.raw_batches import Row
from drillyard.data.row_formats import RowFormat, Segments
from drillyard.data.tokenizer import TURN_TOKENS, chat_template
from drillyard.data.tool_prompt import with_tools_as_text
from drillyard.errors import UserError

NO_TURN = "without_assistant_turn"
TOOLS_IGNORED = "tools_not_rendered"
BY_TURN = "cut_by_turn"
ANSWERS_NOTHING = "begins_with_assistant"

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")  # as transformers looks for it
Span = tuple[int, int]


@dataclass
class RenderedChat:
    """The documents of one conversation, and the names of counts to raise for it (`NO_TURN`,
    ...)."""

    documents: list[Segments] = field(default_factory=list)
    counts: list[str] = field(default_factory=list)


class ChatRenderer:
    """Renders rows {messages, tools}, normalised by chat_messages.py, with one chat template.

    `writes_calls`: of format function-calling, with tools and calls as text where the template
    renders none.
    """

    def __init__(
        self,
        template: str,
        special_tokens: dict[str, str],
        loss_on: str,
        *,
        writes_calls: bool = False,
    ) -> None:
        self.template = template
        self.special_tokens = special_tokens
        self.loss_on = loss_on
        self.writes_calls = writes_calls
        self.marks_generation = _GENERATION.search(template) is not None

    def render(self, row: Row, where: str) -> RenderedChat:
        """Documents of one conversation. UserError if the template refuses it, or its turns cannot
        be found."""
        kept, tools = self._in_template_form(row)
        weights = [message.get("weight", 1) for message in kept]
        chat = _accepted(_Chat(self, _without_marks(kept), tools, where))
        messages = chat.messages
        counts = [TOOLS_IGNORED] if _ignores_tools(chat) else []
        if any(BROKEN_CALL in message for message in kept):
            counts.append(BROKEN_CALL)
        turns = [
            number for number, message in enumerate(messages) if message["role"] == "assistant"
        ]
        learnt = [turn for turn in turns if weights[turn]]
        if self.loss_on == "all":
            masked = [turn for turn in turns if not weights[turn]]
            spans = (
                [span for turn, span in _spans(chat, turns, len(messages)) if turn in masked]
                if masked
                else []
            )
            return RenderedChat([_segments(chat.text(), spans, learnt=False)], counts)
        if turns[:1] == [0] and not self.marks_generation and not chat.may_begin_with_answer:
            turns, learnt = turns[1:], [turn for turn in learnt if turn]
            counts.append(ANSWERS_NOTHING)
        if not turns:
            return RenderedChat([], [*counts, NO_TURN])
        if self.loss_on == "each" and learnt:
            return RenderedChat([_one_turn(chat, turns, turn) for turn in learnt], counts)
        stop = len(messages)
        if self.loss_on == "last":
            learnt, stop = [turn for turn in learnt if turn == turns[-1]], turns[-1] + 1
        if self.marks_generation:
            if learnt == turns:
                spans = chat.marked(stop)
            else:
                spans = [span for turn, span in _spans(chat, turns, stop) if turn in learnt]
            return RenderedChat([_segments(chat.text(stop), spans)], counts)
        documents = _by_prefix(chat, learnt, stop)
        return RenderedChat(documents, [*counts, BY_TURN] if len(documents) > 1 else counts)

    def prompt(self, row: Row, where: str) -> str:
        """The conversation as text, up to where the assistant's answer begins. UserError as for
        `render`."""
        messages, tools = self._in_template_form(row)
        return _accepted(_Chat(self, _without_marks(messages), tools, where)).text(prompt=True)

    def turn_end(self) -> str:
        """The text that the template puts after the content of an assistant's last turn; empty if
        it cannot be seen."""
        question, content = {"role": "user", "content": "probe-question"}, "probe-answer"
        chat = _Chat(self, [question, {"role": "assistant", "content": content}], None, "")
        try:
            return chat.text().rpartition(content)[2]
        except UserError:
            return ""

    def _in_template_form(self, row: Row) -> tuple[list[Row], list[Row] | None]:
        """The messages and tools as the template gets them: with calls as text where it renders
        none."""
        messages, tools = row["messages"], row.get("tools") or None
        if not self.writes_calls or self._renders_calls:
            return messages, tools
        return with_tools_as_text(messages, tools, system=self._renders_system), None

    @cached_property
    def _renders_calls(self) -> bool:
        """Whether the template renders both tools and calls."""
        function = {"name": "probe_name", "arguments": {"probe_argument": "probe_value"}}
        properties = {"probe_argument": {"type": "string", "description": "probe_description"}}
        schema = {
            "name": "probe_name",
            "description": "",
            "parameters": {"type": "object", "properties": properties},
        }
        call = {"id": "probe0000", "type": "function", "function": function}
        messages: list[Row] = [
            {"role": "user", "content": "probe"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ]
        return self._renders(
            messages,
            [{"type": "function", "function": schema}],
            ("probe_description", "probe_value"),
        )

    @cached_property
    def _renders_system(self) -> bool:
        messages = [
            {"role": "system", "content": "probe-system"},
            {"role": "user", "content": "probe"},
        ]
        return self._renders(messages, None, ("probe-system",))

    def _renders(
        self, messages: list[Row], tools: list[Row] | None, texts: tuple[str, ...]
    ) -> bool:
        try:
            rendered = _accepted(_Chat(self, messages, tools, "")).text()
        except UserError:
            return False
        return all(text in rendered for text in texts)


def chat_renderer(template: str, special_tokens: dict[str, str], form: RowFormat) -> ChatRenderer:
    """The renderer of a format's rows."""
    return ChatRenderer(
        template, special_tokens, form.loss_on, writes_calls=form.name == "function-calling"
    )


def trained_template_texts(form: RowFormat) -> Callable[[Row, str], Iterator[str]]:
    """A function of (row, where): its texts under the template of trained tokenizers, without the
    tokens of turns."""
    renderer = chat_renderer(chat_template(), {}, form)
    tokens = re.compile("|".join(map(re.escape, TURN_TOKENS)))

    def texts_of(row: Row, where: str) -> Iterator[str]:
        for segments in renderer.render(row, where).documents:
            yield from filter(None, tokens.split("".join(text for text, _ in segments)))

    return texts_of


def _without_marks(messages: list[Row]) -> list[Row]:
    """The messages without the keys that are ours, not the template's."""
    return [
        {key: value for key, value in each.items() if key not in ("weight", BROKEN_CALL)}
        for each in messages
    ]


class _Chat:
    """One conversation with one template; each part is rendered once."""

    def __init__(
        self, renderer: ChatRenderer, messages: list[Row], tools: list[Row] | None, where: str
    ) -> None:
        self.renderer, self.messages, self.tools, self.where = renderer, messages, tools, where
        self._texts: dict[tuple[int, bool], str] = {}

    def text(self, stop: int | None = None, prompt: bool = False) -> str:
        """The first `stop` messages as text; with `prompt`, plus the start of the assistant's
        turn."""
        key = (len(self.messages) if stop is None else stop, prompt)
        if key not in self._texts:
            self._texts[key], _ = self._render(key[0], prompt=prompt)
        return self._texts[key]

    @property
    def may_begin_with_answer(self) -> bool:
        """Whether the template renders the assistant's turn where nothing comes before it."""
        try:
            self.text(0, prompt=True)
        except UserError:
            return False
        return True

    def marked(self, stop: int) -> list[Span]:
        """The characters of the first `stop` messages that the template's generation blocks
        mark."""
        self._texts[stop, False], spans = self._render(stop, marked=True)
        if any(end > begin for (_, end), (begin, _) in itertools.pairwise(spans)):
            raise UserError(
                f"{self.where}: the template's {{% generation %}} blocks overlap. Correct the"
                " template."
            )
        return spans

    def turn(self, number: int, text: str) -> Span | None:
        """The characters of one turn in `text`; None if `text` renders the turn, or the text before
        it, differently."""
        before, through = self.text(number, prompt=True), self.text(number + 1)
        return (
            (len(before), len(through))
            if text.startswith(through) and through.startswith(before)
            else None
        )

    def _render(
        self, stop: int, prompt: bool = False, marked: bool = False
    ) -> tuple[str, list[Span]]:
        from transformers.utils.chat_template_utils import render_jinja_template

        kwargs: dict[str, Any] = {**self.renderer.special_tokens, "tools": self.tools}
        try:
            # Annotated as `str` in transformers; it is (texts, character spans of the assistant per
            # text).
            result: Any = render_jinja_template(
                [self.messages[:stop]],
                chat_template=self.renderer.template,
                add_generation_prompt=prompt,
                return_assistant_tokens_mask=marked,
                **kwargs,
            )
        except Exception as error:  # a template is a program, which may raise anything
            reason = str(error).rstrip(".") or type(error).__name__
            raise UserError(
                f"{self.where}: the chat template refuses this conversation: {reason}. Correct the"
                " row or the template."
            ) from None
        rendered, spans = result
        return rendered[0], [(start, end) for start, end in spans[0]] if marked else []


def _segments(text: str, spans: list[Span], learnt: bool = True) -> Segments:
    """The text cut at the spans; the spans carry loss if `learnt`, else the rest does."""
    segments: Segments = []
    position = 0
    for start, end in spans:
        segments += [(text[position:start], not learnt), (text[start:end], learnt)]
        position = end
    return [*segments, (text[position:], not learnt)]


def _by_prefix(chat: _Chat, turns: list[int], stop: int) -> list[Segments]:
    """The fewest documents in which each of these turns is learnt once, as rendered when nothing
    follows it."""
    if not turns:
        return [_segments(chat.text(stop), [])]
    documents = []
    while turns:
        text = chat.text(stop)
        found = {turn: span for turn in turns if (span := chat.turn(turn, text)) is not None}
        if turns[-1] not in found:
            if stop == turns[-1] + 1:
                raise _unknown_turn(chat, turns[-1])
            stop = turns[-1] + 1
            continue
        documents.append(_segments(text, list(found.values())))
        turns = [turn for turn in turns if turn not in found]
        stop = turns[-1] + 1 if turns else 0
    return documents[::-1]


def _one_turn(chat: _Chat, turns: list[int], turn: int) -> Segments:
    """The conversation up to and with this turn, in which it alone is learnt."""
    if not chat.renderer.marks_generation:
        return _by_prefix(chat, [turn], turn + 1)[0]
    before = [number for number in turns if number <= turn]
    return _segments(
        chat.text(turn + 1),
        [span for number, span in _spans(chat, before, turn + 1) if number == turn],
    )


def _unknown_turn(chat: _Chat, turn: int) -> UserError:
    follows_itself = turn > 0 and chat.messages[turn - 1]["role"] == "assistant"
    advice = "Join it with the assistant's message before it, use" if follows_itself else "Use"
    return UserError(
        f"{chat.where}: the begin of the assistant's message {turn + 1} cannot be found: the chat"
        f" template's generation prompt is not what it puts before that message. {advice} a"
        " template with {% generation %} blocks, or data.loss_on: all."
    )


def _spans(chat: _Chat, turns: list[int], stop: int) -> list[tuple[int, Span]]:
    """The spans of the assistant in the first `stop` messages, each with the number of its
    message."""
    if not chat.renderer.marks_generation:
        found = [(turn, chat.turn(turn, chat.text(stop))) for turn in turns]
        if (lost := next((turn for turn, span in found if span is None), None)) is not None:
            raise UserError(
                f"{chat.where}: the chat template renders message {lost + 1} differently when"
                " others follow it, so a weight of 0 cannot be combined with data.loss_on: all."
                " Use data.loss_on: completion."
            )
        return [(turn, span) for turn, span in found if span is not None]
    spans = chat.marked(stop)
    # A message owns the blocks that it adds; the blocks before it are as many whatever follows.
    ends = [len(chat.marked(turn + 1)) for turn in turns]
    if ends != sorted(ends) or ends[-1] != len(spans):
        raise UserError(
            f"{chat.where}: it is unclear which {{% generation %}} block of the chat template"
            " belongs to which message, so a weight of 0 or data.train_on cannot be applied."
            " Remove it, or fix the template."
        )
    owners = [
        turn
        for turn, begin, end in zip(turns, [0, *ends], ends, strict=False)
        for _ in range(begin, end)
    ]
    return list(zip(owners, spans, strict=True))


def _ignores_tools(chat: _Chat) -> bool:
    """Whether the template ignores the row's tools. UserError if it ignores the assistant's
    calls."""
    without = [
        {key: value for key, value in message.items() if key not in CALLS}
        for message in chat.messages
    ]
    caller = next(
        (n for n, message in enumerate(chat.messages) if message.keys() & set(CALLS)), None
    )
    if caller is not None and _same_text(chat, without, chat.tools):
        raise UserError(
            f"{chat.where}: the chat template does not render the tool calls of message"
            f" {caller + 1}, so the turn would be learnt without them. Set data.tokenizer to that"
            " of a model that calls tools, or remove the row."
        )
    return chat.tools is not None and _same_text(chat, chat.messages, None)


def _same_text(chat: _Chat, messages: list[Row], tools: list[Row] | None) -> bool:
    try:
        return _Chat(chat.renderer, messages, tools, chat.where).text() == chat.text()
    except UserError:
        return False  # the template needs the removed part


def _accepted(chat: _Chat) -> _Chat:
    """The conversation in the variant that this template accepts.

    Templates expect a call's arguments and a tool's result as objects or as JSON text, content as
    parts or as text, a message without content without that key (as transformers passes it) or with
    null. Variants are tried in this order; the first is used that the template renders without an
    error, without Python's notation of an object, and with every value of contents that are not
    plain text.
    """
    candidates = list(message_variants(chat.messages))
    if len(candidates) == 1:
        return chat
    texts = "\n".join(strings_in(chat.messages))
    taken: list[_Chat] = []
    failure: UserError | None = None
    for messages in candidates:
        form = _Chat(chat.renderer, messages, chat.tools, chat.where)
        try:
            text = form.text()
        except UserError as error:
            failure = failure or error
            continue
        objects = [
            notation for value in objects_in(messages) if (notation := repr(value)) not in texts
        ]
        if any(notation in text for notation in objects):
            continue
        if _renders_all_content(form):
            return form
        taken.append(form)
    if taken:
        return taken[-1]
    if failure is not None:
        raise failure
    raise UserError(
        f"{chat.where}: the chat template prints an object of this conversation in Python's"
        " notation. Correct the template, or remove the row."
    )


def _renders_all_content(chat: _Chat) -> bool:
    """Whether all values of contents that are not plain text are rendered. Qwen3's template, for
    example, ignores objects and lists of parts."""
    messages, probes = insert_probes(chat.messages)
    if not probes:
        return True
    try:
        text = _Chat(chat.renderer, messages, chat.tools, chat.where).text()
    except UserError:
        return False
    return all(probe in text for probe in probes)
