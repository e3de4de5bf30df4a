"""The characters of a rendered conversation that each turn of the assistant wrote.

With `{% generation %}` blocks the template says which; a block belongs to the message whose text is
in it, and one without any text (an end of the conversation) to the message that it stands next to.
Otherwise a turn is what follows the rendering up to it, if both are prefixes of the whole. Where
the template refuses to render such a beginning of a conversation, the turn is found by its place:
between the generation prompt and the end of a turn.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from drillyard.data.chat_rendering import Chat, Span, TemplateRefusal
from drillyard.data.message_variants import CALLS, REASONING, with_changed_texts
from drillyard.data.raw_batches import Row
from drillyard.data.row_formats import Segments
from drillyard.errors import UserError

_MARK = re.compile(r"qw(\d+)zm")
_PROBE = "qw0zp"
_SHOWN = 60
"""Characters of a text in an error."""


@dataclass(frozen=True)
class Document:
    """The rendering of the first `stop` messages, in segments."""

    segments: Segments
    stop: int


def segments_of(text: str, spans: list[Span], learnt: bool = True) -> Segments:
    """The text cut at the spans; the spans carry loss if `learnt`, else the rest does."""
    segments: Segments = []
    position = 0
    for start, end in spans:
        segments += [(text[position:start], not learnt), (text[start:end], learnt)]
        position = end
    return [*segments, (text[position:], not learnt)]


def turn_span(chat: Chat, number: int, stop: int) -> Span | None:
    """The characters of one turn in the first `stop` messages; None if these render the turn, or
    the text before it, differently."""
    text = chat.text(stop)
    try:
        before, through = chat.text(number, prompt=True), chat.text(number + 1)
    except TemplateRefusal:
        return _placed_span(chat, number, stop)
    if text.startswith(through) and through.startswith(before):
        return len(before), len(through)
    return None


def _placed_span(chat: Chat, number: int, stop: int) -> Span | None:
    """The characters from the generation prompt to the end of the turn; None if the turn is not a
    plain text between the two."""
    message = chat.messages[number]
    content = message.get("content")
    if not isinstance(content, str) or message.keys() & {*CALLS, *REASONING}:
        return None
    changed = [*chat.messages]
    changed[number] = {**message, "content": _PROBE}
    try:
        opening, end = _turn_frame(chat)
        before, found, after = chat.with_messages(changed).text(stop).partition(_PROBE)
    except TemplateRefusal:
        return None
    text = chat.text(stop)
    is_there = found and text.startswith(before) and text.endswith(after)
    if not is_there or not before.endswith(opening) or not after.startswith(end):
        return None
    return len(before), len(text) - len(after) + len(end)


def _turn_frame(chat: Chat) -> tuple[str, str]:
    """The generation prompt, and what ends a turn that others follow."""
    question: Row = {"role": "user", "content": "probe-question"}
    talk = Chat(
        chat.template,
        [question, {"role": "assistant", "content": _PROBE}, question],
        chat.tools,
        "",
    )
    before, asked = talk.text(1), talk.text(1, prompt=True)
    end, rest = talk.text(2).rpartition(_PROBE)[2], talk.text().rpartition(_PROBE)[2]
    common = next(
        (n for n, (one, other) in enumerate(zip(end, rest, strict=False)) if one != other),
        min(len(end), len(rest)),
    )
    return asked.removeprefix(before), end[:common]


def documents_by_prefix(chat: Chat, turns: list[int], stop: int) -> list[Document]:
    """The fewest documents in which each of these turns is learnt once, as rendered when nothing
    follows it."""
    if not turns:
        return [Document(segments_of(chat.text(stop), []), stop)]
    documents = []
    while turns:
        found = {turn: span for turn in turns if (span := turn_span(chat, turn, stop)) is not None}
        if turns[-1] not in found:
            if stop == turns[-1] + 1:
                raise _unknown_turn(chat, turns[-1])
            stop = turns[-1] + 1
            continue
        documents.append(Document(segments_of(chat.text(stop), list(found.values())), stop))
        turns = [turn for turn in turns if turn not in found]
        stop = turns[-1] + 1 if turns else 0
    return documents[::-1]


def _unknown_turn(chat: Chat, turn: int) -> UserError:
    follows_itself = turn > 0 and chat.messages[turn - 1]["role"] == "assistant"
    advice = "Join it with the assistant's message before it, use" if follows_itself else "Use"
    return UserError(
        f"{chat.where}: the begin of the assistant's message {turn + 1} cannot be found:"
        f" {_difference(chat, turn)}. {advice} a template with {{% generation %}} blocks"
        " (data.chat_template), or data.loss_on: all."
    )


def _difference(chat: Chat, turn: int) -> str:
    """Which text of the template differs before a turn."""
    try:
        asked, through = chat.text(turn, prompt=True), chat.text(turn + 1)
    except TemplateRefusal as refusal:
        return f"the messages before it cannot be rendered alone ({refusal})"
    pairs = enumerate(zip(asked, through, strict=False))
    common = next((n for n, (one, other) in pairs if one != other), min(len(asked), len(through)))
    # From the begin of a line or of a special token, which is easier to recognise.
    begin = max(asked.rfind("\n", 0, common), asked.rfind("<", 0, common), common - _SHOWN, 0)
    return (
        f"where {chat.template.origin} asks for it, the text is"
        f" {asked[begin : begin + _SHOWN]!r}, and where it renders it,"
        f" {through[begin : begin + _SHOWN]!r}"
    )


def owned_spans(chat: Chat, turns: list[int], stop: int) -> list[tuple[int, Span]]:
    """The spans of these turns in the first `stop` messages, each with the number of its turn.
    UserError where that is unclear."""
    if chat.marks_generation:
        return [(turn, span) for turn, span in _owned_blocks(chat, stop) if turn in turns]
    found = [(turn, turn_span(chat, turn, stop)) for turn in turns]
    if (lost := next((turn for turn, span in found if span is None), None)) is not None:
        raise UserError(
            f"{chat.where}: {chat.template.origin} renders message {lost + 1} differently when"
            " others follow it, so a weight of 0 cannot be combined with data.loss_on: all."
            " Use data.loss_on: completion."
        )
    return [(turn, span) for turn, span in found if span is not None]


def _owned_blocks(chat: Chat, stop: int) -> list[tuple[int, Span]]:
    spans = chat.marked(stop)
    turns = [n for n, each in enumerate(chat.messages[:stop]) if each["role"] == "assistant"]
    marked = chat.with_messages(
        [_with_mark(message, number) for number, message in enumerate(chat.messages[:stop])]
    )
    try:
        blocks = marked.marked(stop)
        text = marked.text(stop)
    except UserError:
        blocks, text = [], ""
    marks = [(found.start(), int(found[1])) for found in _MARK.finditer(text)]
    owners = [_owner(block, marks, turns) for block in blocks]
    if len(blocks) != len(spans) or None in owners:
        raise UserError(
            f"{chat.where}: it is unclear which {{% generation %}} block of"
            f" {chat.template.origin} belongs to which message, so a weight of 0 or data.train_on"
            " cannot be applied. Remove it, or fix the template."
        )
    return [(owner, span) for owner, span in zip(owners, spans, strict=True) if owner is not None]


def _owner(block: Span, marks: list[tuple[int, int]], turns: list[int]) -> int | None:
    """The turn that a block belongs to, by the messages whose marks are in it or next to it."""
    begin, end = block
    inside = {number for place, number in marks if begin <= place < end} & set(turns)
    if inside:
        return inside.pop() if len(inside) == 1 else None
    first, last = 0, max(turns)
    for place, number in marks:
        if place >= end:
            last = number
            break
        first = number
    between = [turn for turn in turns if first <= turn <= last]
    return between[0] if len(between) == 1 else None


def _with_mark(message: Row, number: int) -> Row:
    """The message with its number in each of its texts."""
    mark = f"qw{number}zm"
    marked = with_changed_texts(
        message, lambda _kind, text, is_string: f"{text} {mark}" if is_string else mark
    )
    return marked if marked != message else {**message, "content": mark}
