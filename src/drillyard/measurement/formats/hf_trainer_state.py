"""trainer_state.json of Hugging Face's Trainer, read as a stream: it grows with the run, to
hundreds of megabytes.

`log_history` is a list of flat objects with `step`: training logs (`loss`, `grad_norm`,
`learning_rate`), evaluations (`eval_loss`) and, last, totals (`train_runtime`). There are no times
of day and no step times: the mean step time is `train_runtime` over the steps. Losses are means
over `logging_steps`.

The list is cut after objects into megabyte pieces that are parsed as lists of their own. Where a
cut does not parse (objects inside of objects), objects are read one by one, 3 times slower. A
document that ends in the middle gives the objects that are whole.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

import numpy as np

from drillyard.loglines.blocks import Readable
from drillyard.loglines.prefixes import NOWHERE
from drillyard.measurement.formats.jsonlines import gather, load, parsed_json
from drillyard.measurement.formats.log_format import (
    LARGEST_STEP,
    DocumentFormat,
    ParsedDocument,
    append_rows,
)
from drillyard.measurement.lanes import Lanes
from drillyard.measurement.parsed_log import LogEvent

_PIECE: Final = 1 << 20
_LARGEST_OBJECT: Final = 16 << 20
_OPENING: Final = re.compile(rb'"log_history"\s*:\s*\[')
_BETWEEN: Final = re.compile(r"[\s,]*")
_DECODER: Final = json.JSONDecoder()
_NONFINITE: Final = re.compile(rb"(?<=[:\s\[,])(NaN|-?Infinity)(?=[\s,}\]])")
_SETTINGS: Final = {
    "logging_steps": "log_interval",
    "max_steps": "total_steps",
    "train_batch_size": "micro_batch_size",
}
_NAMES: Final = {
    "step": ("step",),
    "loss": ("loss", "train/loss"),
    "grad_norm": ("grad_norm",),
    "learning_rate": ("learning_rate",),
    "_tokens_so_far": ("num_input_tokens_seen", "num_tokens"),
}


class HfTrainerState(DocumentFormat):
    """See the module. `records` counts the objects of the history."""

    name = "hf_trainer_state"
    title = "HF trainer_state.json"
    preference = 90
    windowed = True

    @staticmethod
    def matches(head: bytes) -> bool:
        """Whether a file may be a trainer_state.json."""
        return head.lstrip()[:1] == b"{" and (
            b'"log_history"' in head or b'"best_model_checkpoint"' in head
        )

    def read(self, name: str, file: int, stream: Readable) -> ParsedDocument:
        self._name, self._parsed = name, ParsedDocument(lanes=Lanes(file), complete=False)
        head = b""
        opening = None
        while opening is None and len(head) < _LARGEST_OBJECT and (piece := self._more(stream)):
            head += piece
            opening = _OPENING.search(head)
        if opening is not None:
            tail = self._history(head[opening.end() - 1 :], stream)
            self._settings(head[: opening.start()] + b'"log_history": [' + tail)
        return self._parsed

    def _more(self, stream: Readable) -> bytes:
        piece = stream.read(_PIECE)
        self._parsed.bytes += len(piece)
        return piece

    def _history(self, rest: bytes, stream: Readable) -> bytes:
        """Read the list, of which `rest` has the opening bracket; returns what begins with the
        closing one."""
        flat = True
        searched = 0
        while True:
            closing = _closing(rest, searched) if flat else -1
            if closing >= 0:
                flat = self._entries(rest[1:closing])
                if flat:
                    return rest[closing:] + stream.read(_LARGEST_OBJECT)
            end = rest.rfind(b"},") if flat else -1
            if end > 0:
                flat = self._entries(rest[1 : end + 1])
                rest = b"[" + rest[end + 2 :] if flat else rest
            if not flat:
                rest, closed = self._one_by_one(rest)
                if closed:
                    return rest + stream.read(_LARGEST_OBJECT)
            piece = self._more(stream)
            if not piece or len(rest) > _LARGEST_OBJECT:
                self._entries(rest[1 : rest.rfind(b"}") + 1])
                return b""
            searched = len(rest)
            rest += piece

    def _one_by_one(self, rest: bytes) -> tuple[bytes, bool]:
        """Read the whole objects of a list with nested ones; returns what is left, and whether the
        list is closed."""
        text = rest.decode("utf-8", "surrogateescape")
        entries: list[Any] = []
        position = _BETWEEN.match(text, 1).end()  # type: ignore[union-attr]
        while not (closed := text[position : position + 1] == "]"):
            try:
                entry, position = _DECODER.raw_decode(text, position)
            except (ValueError, RecursionError):
                break
            entries.append(entry if isinstance(entry, dict) else {})
            position = _BETWEEN.match(text, position).end()  # type: ignore[union-attr]
        self._rows(entries)
        left = text[position:].encode("utf-8", "surrogateescape")
        return (left if closed else b"[" + left), closed

    def _entries(self, text: bytes) -> bool:
        """Read objects with commas between them; False if they are not whole."""
        try:
            entries = _load_list(text)
        except ValueError:
            return False
        self._rows([entry if isinstance(entry, dict) else {} for entry in entries])
        return True

    def _rows(self, entries: list[dict[str, Any]]) -> None:
        if not entries:
            return
        columns: dict[str, Any] = dict(gather(entries, _NAMES))
        count = len(entries)
        step = columns.get("step", np.full(count, np.nan))
        trained = np.array(["loss" in entry or "train/loss" in entry for entry in entries])
        trained &= (step >= 0) & (step < LARGEST_STEP)
        columns["step"] = np.where(trained, step, -1).astype(np.int64)
        columns["line"] = np.arange(self._parsed.records + 1, self._parsed.records + count + 1)
        append_rows(self._parsed.lanes.lane(NOWHERE), columns, trained)
        for index in np.flatnonzero(~trained).tolist():
            self._other(entries[index], self._parsed.records + index + 1)
        self._parsed.records += count

    def _other(self, entry: dict[str, Any], line: int) -> None:
        number = entry.get("step")
        step = (
            int(number) if isinstance(number, int | float) and 0 <= number < LARGEST_STEP else None
        )
        if "eval_loss" in entry:
            values = {"loss": entry["eval_loss"]}
            event = LogEvent(
                "evaluation", None, self._parsed.lanes.file, line, step=step, values=values
            )
            self._parsed.events.append((NOWHERE, event))
        if isinstance(entry.get("train_runtime"), int | float):
            self._parsed.facts.learn(
                f"{self._name}:{line}", train_runtime_seconds=float(entry["train_runtime"])
            )

    def _settings(self, document: bytes) -> None:
        try:
            settings = load(document)
        except ValueError:
            return
        self._parsed.complete = True
        place = f"{self._name} (after log_history)"
        for key, fact in _SETTINGS.items():
            if isinstance(value := settings.get(key), int | float) and 1 <= value < LARGEST_STEP:
                self._parsed.facts.learn(place, **{fact: int(value)})


def _closing(text: bytes, since: int) -> int:
    """Find the bracket that closes a list after an object, or an empty one; -1 if none. Three times
    as fast as a regex: single characters are searched by vector instructions."""
    at = text.find(b"]", since)
    while at >= 0:
        before = at - 1
        while text[before : before + 1].isspace():
            before -= 1
        if text[before : before + 1] in (b"}", b"["):
            return at
        at = text.find(b"]", at + 1)
    return -1


def _load_list(text: bytes) -> list[Any]:
    try:
        entries = parsed_json(b"[" + text + b"]")
    except ValueError:
        # Python's writer emits NaN and Infinity, which JSON does not have: as text they are numbers
        # again later.
        quoted, count = _NONFINITE.subn(rb'"\1"', text)
        if not count:
            raise
        entries = parsed_json(b"[" + quoted + b"]")
    return entries if isinstance(entries, list) else []
