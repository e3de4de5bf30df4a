"""Conversations as documents: the tokenizer's own chat template, with loss on the assistant's turns
only.

The turns are found exactly (`chat_turns.py`), or it is an error. The conversation is taken in the
form that the template renders best (`chat_content.py`). A text of it that is in no document, such
as thoughts that the template leaves out, is counted for the report by role and kind; an answer of
which nothing is rendered is not learnt.

Some templates render a turn differently when others follow: Qwen3's writes an empty `<think>` block
only into the turns after the last question. With them a turn in the middle of a conversation is not
what the model has to write. Such turns are learnt from a separate document: the conversation up to
and including the turn, as rendered when the model writes it. A conversation becomes as few
documents as possible; each turn is learnt once, and with most templates one document is enough.

`train_on: last` learns the last assistant turn only, from one document that ends with it; `each`
learns every turn from a document of its own that ends with it.

Of format function-calling, a template that renders neither tools nor calls gets both as text
(`tool_prompt.py`).

An answer before any question, which many templates cannot be asked for, is context.

Templates are compiled by transformers, so this is the one format whose workers import it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache

from drillyard.data.chat_content import Text, accepted_form, lost_texts, texts_of
from drillyard.data.chat_rendering import Chat, ChatTemplate, TemplateRefusal
from drillyard.data.chat_roles import BROKEN_CALL, SYSTEM_REPLACED, require_known_roles
from drillyard.data.chat_turns import (
    Document,
    documents_by_prefix,
    owned_spans,
    segments_of,
)
from drillyard.data.message_variants import CALLED, strings_in
from drillyard.data.raw_batches import Row
from drillyard.data.row_formats import RowFormat, Segments
from drillyard.data.tokenizer import TURN_TOKENS, chat_template
from drillyard.data.tool_prompt import with_tools_as_text
from drillyard.errors import UserError

NO_TURN = "without_assistant_turn"
TOOLS_IGNORED = "tools_not_rendered"
BY_TURN = "cut_by_turn"
ANSWERS_NOTHING = "begins_with_assistant"
EMPTY_ANSWER = "empty_answer"
NOT_RENDERED = "not_rendered"
_CERTAIN = 12
"""A text of a tool of so many characters, which is nowhere else, is rendered if it is found."""


@dataclass
class RenderedChat:
    """The documents of one conversation, and the names of counts to raise for it (`NO_TURN`,
    ...; `not_rendered:assistant:reasoning` for a text that no document has)."""

    documents: list[Segments] = field(default_factory=list)
    counts: list[str] = field(default_factory=list)


class ChatRenderer:
    """Renders rows {messages, tools}, normalised by chat_messages.py, with one chat template.

    `template`: a text, or texts by name. `writes_calls`: of format function-calling, with tools and
    calls as text where the template renders none. `origin`: what an error calls the template.
    """

    def __init__(
        self,
        template: str | Mapping[str, str],
        special_tokens: Mapping[str, str],
        loss_on: str,
        *,
        writes_calls: bool = False,
        origin: str = "the chat template",
        date: str | None = None,
    ) -> None:
        self.template = ChatTemplate(template, special_tokens, origin, date)
        self.loss_on = loss_on
        self.writes_calls = writes_calls
        self._renders_calls = cache(self._are_calls_rendered)
        self._renders_system = cache(self._is_system_rendered)

    def render(self, row: Row, where: str) -> RenderedChat:
        """Documents of one conversation. UserError if the template refuses it, or its turns cannot
        be found."""
        kept, tools = self._in_template_form(row)
        given = Chat(self.template, _without_marks(kept), tools, where)
        require_known_roles(kept, given.source, where)
        chat, lost = accepted_form(given)
        _require_calls(chat, lost)
        # Forms may join messages at the beginning; the others keep their distance from the end.
        joined = len(kept) - len(chat.messages)
        roles = [{each["role"] for each in kept[: joined + 1]}]
        roles += [{each["role"]} for each in kept[joined + 1 :]]
        kept = kept[joined:]
        counts = [TOOLS_IGNORED] if _ignores_tools(chat) else []
        if any(BROKEN_CALL in message for message in kept):
            counts.append(BROKEN_CALL)
        if row.get(SYSTEM_REPLACED):
            counts.append(SYSTEM_REPLACED)
        turns = [n for n, message in enumerate(chat.messages) if message["role"] == "assistant"]
        learnt = [turn for turn in turns if kept[turn].get("weight", 1)]
        if self.loss_on == "all":
            found = [_learning_all(chat, [turn for turn in turns if turn not in learnt])]
        else:
            unasked = self._unasked_turns(chat, turns)
            if unasked:
                counts.append(ANSWERS_NOTHING)
                turns = [turn for turn in turns if turn not in unasked]
            if not turns:
                return RenderedChat([], [*counts, NO_TURN])
            blank = _blank_turns(chat, lost, turns)
            if blank:
                counts.append(EMPTY_ANSWER)
            learnt = [turn for turn in learnt if turn in turns and turn not in blank]
            found = self._documents(chat, turns, learnt)
            if self.loss_on != "each" and len(found) > 1:
                counts.append(BY_TURN)
        missing = _missing_texts(chat, lost, [document.stop for document in found])
        named = [f"{role}:{text.kind}" for text in missing for role in sorted(roles[text.message])]
        counts += [f"{NOT_RENDERED}:{each}" for each in dict.fromkeys(named)]
        return RenderedChat([document.segments for document in found], counts)

    def _unasked_turns(self, chat: Chat, turns: list[int]) -> list[int]:
        """The assistant's turns before any question that the template cannot be asked for."""
        if chat.marks_generation and self.loss_on != "each":
            return []
        asked = (n for n, each in enumerate(chat.messages) if each["role"] in ("user", "tool"))
        first = next(asked, len(chat.messages))
        return [turn for turn in turns if turn < first and not _can_ask(chat, turn)]

    def _documents(self, chat: Chat, turns: list[int], learnt: list[int]) -> list[Document]:
        if self.loss_on == "each" and learnt:
            return [_one_turn(chat, turn) for turn in learnt]
        stop = len(chat.messages)
        if self.loss_on == "last":
            learnt, stop = [turn for turn in learnt if turn == turns[-1]], turns[-1] + 1
        if not chat.marks_generation:
            return documents_by_prefix(chat, learnt, stop)
        if learnt == turns:
            return [Document(segments_of(chat.text(stop), chat.marked(stop)), stop)]
        spans = [span for _, span in owned_spans(chat, learnt, stop)]
        return [Document(segments_of(chat.text(stop), spans), stop)]

    def prompt(self, row: Row, where: str) -> str:
        """The conversation as text, up to where the assistant's answer begins. UserError as for
        `render`."""
        messages, tools = self._in_template_form(row)
        chat, _ = accepted_form(Chat(self.template, _without_marks(messages), tools, where))
        return chat.text(prompt=True)

    def turn_end(self) -> str:
        """The text that the template puts after the content of an assistant's last turn; empty if
        it cannot be seen."""
        question, content = {"role": "user", "content": "probe-question"}, "probe-answer"
        messages = [question, {"role": "assistant", "content": content}]
        try:
            chat, _ = accepted_form(Chat(self.template, messages, None, ""))
            return chat.text().rpartition(content)[2]
        except UserError:
            return ""

    def call_end(self) -> str:
        """The text that the template puts after the arguments of a last turn that calls a tool;
        empty where it renders no calls, or where that cannot be seen."""
        if not self._renders_calls(True):
            return ""
        messages, tools = _probe_call(True)
        chat, _ = accepted_form(Chat(self.template, messages, tools, ""))
        return chat.text().rpartition("probe_value")[2]

    def _in_template_form(self, row: Row) -> tuple[list[Row], list[Row] | None]:
        """The messages and tools as the template gets them: with calls as text where it renders
        none."""
        messages, tools = row["messages"], row.get("tools") or None
        if not self.writes_calls or self._renders_calls(tools is not None):
            return messages, tools
        return with_tools_as_text(messages, tools, system=self._renders_system()), None

    def _are_calls_rendered(self, has_tools: bool) -> bool:
        """Whether the template for conversations with tools, or without, renders them and calls."""
        messages, tools = _probe_call(has_tools)
        texts = ("probe_description", "probe_value") if has_tools else ("probe_value",)
        return self._renders(messages, tools, texts)

    def _is_system_rendered(self) -> bool:
        messages = [
            {"role": "system", "content": "probe-system"},
            {"role": "user", "content": "probe"},
        ]
        return self._renders(messages, None, ("probe-system",))

    def _renders(
        self, messages: list[Row], tools: list[Row] | None, texts: tuple[str, ...]
    ) -> bool:
        try:
            chat, _ = accepted_form(Chat(self.template, messages, tools, ""))
            rendered = chat.text()
        except UserError:
            return False
        return all(text in rendered for text in texts)


def _probe_call(has_tools: bool) -> tuple[list[Row], list[Row] | None]:
    """A conversation that ends with a call, and the called tool where `has_tools`."""
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
    return messages, [{"type": "function", "function": schema}] if has_tools else None


def chat_renderer(
    template: str | Mapping[str, str],
    special_tokens: Mapping[str, str],
    form: RowFormat,
    origin: str = "the chat template",
    date: str | None = None,
) -> ChatRenderer:
    """The renderer of a format's rows; `date`: see `ChatTemplate`."""
    writes_calls = form.name == "function-calling"
    return ChatRenderer(
        template, special_tokens, form.loss_on, writes_calls=writes_calls, origin=origin, date=date
    )


def trained_template_texts(form: RowFormat) -> Callable[[Row, str], Iterator[str]]:
    """A function of (row, where): its texts under the template of trained tokenizers, without the
    tokens of turns."""
    renderer = chat_renderer(chat_template(), {}, form)
    tokens = re.compile("|".join(map(re.escape, TURN_TOKENS)))

    def texts_of_row(row: Row, where: str) -> Iterator[str]:
        for segments in renderer.render(row, where).documents:
            yield from filter(None, tokens.split("".join(text for text, _ in segments)))

    return texts_of_row


def _without_marks(messages: list[Row]) -> list[Row]:
    """The messages without the keys that are ours, not the template's."""
    return [
        {key: value for key, value in each.items() if key not in ("weight", BROKEN_CALL)}
        for each in messages
    ]


def _learning_all(chat: Chat, masked: list[int]) -> Document:
    """The whole conversation, learnt but for the turns of weight 0."""
    stop = len(chat.messages)
    spans = [span for _, span in owned_spans(chat, masked, stop)] if masked else []
    return Document(segments_of(chat.text(), spans, learnt=False), stop)


def _can_ask(chat: Chat, turn: int) -> bool:
    """Whether the conversation can end with this turn, which begins where it is asked for."""
    try:
        through = chat.text(turn + 1)
        return chat.marks_generation or through.startswith(chat.text(turn, prompt=True))
    except TemplateRefusal:
        return False


def _one_turn(chat: Chat, turn: int) -> Document:
    """The conversation up to and with this turn, in which it alone is learnt."""
    stop = turn + 1
    if not chat.marks_generation:
        return documents_by_prefix(chat, [turn], stop)[0]
    spans = [span for _, span in owned_spans(chat, [turn], stop)]
    return Document(segments_of(chat.text(stop), spans), stop)


def _require_calls(chat: Chat, lost: list[Text]) -> None:
    """Raise UserError where the template renders none of a message's calls."""
    for turn in sorted({text.message for text in lost if text.kind == CALLED}):
        called = [text for text in texts_of(chat.messages) if text.message == turn]
        if all(text in lost for text in called if text.kind == CALLED):
            raise UserError(
                f"{chat.where}: {chat.template.origin} does not render the tool calls of message"
                f" {turn + 1}, so the turn would be learnt without them. Set data.tokenizer to that"
                " of a model that calls tools, or remove the row."
            )


def _blank_turns(chat: Chat, lost: list[Text], turns: list[int]) -> list[int]:
    """The turns of which nothing is rendered where they are learnt."""
    missing = {text.message for text in lost}
    if not missing:
        return []
    blank = []
    for turn in turns:
        said = [text for text in texts_of(chat.messages[: turn + 1]) if text.message == turn]
        if turn not in missing or not all(text in lost for text in said):
            continue
        if chat.marks_generation or all(text in _lost_at(chat, turn + 1) for text in said):
            blank.append(turn)
    return blank


def _lost_at(chat: Chat, stop: int) -> list[Text]:
    try:
        return lost_texts(chat, stop)
    except TemplateRefusal:  # then no document ends there
        return lost_texts(chat)


def _missing_texts(chat: Chat, lost: list[Text], stops: list[int]) -> list[Text]:
    """The texts that no document has; `lost` are those that the whole conversation has not."""
    whole = len(chat.messages)
    missing = lost if whole in stops else texts_of(chat.messages)
    for stop in stops:
        if missing and stop != whole:
            gone = lost_texts(chat, stop)
            missing = [text for text in missing if text.message >= stop or text in gone]
    return missing


def _ignores_tools(chat: Chat) -> bool:
    """Whether the template ignores the row's tools."""
    if chat.tools is None:
        return False
    elsewhere = chat.source + "\n".join(strings_in(chat.messages))
    described = (text for text in strings_in(chat.tools) if len(text) >= _CERTAIN)
    if any(text in chat.text() and text not in elsewhere for text in described):
        return False
    try:
        return Chat(chat.template, chat.messages, None, chat.where).text() == chat.text()
    except UserError:
        return False  # the template needs them
