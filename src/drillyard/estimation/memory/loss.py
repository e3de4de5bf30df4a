"""The loss of the trainer by what it keeps: models/loss.py on tensors without contents.

Chunk by chunk: logits in compute precision, their log-softmax in fp32 (whose storage becomes the
gradient's), that gradient in compute precision, and from it the gradients of the chunk's rows and
of the head. On a GPU the gradient takes the logits' place (models/loss_kernel.py). The head's
gradient is summed in the precision in which FSDP2 reduces it where the parameter's `grad_dtype`
asks for it (from torch 2.15 on), else in compute precision; a chunk's part of it is a tensor only
where the product cannot add to a wider sum (models/head_product.py). Nothing of a chunk is left
when the next one is made, but the sums.
"""

from __future__ import annotations

from dataclasses import dataclass

from drillyard.estimation.memory.autograd import (
    MemoryKind,
    OperatorNode,
    SizedTensor,
    Tape,
    WeightNode,
)
from drillyard.estimation.memory.operators import FP32


@dataclass(slots=True)
class PendingBackward:
    """Tensors that wait for backward: gradients of the rows that carry loss and of the head, and
    the operator that made the hidden states, where backward continues."""

    rows: SizedTensor | None
    head: SizedTensor | None
    hidden: OperatorNode | WeightNode | None = None


def loss(
    e: Tape,
    *,
    rows: int,
    chunk: int,
    hidden_size: int,
    vocab_size: int,
    trains_head: bool,
    head_gradient_itemsize: int,
    steps: str,
    in_place: bool,
) -> PendingBackward:
    """Forward of the loss over `rows` rows, `chunk` at a time, with `steps` (LOGITS_STEPS) after
    the head."""
    trained = hidden_size * vocab_size if trains_head else 0
    before, e.kind = e.kind, MemoryKind.LOSS
    hidden_gradient = e.empty(rows * hidden_size)
    of_head: SizedTensor | None = None
    while rows > 0:
        size = min(chunk, rows)
        rows -= size
        logits = _logits(e, size * vocab_size, steps)
        logits_gradient = logits[0] if in_place else _logits_gradient(e, size * vocab_size)
        gradient = logits_gradient
        for _ in steps:
            gradient = e.empty(size * vocab_size)
        del logits[1:]
        of_head = of_head or _gradient_of_head(e, trained, head_gradient_itemsize)
        if head_gradient_itemsize != e.itemsize and not in_place:
            # The chunk's part, gone when it is added.
            _gradient_of_head(e, trained, e.itemsize)
        of_rows = e.empty(size * hidden_size)
        del gradient, logits, logits_gradient, of_rows
    e.kind = before
    return PendingBackward(hidden_gradient, of_head)


def _logits(e: Tape, elements: int, steps: str) -> list[SizedTensor]:
    """The product with the head and what follows it: what of them stays."""
    logits, kept = e.empty(elements), []
    for step in steps:
        logits = e.empty(elements)
        if step == "t":
            kept.append(logits)
    return [logits, *kept]


def _logits_gradient(e: Tape, elements: int) -> SizedTensor:
    """The gradient as torch's own operators make it, over a log-softmax."""
    wide = e.empty(elements, FP32) if e.itemsize < FP32 else None
    log_probabilities = e.empty(elements, max(FP32, e.itemsize))
    del wide
    return e.empty(elements) if e.itemsize < FP32 else log_probabilities


def _gradient_of_head(e: Tape, elements: int, itemsize: int) -> SizedTensor | None:
    if not elements:
        return None
    before, e.kind = e.kind, MemoryKind.WHOLE_GRADIENTS
    gradient = e.empty(elements, itemsize)
    e.kind = before
    return gradient
