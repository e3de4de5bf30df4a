"""What of a conversation a chat template renders: every text that says something is looked for.

The texts of an ordinary chat are found in the rendering one after the other. Where one is not, or
may stand there by chance (a word of the template, a few characters), each text is replaced by a
probe and rendered once more: a text is rendered if its probe is, and if its own words are there
too. So a conversation of ordinary texts costs a search, and others one rendering more.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from drillyard.data.chat_rendering import Chat, TemplateRefusal
from drillyard.data.chat_roles import ROLES
from drillyard.data.message_variants import (
    CALLED,
    CONTENT,
    THOUGHTS,
    THOUGHTS_IN_CONTENT,
    message_variants,
    objects_in,
    strings_in,
    with_changed_texts,
    with_object_arguments,
)
from drillyard.data.raw_batches import Row
from drillyard.errors import UserError

_PROBE = re.compile(r"qv(\d+)zp", re.IGNORECASE)
_SHORTEST_CERTAIN = 4
"""Shorter texts may stand anywhere by chance."""
_WORD = re.compile(r"\w+")


@dataclass(frozen=True)
class Text:
    """A text of a message: the message's number from 0, the kind of text, and whether it is text in
    the row (else another value as JSON)."""

    message: int
    kind: str
    text: str
    is_string: bool


def texts_of(messages: list[Row]) -> list[Text]:
    """Every text that says something, in order."""
    found: list[Text] = []
    for number, message in enumerate(messages):

        def note(kind: str, text: str, is_string: bool) -> str:
            found.append(Text(number, kind, text, is_string))  # noqa: B023
            return text

        with_changed_texts(message, note)
    return found


def lost_texts(chat: Chat, stop: int | None = None) -> list[Text]:
    """The texts of the first `stop` messages that their rendering does not have."""
    messages = chat.messages[:stop]
    rendered = chat.text(stop)
    texts = texts_of(messages)
    if _stand_in_order(texts, rendered, chat):
        return []
    with_probes = _with_probes(messages)
    try:
        probed = chat.with_messages(with_probes).text()
    except TemplateRefusal:
        return [text for text in texts if text.is_string and not _has(rendered, text.text)]
    seen = {int(number) for number in _PROBE.findall(probed)}
    return [
        text
        for number, text in enumerate(texts)
        if number not in seen or (text.is_string and not _has(rendered, text.text))
    ]


def _stand_in_order(texts: list[Text], rendered: str, chat: Chat) -> bool:
    """Whether all texts certainly are in the rendering, one after the other."""
    position = 0
    for text in texts:
        stripped = text.text.strip()
        if text.kind == CALLED or not text.is_string or len(stripped) < _SHORTEST_CERTAIN:
            return False
        position = rendered.find(stripped, position)
        if position < 0 or stripped in chat.source or stripped in ROLES:
            return False
        position += len(stripped)
    return True


def _with_probes(messages: list[Row]) -> list[Row]:
    number = -1

    def probe(_kind: str, _text: str, _is_string: bool) -> str:
        nonlocal number
        number += 1
        return f"qv{number}zp"

    return [with_changed_texts(message, probe) for message in messages]


def _has(rendered: str, text: str) -> bool:
    """Whether the text is there, maybe without its margins, escaped as JSON or with other space."""
    stripped = text.strip()
    if stripped in rendered:
        return True
    if any(json.dumps(stripped, ensure_ascii=ascii)[1:-1] in rendered for ascii in (False, True)):
        return True
    position = 0
    for word in _WORD.findall(stripped):
        position = rendered.find(word, position)
        if position < 0:
            return False
        position += len(word)
    return True


_STRUCTURE = frozenset({CONTENT, CALLED})


def accepted_form(chat: Chat) -> tuple[Chat, list[Text]]:
    """The conversation in the form that its template renders best, and the texts that are lost
    even so. UserError if it renders none.

    Forms are tried in the order of `message_variants`; the first is taken that is rendered without
    an error, without Python's notation of an object and with every text, or else the one that loses
    the fewest texts.
    """
    chat = chat.with_messages(with_object_arguments(chat.messages))
    failure: UserError | None = None
    best: tuple[Chat, list[Text]] | None = None
    tried: list[list[Row]] = []

    def try_forms(start: Chat, kinds: frozenset[str]) -> None:
        nonlocal best, failure
        for messages in message_variants(start.messages, kinds):
            if messages in tried:
                continue
            tried.append(messages)
            form = chat.with_messages(messages)
            try:
                if _prints_an_object(form):
                    continue
                lost = lost_texts(form)
            except UserError as error:
                failure = failure or error
                continue
            if best is None or len(lost) < len(best[1]):
                best = form, lost
            if not lost:
                return

    try_forms(chat, frozenset())
    if best is None:
        try_forms(chat, _STRUCTURE)
    elif kinds := _STRUCTURE & {text.kind for text in best[1]}:
        try_forms(chat, kinds)
    if best is None:
        raise failure or UserError(
            f"{chat.where}: {chat.template.origin} prints an object of this conversation in"
            " Python's notation. Correct the template, or remove the row."
        )
    for kind in (THOUGHTS, THOUGHTS_IN_CONTENT):
        if any(text.kind == kind for text in best[1]):
            try_forms(best[0], frozenset({kind}))
    return best


def _prints_an_object(chat: Chat) -> bool:
    """Whether the rendering has Python's notation of an object that the row has not."""
    rendered = chat.text()
    notations = [repr(value) for value in objects_in(chat.messages)]
    if not any(notation in rendered for notation in notations):
        return False
    strings = "\n".join(strings_in(chat.messages))
    return any(notation in rendered and notation not in strings for notation in notations)
