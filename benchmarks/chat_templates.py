"""Published chat templates x conversations x ways to learn them, against plain transformers.

    pip download --no-deps -d WHEELS axolotl trl unsloth
    python benchmarks/chat_templates.py WHEELS [--show 20]

Templates are the `*.jinja` files and the texts in Python files (also those that are put together by
`+`) of every wheel in WHEELS that have a loop over messages; equal ones count once. Nothing of them
is imported or run but the templates, in Jinja's sandbox.

For each case the reference is `apply_chat_template` of transformers: tokens of the conversation as
given, and the mask of its generation blocks. For a template without blocks the mask is defined
where each turn begins with the generation prompt and where the conversation up to it, as tokens
too, is the beginning of the whole. Counted are

    equal      tokens and mask are those of the reference
    form       tokens are those of the reference for a form of the conversation that loses less,
               that the template does not refuse, or that it does not print as Python or as JSON in
               JSON
    other      tokens differ from both
    mask       a mask differs
    silent     a text of the conversation is in no document, and no count says so
    refused    transformers renders the conversation and its mask is defined
    both       transformers refuses the conversation too
    undefined  the mask is not defined; the error says which text differs
    calls      the template renders none of a message's calls; the error says so

The exit code is 1 if `other`, `mask`, `silent` or `refused` is not 0. Tokens are those of a
byte-level BPE trained here, in which the templates' special tokens are tokens.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import logging
import re
import sys
import time
import zipfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from drillyard.data.chat_template import NOT_RENDERED, ChatRenderer
from drillyard.data.encoder import Encoder, EncodeSettings, HeldOutSplit
from drillyard.data.message_variants import message_variants, with_object_arguments
from drillyard.data.raw_batches import Row, batched_rows
from drillyard.data.row_formats import RowFormat
from drillyard.data.tokenizer import _as_pretrained, _train
from drillyard.errors import UserError

LOOP = re.compile(r"\{%-?\s*for\s+\w+\s+in\s+(\w+\.)?\w*messages")
SPECIAL = re.compile(r"<\|[\w ]{1,40}\|>|<[a-z_]{2,20}_of_[a-z]{2,10}>|\[/?[A-Z_]{3,20}\]")
TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


def function(name: str, /, **properties: str) -> Row:
    schema = {key: {"type": kind, "description": f"the {key}"} for key, kind in properties.items()}
    parameters = {"type": "object", "properties": schema, "required": list(properties)}
    described = {"name": name, "description": f"Gives {name}.", "parameters": parameters}
    return {"type": "function", "function": described}


TOOLS = [function("find_river", name="string"), function("add_numbers", first="integer")]


def says(role: str, content: Any, **more: Any) -> Row:
    return {"role": role, "content": content, **more}


def call(name: str, arguments: Any, number: int = 0) -> Row:
    called = {"name": name, "arguments": arguments}
    return {"id": f"rivercal{number}", "type": "function", "function": called}


def result(content: Any, number: int = 0) -> Row:
    return says("tool", content, tool_call_id=f"rivercal{number}", name="find_river")


ASK, ANSWER = says("user", "Where does the Aare rise?"), says("assistant", "In the Bernese Alps.")
MORE, LAST = says("user", "And where does it end?"), says("assistant", "It joins the Rhine.")
SYSTEM, USE = says("system", "Answer as a geographer."), says("user", "Look the Reuss up.")
CALLS = says("assistant", "", tool_calls=[call("find_river", {"name": "Reuss"})])
THOUGHT = "The Bernese Alps hold its glaciers."
TALK = [SYSTEM, ASK, ANSWER, MORE, LAST]


def with_calls(content: Any, calls: Row = CALLS, answer: str = "It is 164 km long.") -> list[Row]:
    return [USE, calls, result(content), says("assistant", answer)]


def thinking(key: str, *, answer: str = "In the Alps.") -> list[Row]:
    return [ASK, {**says("assistant", answer), key: THOUGHT}]


CONVERSATIONS: dict[str, tuple[list[Row], list[Row] | None]] = {
    "one turn": ([ASK, ANSWER], None),
    "two turns": ([ASK, ANSWER, MORE, LAST], None),
    "system": (TALK, None),
    "short": ([says("user", "im"), says("assistant", "a")], None),
    "margins": ([says("user", " Why? "), says("assistant", "\nFor this:\n\n- one\n- two\n")], None),
    "tools unused": (TALK, TOOLS),
    "call": (with_calls("164 kilometres")[:2], TOOLS),
    "call, text result": (with_calls("164 kilometres"), TOOLS),
    "call, object result": (with_calls({"length": 164, "mouth": "Aare"}), TOOLS),
    "call, list result": (with_calls([{"length": 164}, {"mouth": "Aare"}]), TOOLS),
    "call, JSON arguments": (
        with_calls(
            "164 kilometres",
            says("assistant", "", tool_calls=[call("find_river", '{"name": "Reuss"}')]),
        ),
        TOOLS,
    ),
    "call, JSON arguments, object result": (
        with_calls(
            {"length": 164},
            says("assistant", "", tool_calls=[call("find_river", '{"name": "Reuss"}')]),
        ),
        TOOLS,
    ),
    "call without content": (
        with_calls("164 kilometres", {"role": "assistant", "tool_calls": CALLS["tool_calls"]}),
        TOOLS,
    ),
    "text beside a call": (
        with_calls("164 kilometres", {**CALLS, "content": "Let me look that up."}),
        TOOLS,
    ),
    "parallel calls": (
        [
            USE,
            says(
                "assistant",
                "",
                tool_calls=[
                    call("find_river", {"name": "Reuss"}),
                    call("add_numbers", {"first": 4711}, 1),
                ],
            ),
            result("164 kilometres"),
            {**result("the sum is 4712", 1), "name": "add_numbers"},
            says("assistant", "It is 164 km long."),
        ],
        TOOLS,
    ),
    "call, then a question": ([*with_calls("164 kilometres"), MORE, LAST], TOOLS),
    "reasoning_content": (thinking("reasoning_content"), None),
    "thinking": (thinking("thinking"), None),
    "reasoning": (thinking("reasoning"), None),
    "reasoning, two turns": ([*thinking("reasoning_content"), MORE, LAST], None),
    "reasoning only": (thinking("reasoning_content", answer=""), None),
    "think tags": ([ASK, says("assistant", f"<think>\n{THOUGHT}\n</think>\n\nIn the Alps.")], None),
    "think tags, two turns": (
        [
            ASK,
            says("assistant", f"<think>\n{THOUGHT}\n</think>\n\nIn the Alps."),
            MORE,
            LAST,
        ],
        None,
    ),
    "developer": ([says("developer", "Answer as a geographer."), *TALK[1:]], None),
    "system and developer": ([SYSTEM, says("developer", "Use no tables."), *TALK[1:]], None),
    "later system": ([*TALK[:3], says("system", "From now on be brief."), *TALK[3:]], None),
    "parts": (
        [says(each["role"], [{"type": "text", "text": each["content"]}]) for each in TALK],
        None,
    ),
    "weight 0": ([SYSTEM, ASK, {**ANSWER, "weight": 0}, MORE, LAST], None),
    "weight 0 at the end": ([ASK, ANSWER, MORE, {**LAST, "weight": 0}], None),
    "begins with the assistant": ([ANSWER, MORE, LAST], None),
    "system, then the assistant": ([SYSTEM, ANSWER, MORE, LAST], None),
    "ends with the user": ([ASK, ANSWER, MORE], None),
}
WAYS = ("completion", "last", "each", "all")


def templates_of(wheels: Path) -> dict[str, str]:
    """Every template in the wheels by its place, equal ones once."""
    found: dict[str, str] = {}
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            for name in sorted(archive.namelist()):
                place = f"{wheel.name.partition('-')[0]}:{name.rpartition('/')[2]}"
                if name.endswith((".jinja", ".jinja2")):
                    candidates = {place: archive.read(name).decode()}
                elif name.endswith(".py"):
                    candidates = {
                        f"{place}:{line}": text
                        for line, text in python_texts(
                            archive.read(name).decode("utf-8", "replace")
                        )
                    }
                else:
                    continue
                for key, text in candidates.items():
                    if LOOP.search(text) and text not in found.values() and is_template(text):
                        found[key] = text
    return found


def python_texts(source: str) -> Iterator[tuple[int, str]]:
    """The texts of a Python file with their lines, those joined by `+` as one; names of texts of
    the file are filled in."""
    if "messages" not in source:
        return
    tree = ast.parse(source)
    names: dict[str, str] = {}

    def text_of(node: ast.expr) -> str | None:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return node.value
        if isinstance(node, ast.Name):
            return names.get(node.id)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            left, right = text_of(node.left), text_of(node.right)
            return left + right if left is not None and right is not None else None
        return None

    for statement in tree.body:
        is_named = isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name)
        if is_named and (text := text_of(statement.value)) is not None:
            names[statement.targets[0].id] = text
            yield statement.lineno, text


def is_template(text: str) -> bool:
    """Whether Jinja compiles it."""
    try:
        render_jinja_template([[]], chat_template=text)
    except Exception as error:
        return type(error).__name__ != "TemplateSyntaxError"
    return True


def tokenizer_for(template: str) -> PreTrainedTokenizerFast:
    texts = [json.dumps(messages) for messages, _ in CONVERSATIONS.values()]
    tokenizer = _as_pretrained(_train(600, iter([*texts, template])))
    special = sorted(set(SPECIAL.findall(template)) | set(TOKENS.values()))
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    for name, token in TOKENS.items():
        setattr(tokenizer, name, token)
    tokenizer.chat_template = template
    return tokenizer


Spans = list[tuple[int, int]]


@dataclass
class Reference:
    """Plain transformers on a conversation. Every method raises what the template raises."""

    tokenizer: PreTrainedTokenizerFast
    messages: list[Row]
    tools: list[Row] | None

    @property
    def is_marked(self) -> bool:
        return (
            re.search(r"\{%-?\s*generation\s*-?%\}", str(self.tokenizer.chat_template)) is not None
        )

    def text(self, stop: int | None = None, prompt: bool = False) -> str:
        found: Any = render_jinja_template(
            [self.messages[:stop]],
            tools=self.tools,
            chat_template=str(self.tokenizer.chat_template),
            add_generation_prompt=prompt,
            **self.tokenizer.special_tokens_map,
        )
        return str(found[0][0])

    def tokens(self, stop: int) -> tuple[list[int], list[bool] | None]:
        """Tokens, and whether transformers says that the assistant wrote each (None: it does
        not)."""
        try:
            found: Any = self.tokenizer.apply_chat_template(
                self.messages[:stop],
                tools=self.tools,
                return_dict=True,
                return_assistant_tokens_mask=self.is_marked,
            )
        except Exception:
            # It takes away a content that is null, which is a form of its own.
            text = self.text(stop)
            return self.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids, None
        masks = found.get("assistant_masks") if self.is_marked else None
        return list(found["input_ids"]), masks and [bool(flag) for flag in masks]

    def spans(self, turn: int, stop: int) -> Spans | None:
        """The characters of one turn in the first `stop` messages; None where not defined."""
        whole = self.text(stop)
        if not self.is_marked:
            before, through = self.text(turn, prompt=True), self.text(turn + 1)
            defined = whole.startswith(through) and through.startswith(before)
            return [(len(before), len(through))] if defined else None
        turns = [n for n in range(stop) if self.messages[n]["role"] == "assistant"]
        words = {n: set(words_of({**self.messages[n], "role": ""})) for n in turns}
        begins = {each: self._begin(each, whole) for each in turns}
        owned = []
        for begin, end in self.marks(stop):
            found = {n: sum(word in whole[begin:end] for word in words[n]) for n in turns}
            best = [n for n in turns if found[n] and found[n] == max(found.values())]
            near = [n for n in turns if begins[n] < end]
            if (best if len(best) == 1 else near)[-1:] == [turn]:
                owned.append((begin, end))
        return owned

    def _begin(self, turn: int, whole: str) -> int:
        """Where the text with and without what follows a turn begins to differ."""
        try:
            return common(self.text(turn), whole) if turn else 0
        except Exception:  # no conversation ends there
            return 0

    def marks(self, stop: int) -> Spans:
        """The characters in generation blocks."""
        _, found = render_jinja_template(
            [self.messages[:stop]],
            tools=self.tools,
            chat_template=str(self.tokenizer.chat_template),
            return_assistant_tokens_mask=True,
            **self.tokenizer.special_tokens_map,
        )
        spans: Any = found[0]
        return [(int(start), int(end)) for start, end in spans]


def common(one: str, other: str) -> int:
    """Length of the common beginning."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(one), len(other)))


def words_of(value: Any) -> list[str]:
    """The words of every text and number in a value."""
    if isinstance(value, dict) and value.get("type") == "text":
        return words_of(value["text"])
    if isinstance(value, dict):
        return [word for item in value.values() for word in words_of(item)]
    if isinstance(value, list):
        return [word for item in value for word in words_of(item)]
    if value is None:
        return []
    return re.findall(r"\w{4,}|\d+", value if isinstance(value, str) else json.dumps(value))


def silent_losses(messages: list[Row], texts: list[str], counts: list[str]) -> list[str]:
    """Roles and kinds of texts that are in no document and in no count."""
    kinds = {"content": ("content", "think"), "tool_calls": ("tool_calls",)}
    lost = []
    for message in messages:
        for key in ("content", "reasoning_content", "thinking", "reasoning", "tool_calls"):
            value = message.get(key)
            if key == "tool_calls":
                value = [
                    [each["function"]["name"], each["function"]["arguments"]]
                    for each in value or []
                ]
            words = words_of(value)
            if not words or any(all(word in text for word in words) for text in texts):
                continue
            named = [
                f"{NOT_RENDERED}:{message['role']}:{kind}"
                for kind in kinds.get(key, ("reasoning",))
            ]
            if not set(named) & set(counts):
                lost.append(f"{message['role']} {key}")
    return lost


@dataclass
class Case:
    """One conversation under one template, learnt in one way."""

    tokenizer: PreTrainedTokenizerFast
    messages: list[Row]
    tools: list[Row] | None
    way: str

    def verdict(self) -> tuple[str, str]:
        """A word of the table above, and details."""
        row = {"messages": self.messages, "tools": self.tools}
        form = RowFormat("chat", {}, self.way)
        renderer = ChatRenderer(
            str(self.tokenizer.chat_template), self.tokenizer.special_tokens_map, self.way
        )
        try:
            rendered = renderer.render(form.canonical(row, "row"), "row")
        except UserError as error:
            return self._refused(str(error))
        texts = ["".join(text for text, _ in document) for document in rendered.documents]
        whole = texts if rendered.documents else [self._text_or_empty()]
        if lost := silent_losses(self.messages, whole, rendered.counts):
            return "silent", ", ".join(lost)
        if not rendered.documents:
            return "equal", ""
        found = self._encoded(row, form)
        first: tuple[str, str] | None = None
        for name, messages in self._forms():
            reference = Reference(self.tokenizer, messages, self.tools)
            try:
                outcome = self._compared(reference, texts, found, rendered.counts)
            except Exception as error:
                outcome = ("other", f"{type(error).__name__} {error}")
            first = first or outcome
            if outcome[0] != "other":
                return (outcome[0] if outcome[0] != "equal" else name), outcome[1]
        assert first is not None
        return first

    def _text_or_empty(self) -> str:
        try:
            return Reference(self.tokenizer, self.given(), self.tools).text()
        except Exception:
            return ""

    def given(self) -> list[Row]:
        return [{k: v for k, v in each.items() if k != "weight"} for each in self.messages]

    def _forms(self) -> Iterator[tuple[str, list[Row]]]:
        yield "equal", self.given()
        normalised = RowFormat("chat").canonical({"messages": self.given()}, "row")["messages"]
        kinds = ("content", "tool_calls", "reasoning", "think")
        for messages in message_variants(with_object_arguments(normalised), kinds):
            yield "form", messages

    def _learnt(self, counts: list[str], messages: list[Row]) -> tuple[list[int], list[int]]:
        """All turns, and those that are to be learnt."""
        skipped = len(self.messages) - len(messages)
        kept = self.messages[skipped:]
        turns = [n for n, each in enumerate(messages) if each["role"] == "assistant"]
        learnt = [n for n in turns if kept[n].get("weight", 1)]
        if "begins_with_assistant" in counts:
            learnt = [n for n in learnt if any(m["role"] == "user" for m in messages[:n])]
        if "empty_answer" in counts:
            learnt = [n for n in learnt if kept[n]["content"]]
        if self.way == "last":
            learnt = [n for n in learnt if n == turns[-1]]
        return turns, learnt

    def _compared(
        self,
        reference: Reference,
        texts: list[str],
        found: list[tuple[list[int], list[bool]]],
        counts: list[str],
    ) -> tuple[str, str]:
        turns, learnt = self._learnt(counts, reference.messages)
        length = len(reference.messages)
        stops = {reference.text(stop): stop for stop in self._renderable(reference, turns)}
        stops[reference.text()] = length
        if unknown := [text for text in texts if text not in stops]:
            return "other", f"{unknown[0]!r} is not {reference.text()!r}"
        expected: list[tuple[list[int], list[bool]]] = []
        seen: list[int] = []
        for text in reversed(texts):  # a turn is learnt from the longest
            stop = stops[text]
            if self.way == "all":
                masked = [n for n in turns if n not in learnt]
                spans = [s for n in masked for s in reference.spans(n, stop) or [(0, 0)]]
            else:
                mine = [n for n in learnt if n < stop and n not in seen]
                if self.way == "each":
                    mine = [n for n in learnt if n == stop - 1]
                those = {n: reference.spans(n, stop) for n in mine}
                seen += [n for n, each in those.items() if each is not None]
                spans = [s for each in those.values() for s in each or []]
            expected.append(self._flags(reference, text, stop, spans))
        # Nothing precedes the first token of a document, so it is not learnt.
        expected = [(ids, [False, *flags[1:]]) for ids, flags in expected if any(flags[1:])]
        if self.way != "all" and sorted(seen) != sorted(learnt):
            return "mask", f"turns {seen} are learnt, not {learnt}"
        if sorted(found) != sorted(expected):
            return "mask", f"{texts}"
        return "equal", ""

    def _renderable(self, reference: Reference, turns: list[int]) -> Iterator[int]:
        for turn in turns:
            try:
                reference.text(turn + 1)
            except Exception:
                continue
            yield turn + 1

    def _flags(
        self, reference: Reference, text: str, stop: int, spans: Spans
    ) -> tuple[list[int], list[bool]]:
        """Tokens of transformers; flags of its own mask where every turn of a marked template is
        learnt, else by the characters of each token."""
        ids, mask = reference.tokens(stop)
        if mask and self.way == "completion" and len(spans) == len(reference.marks(stop)):
            return ids, mask
        encoding = reference.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
        if self.way == "all":
            edges = [0, *(edge for span in spans for edge in span), len(text)]
            spans = [(edges[n], edges[n + 1]) for n in range(0, len(edges), 2)]
        flags = [
            any(begin < stop and end > start for start, stop in spans)
            for begin, end in encoding.offsets
        ]
        return ids, flags

    def _encoded(self, row: Row, form: RowFormat) -> list[tuple[list[int], list[bool]]]:
        """Tokens of each document as training has them, and whether each is learnt."""
        backend = self.tokenizer.backend_tokenizer
        settings = EncodeSettings(
            format=form,
            sequence_length=1 << 16,
            too_long="error",
            split=HeldOutSplit(),
            tokenizer_json=backend.to_str(),
            wide=False,
            start_ids=(),
            eos_id=None,
            chat_template=str(self.tokenizer.chat_template),
            special_tokens=dict(self.tokenizer.special_tokens_map),
        )
        (batch,) = batched_rows("row", "row", iter([(1, copy.deepcopy(row))]))
        pieces = Encoder(settings).encode(batch).parts[0].pieces
        if pieces is None:
            return []
        ends = np.cumsum(pieces.lengths)
        return [
            (
                pieces.tokens[end - length : end].tolist(),
                [False, *pieces.loss[end - length : end - 1].tolist()],
            )
            for end, length in zip(ends, pieces.lengths, strict=True)
        ]

    def _refused(self, error: str) -> tuple[str, str]:
        if "does not render the tool calls" in error:
            return "calls", error
        reference = Reference(self.tokenizer, self.given(), self.tools)
        try:
            reference.text()
            turns, learnt = self._learnt(["begins_with_assistant"], reference.messages)
            if self.way == "all":
                masked = [turn for turn in turns if turn not in learnt]
                defined = all(reference.spans(n, len(self.messages)) for n in masked)
            else:
                defined = all(reference.spans(turn, turn + 1) for turn in learnt)
        except Exception:
            return "both", ""
        return ("refused" if defined else "undefined"), error


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("wheels", type=Path, help="directory of the wheels")
    parser.add_argument("--show", type=int, default=5, help="cases to show of each fault")
    parser.add_argument("--word", nargs="*", default=[], help="words to show cases of, too")
    parser.add_argument("--only", default="", help="only templates whose name has this text")
    parser.add_argument("--conversation", default="", help="only conversations with this text")
    options = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    templates = {
        name: text for name, text in templates_of(options.wheels).items() if options.only in name
    }
    counts: Counter[str] = Counter()
    shown: Counter[str] = Counter()
    begin = time.perf_counter()
    for name, template in templates.items():
        tokenizer = tokenizer_for(template)
        for title, (messages, tools) in CONVERSATIONS.items():
            if options.conversation not in title:
                continue
            for way in WAYS:
                outcome, details = Case(tokenizer, messages, tools, way).verdict()
                counts[outcome] += 1
                if outcome in (*FAULTS, *options.word) and shown[outcome] < options.show:
                    shown[outcome] += 1
                    print(f"{outcome}: {name}, {title}, {way}: {details[:600]}")
    print(
        f"{len(templates)} templates x {len(CONVERSATIONS)} conversations x {len(WAYS)} ways in"
        f" {time.perf_counter() - begin:.0f} s:"
        f" {', '.join(f'{key} {counts[key]:,}' for key in (*GOOD, *FAULTS))}"
    )
    return int(any(counts[key] for key in FAULTS))


GOOD = ("equal", "form", "calls", "both", "undefined")
FAULTS = ("other", "mask", "silent", "refused")

if __name__ == "__main__":
    sys.exit(main())
