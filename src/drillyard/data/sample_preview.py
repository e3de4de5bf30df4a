"""A preview of packed samples: which tokens carry loss, where documents begin, and the padding.

Learnt tokens are green, context tokens are dim, and documents alternate between two shades of background. A document in
which every token, or no token, carries loss although only completions should makes fine-tuning runs fail silently; the
preview shows it before a GPU is paid for.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from drillyard.data.mapped_sequences import IGNORED, Batch

if TYPE_CHECKING:
    from rich.text import Text
    from tokenizers import Tokenizer

_BACKGROUNDS = ("", " on grey11")


@dataclass(frozen=True)
class TokenSpan:
    """Consecutive tokens [begin, end) of one document that all are learnt, or all are not."""

    document: int
    begin: int
    end: int
    learnt: bool


def trained_tokens(batch: Batch, row: int) -> npt.NDArray[np.bool_]:
    """Whether the token at each position is learnt, as the label of the position before. Shape [T]."""
    learnt = np.zeros(batch.labels.shape[1], np.bool_)
    learnt[1:] = batch.labels[row, :-1] != IGNORED
    return learnt


def spans_of(batch: Batch, row: int) -> list[TokenSpan]:
    """The sequence without padding, cut where a document begins, or where loss starts or ends."""
    documents, learnt = batch.document_ids[row], trained_tokens(batch, row)
    used = int(np.count_nonzero(documents >= 0))
    if used == 0:
        return []
    change = (np.diff(documents[:used]) != 0) | (np.diff(learnt[:used]) != 0)
    bounds = [0, *(np.flatnonzero(change) + 1).tolist(), used]
    return [TokenSpan(int(documents[begin]), begin, end, bool(learnt[begin])) for begin, end in pairwise(bounds)]


def loss_problems(batch: Batch, row: int, completions_only: bool) -> list[str]:
    """Problems with the loss of a sequence's documents.

    The first token of a document is never learnt (nothing precedes it). With loss on completions, a document that is
    learnt from its second token on has no prompt.
    """
    documents, learnt = batch.document_ids[row], trained_tokens(batch, row)
    found = []
    for document in range(int(documents.max()) + 1):
        flags = learnt[documents == document]
        if not flags.any():
            found.append(f"document {document + 1}: none of its {len(flags)} tokens carries loss")
        elif completions_only and flags[1:].all():
            found.append(
                f"document {document + 1}: all of its {len(flags)} tokens carry loss, though loss_on is completion"
            )
    return found


def coloured_tokens(batch: Batch, row: int, tokenizer: Tokenizer) -> Text:
    """One sequence as coloured text."""
    from rich.text import Text

    text = Text()
    for span in spans_of(batch, row):
        if span.begin == 0 or batch.document_ids[row, span.begin - 1] != span.document:
            text.append("\n" if span.begin else "")
            text.append(f"[document {span.document + 1}] ", style="bold cyan")
        ids = batch.input_ids[row, span.begin : span.end].tolist()
        style = "green" if span.learnt else "dim"
        text.append(tokenizer.decode(ids, skip_special_tokens=False), style + _BACKGROUNDS[span.document % 2])
    padding = int(np.count_nonzero(batch.document_ids[row] < 0))
    if padding:
        text.append(f"\n[padding: {padding} tokens]", style="red")
    return text
