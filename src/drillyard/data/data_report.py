"""Report on the data before a GPU is paid for: statistics, warnings about rows, and a preview of
samples.

Counts come from the caches' manifests, so a warning about a row appears on every start, not only on
the one that tokenised it. The check that reads all documents (`overlap_warnings`: 16 bytes per
document) runs only before training.

In the preview trained tokens are green, context tokens are dim, and documents alternate between two
shades of background.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from drillyard.config.problems import remote_scheme
from drillyard.data.file_readers import kind_of
from drillyard.data.mapped_sequences import IGNORED, Batch, Sequences
from drillyard.data.raw_batches import format_location

if TYPE_CHECKING:
    from rich.text import Text
    from tokenizers import Tokenizer

_COUNTED = (
    "at_fault",
    "dropped",
    "truncated",
    "split",
    "empty",
    "pieces_without_loss",
    "special_tokens_as_text",
)
_WARNINGS = {
    "without_assistant_turn": ("have no assistant turn, so nothing is learnt from them"),
    "without_loss": (
        "have no token that carries loss within the sequence length, so nothing is learnt from them"
    ),
    "dropped": "are longer than data.sequence_length and dropped (data.too_long: drop)",
    "begins_with_assistant": (
        "have an answer before any question, which the chat template cannot be asked for: that turn"
        " is not learnt"
    ),
    "empty_answer": (
        "have an answer of which the chat template renders nothing, so that turn is not learnt"
    ),
    "system_replaced": (
        "have a system message that lists the tools: the tools are taken from it, and its text is"
        " not used"
    ),
    "broken_call": "have a function call that cannot be read, so that turn is not learnt",
    "truncated": "are longer than data.sequence_length and truncated (data.too_long: truncate)",
    "empty": "are empty and dropped",
    "tools_not_rendered": "list tools that the chat template ignores: the model will not see them",
    "cut_by_turn": (
        "became several documents, because the chat template renders a turn differently when others"
        " follow"
    ),
}
_NOT_RENDERED = "not_rendered:"
_KINDS = {
    "content": "text",
    "reasoning": "thoughts (reasoning_content)",
    "think": "thoughts (in <think>)",
    "tool_calls": "function calls",
}
_ROWS_AT_ONCE = 1 << 22
_BACKGROUNDS = ("", " on grey11")


@dataclass
class DataReport:
    """Counts, fill rate and sizes of each part, and notes for the user."""

    parts: dict[str, dict[str, Any]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, name: str, path: str, sequences: Sequences) -> None:
        """Add a part; `path` is its source's, which names places in a single file."""
        self.parts[name] = {
            "sequences": len(sequences),
            "tokens": sequences.num_tokens,
            "loss_tokens": sequences.num_valid_tokens,
            "fill_rate": sequences.fill_rate,
            **sequences.counts,
        }
        self.notes += row_warnings(name, path, sequences)

    def lines(self) -> list[str]:
        """One line per part, then the notes."""
        lines = []
        for name, part in self.parts.items():
            line = (
                f"{name}: {part.get('documents', 0):,} documents, {part['tokens']:,} tokens"
                f" ({part['loss_tokens']:,} with loss) in {part['sequences']:,} sequences,"
                f" {100 * part['fill_rate']:.1f} % filled"
            )
            counts = [f"{part[key]:,} {key.replace('_', ' ')}" for key in _COUNTED if part.get(key)]
            lines.append(f"{line}; {', '.join(counts)}" if counts else line)
        return lines + self.notes


def row_warnings(name: str, path: str, sequences: Sequences) -> Iterator[str]:
    """Warnings about rows of a part that are not trained as the user may expect, with their count
    and first place."""
    rows = sequences.counts.get("rows", 0)
    lost = sorted(key for key in sequences.counts if key.startswith(_NOT_RENDERED))
    if count := sequences.counts.get("at_fault", 0):
        yield (
            f"{name}: {count:,} of {rows:,} rows are at fault and left out; the first is"
            f" {first_place('at_fault', path, sequences)}{sequences.first_fault}"
        )
    for key in (*_WARNINGS, *lost):
        if count := sequences.counts.get(key, 0):
            what = _WARNINGS.get(key) or _lost_text(key)
            yield (
                f"{name}: {count:,} of {rows:,} rows {what}; the first is"
                f" {first_place(key, path, sequences)}"
            )


def first_place(key: str, path: str, sequences: Sequences) -> str:
    """The file and line of the first row of a count; `path` is its source's."""
    return _place(path, *sequences.firsts[key])


def _lost_text(key: str) -> str:
    """What a count `not_rendered:ROLE:KIND` says of its rows."""
    _, role, kind = key.split(":")
    return (
        f"have {_KINDS[kind]} of role {role} that no document has as the chat template renders it:"
        " the model does not see it"
    )


def overlap_warnings(
    name: str, path: str, held_out: Sequences, training: Sequence[tuple[str, Sequences]]
) -> Iterator[str]:
    """A warning for each training source, given with its path, that has rows of a held-out part.

    Rows are equal if their prompts are, or their texts or messages in formats without prompts.
    """
    hashes, places = held_out.documents[:, 0], held_out.documents[:, 1]
    for train_path, source in training:
        shared = np.zeros(len(hashes), np.bool_)
        first = None
        for begin in range(0, len(source.documents), _ROWS_AT_ONCE):
            some = source.documents[begin : begin + _ROWS_AT_ONCE]
            found = np.isin(some[:, 0], hashes)
            if found.any():
                first = first if first is not None else some[np.argmax(found)]
                shared |= np.isin(hashes, some[found, 0])
        if first is not None:
            same = places[np.argmax(hashes == first[0])]
            yield (
                f"{name}: {len(np.unique(places[shared])):,} of {len(np.unique(places)):,} held-out"
                f" rows are in the training source {source.name!r} too, so their results do not"
                f" measure new data; the first is {_place(path, *held_out.place_of(int(same)))},"
                f" which is {_place(train_path, *source.place_of(int(first[1])))}"
            )


def too_few_sequences(
    num_sequences: int, num_documents: int, global_batch_size: int
) -> Iterator[str]:
    """A warning if the training data do not fill one step."""
    if num_sequences < global_batch_size:
        yield (
            f"the training data are {num_sequences:,} sequences ({num_documents:,} documents),"
            f" fewer than the global batch of {global_batch_size:,}: no step sees a full batch of"
            " different sequences. Add data, or lower training.global_batch_size (micro_batch_size"
            " x ranks x gradient_accumulation)"
        )


def file_of_source(path: str, name: str) -> str:
    """A file of the source at `path` by its name there: the source itself, a file below it, or the
    name of a data set."""
    if not name:
        return path
    if remote_scheme(path) is not None:
        return f"{path.rstrip('/')}/{name}"
    return str(Path(path) / name) if kind_of(Path(name)) is not None else name


def _place(path: str, name: str, unit: str, number: int) -> str:
    return format_location((file_of_source(path, name), unit), number)


def trained_tokens(batch: Batch, row: int) -> npt.NDArray[np.bool_]:
    """Whether the token at each position is learnt, as the label of the position before. Shape
    [T]."""
    return np.append(False, batch.labels[row, :-1] != IGNORED)


def spans_of(batch: Batch, row: int) -> list[tuple[int, int, int, bool]]:
    """The sequence without padding as spans (document, begin, end, learnt) of tokens that all are
    learnt, or none."""
    documents, learnt = batch.document_ids[row], trained_tokens(batch, row)
    used = int(np.count_nonzero(documents >= 0))
    change = (np.diff(documents[:used]) != 0) | (np.diff(learnt[:used]) != 0)
    bounds = [0, *(np.flatnonzero(change) + 1).tolist(), used]
    return [
        (int(documents[begin]), begin, end, bool(learnt[begin]))
        for begin, end in pairwise(bounds)
        if begin < end
    ]


def loss_problems(batch: Batch, row: int, completions_only: bool) -> list[str]:
    """Problems with the loss of a sequence's documents.

    The first token of a document is never learnt (nothing precedes it), so a piece of one token has
    no loss. With loss on completions, a document that is learnt from its second token on has no
    prompt.
    """
    documents, learnt = batch.document_ids[row], trained_tokens(batch, row)
    found = []
    for document in range(int(documents.max()) + 1):
        flags = learnt[documents == document]
        if len(flags) < 2:
            continue
        if not flags.any():
            found.append(f"document {document + 1}: none of its {len(flags)} tokens carries loss")
        elif completions_only and flags[1:].all():
            found.append(
                f"document {document + 1}: all of its {len(flags)} tokens carry loss, though"
                " loss_on is completion"
            )
    return found


def coloured_tokens(batch: Batch, row: int, tokenizer: Tokenizer) -> Text:
    """One sequence as coloured text."""
    from rich.text import Text

    text = Text()
    for document, begin, end, learnt in spans_of(batch, row):
        if begin == 0 or batch.document_ids[row, begin - 1] != document:
            text.append("\n" if begin else "")
            text.append(f"[document {document + 1}] ", style="bold cyan")
        tokens = tokenizer.decode(
            batch.input_ids[row, begin:end].tolist(), skip_special_tokens=False
        )
        text.append(tokens, ("green" if learnt else "dim") + _BACKGROUNDS[document % 2])
    if padding := int(np.count_nonzero(batch.document_ids[row] < 0)):
        text.append(f"\n[padding: {padding} tokens]", style="red")
    return text
