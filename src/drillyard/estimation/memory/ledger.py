"""Bytes that are alive, by what they are, and the moment at which they were most.

A `CountedStorage` takes its bytes when it is made and gives them back when the last reference to it is gone, as a
tensor's
storage does: the reference counts of the interpreter that predicts are those of the interpreter that is predicted.
"""

from __future__ import annotations

from enum import IntEnum


class MemoryKind(IntEnum):
    """What bytes are for."""

    PARAMETERS = 0
    """This rank's shards in master precision, padded to a whole number of rows per rank."""
    BUFFERS = 1
    """Tensors that are no parameters (rotary frequencies), whole on each rank."""
    OPTIMIZER = 2
    """AdamW's two moments and its step counts."""
    GRADIENTS = 3
    """Gradients of the shards, after they were reduced."""
    GATHERED = 4
    """Whole weights in compute precision, while their block runs."""
    WHOLE_GRADIENTS = 5
    """Gradients of whole weights, until they are reduced."""
    ALL_GATHER = 6
    """Buffers of gathers: of the shard in compute precision, and of what all ranks send."""
    REDUCE_SCATTER = 7
    """Whole gradients of a block as one buffer in master precision, padded."""
    INPUTS = 8
    """Tokens, positions, labels, masks and rotary tables."""
    ACTIVATIONS = 9
    """What forward makes and backward needs, or what forward needs for the moment."""
    LOSS = 10
    """Logits of a chunk, what the loss makes of them, and gradients of the hidden rows that wait for backward."""
    TEMPORARIES = 11
    """What backward makes: gradients of activations, recomputed activations and what is in between."""


class Ledger:
    """Bytes alive by kind, and a copy of them from when their sum was greatest since `reset_peak`."""

    __slots__ = ("at_peak", "live", "peak", "total")

    def __init__(self) -> None:
        self.live = [0] * len(MemoryKind)
        self.total = 0
        self.peak = 0
        self.at_peak = tuple(self.live)

    def take(self, nbytes: int, kind: MemoryKind) -> None:
        self.live[kind] += nbytes
        self.total += nbytes
        if self.total > self.peak:
            self.peak = self.total
            self.at_peak = tuple(self.live)

    def give(self, nbytes: int, kind: MemoryKind) -> None:
        self.live[kind] -= nbytes
        self.total -= nbytes

    def reset_peak(self) -> None:
        """Forget the peak so far: the next one is sought from here."""
        self.peak = self.total
        self.at_peak = tuple(self.live)


class CountedStorage:
    """Some bytes of the ledger, for as long as anything refers to them."""

    __slots__ = ("kind", "ledger", "nbytes")

    def __init__(self, ledger: Ledger, nbytes: int, kind: MemoryKind) -> None:
        self.ledger = ledger
        self.nbytes = nbytes
        self.kind = kind
        ledger.take(nbytes, kind)

    def becomes(self, kind: MemoryKind) -> None:
        """Count the bytes as another kind from now on."""
        live = self.ledger.live
        live[self.kind] -= self.nbytes
        live[kind] += self.nbytes
        self.kind = kind

    def __del__(self) -> None:
        self.ledger.give(self.nbytes, self.kind)
