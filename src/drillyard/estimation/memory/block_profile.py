"""Memory that one block adds, in forward and in backward, computed once for each kind of block.

The block runs in a ledger of its own; the results are differences, which a step adds to whatever
else is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from drillyard.config.kernel_rules import MEMORY_BUDGET
from drillyard.estimation.memory.autograd import (
    Ledger,
    MemoryKind,
    SizedTensor,
    Tape,
    gradient_sink,
)
from drillyard.estimation.memory.block_forward import BlockInputs, forward
from drillyard.modelspec import Block


class MemoryDelta:
    """Bytes more or less, in all and by kind."""

    __slots__ = ("by_kind", "total")

    def __init__(self, by_kind: Sequence[int]) -> None:
        self.by_kind = tuple(
            (MemoryKind(number), nbytes) for number, nbytes in enumerate(by_kind) if nbytes
        )
        self.total = sum(by_kind)

    def of(self, kind: MemoryKind) -> int:
        return next((nbytes for number, nbytes in self.by_kind if number == kind), 0)


@dataclass(frozen=True, slots=True)
class BlockProfile:
    """Bytes by kind, each against what was there before.

    `forward_peak` and `kept`: against the moment before the block, with its input held by the
    caller; `kept` counts its result in and its input out where only the caller held it.
    `backward_peak` and `released`: against the moment when the gradient of the result has arrived;
    `released` counts the gradients of the input and of the weights in.
    """

    forward_peak: MemoryDelta
    kept: MemoryDelta
    keeps_input: bool
    """Whether the input stays in memory when its caller lets it go."""
    recompute_peak: MemoryDelta | None
    backward_peak: MemoryDelta
    released: MemoryDelta


@lru_cache(maxsize=1024)
def profile_block(block: Block, run: BlockInputs) -> BlockProfile:
    """Memory that `block` adds. It does not depend on how the model is cut over ranks, so it is
    cached."""
    if run.mode == "memory-budget":
        return _limited(block, run)
    if run.fuses:
        return _fused(block, run)
    ledger, mode, itemsize = Ledger(), run.mode, run.itemsize
    e = Tape(
        ledger,
        itemsize,
        accumulates=run.accumulates,
        skips_first_product=run.skips_first_product,
        gradient_itemsize=run.gradient_itemsize,
    )
    x = e.empty(run.rows * run.hidden_size)
    # Held to the end: the gradient of the input stays, for the block before.
    source = gradient_sink() if run.from_weights else None
    x.node = source
    start = _now(ledger)
    e.saves = mode == "none"
    e.kept_products = [] if mode == "selective" else None
    out: SizedTensor | None = forward(e, block, run, x)
    assert out is not None
    forward_peak = _since(ledger.at_peak, start)
    held = None if mode == "none" else x.storage
    node = out.node
    with_input = ledger.total
    x = SizedTensor(x.elements, itemsize, None, x.node)
    keeps_input = ledger.total == with_input
    kept = _since(_now(ledger), start)
    out = None
    e.kind = MemoryKind.TEMPORARIES
    gradient: SizedTensor | None = e.empty(x.elements)
    before = _now(ledger)
    ledger.reset_peak()
    recompute_peak = None
    # Recomputation ends before the last product, whose input is the last tensor that is kept: where
    # the policy has kept its result, it is not taken.
    not_taken = e.kept_products[-1] if e.kept_products and e.kept_last_product else None
    if mode != "none":
        x = SizedTensor(x.elements, itemsize, held, x.node)
        e.recompute()
        e.kind = MemoryKind.ACTIVATIONS
        node = forward(e, block, run, x).node
        recompute_peak = _since(ledger.at_peak, before)
        ledger.reset_peak()
    assert node is not None
    node.gradient, gradient = gradient, None
    del node
    e.backward()
    backward_peak = _since(ledger.at_peak, before)
    del x, held, not_taken
    released = _since(_now(ledger), before)
    del source
    return BlockProfile(forward_peak, kept, keeps_input, recompute_peak, backward_peak, released)


def _fused(block: Block, run: BlockInputs) -> BlockProfile:
    """A compiled block at its least: what is between products and attention is not kept but
    computed again with them.

    It keeps its input and the results of products and attention, all but the last of which is its
    own result.
    """
    eager = replace(run, fuses=False)
    found = profile_block(block, eager)
    ledger = Ledger()
    e = Tape(ledger, run.itemsize)
    x = e.empty(run.rows * run.hidden_size)
    e.saves, e.kept_products, e.keeps_every_product = False, [], True
    result = forward(e, block, run, x).elements * run.itemsize
    least = ledger.total - result
    without = found if run.mode == "none" else profile_block(block, replace(eager, mode="none"))
    less = max(0, without.kept.total - least)
    if run.mode == "none":
        return replace(found, kept=_plus(found.kept, -less), released=_plus(found.released, less))
    assert found.recompute_peak is not None
    return replace(
        found,
        recompute_peak=_plus(found.recompute_peak, -less),
        backward_peak=_plus(found.backward_peak, -less),
    )


def _limited(block: Block, run: BlockInputs) -> BlockProfile:
    """A compiled block that keeps MEMORY_BUDGET of what it would keep beside its input; at most all
    of the rest is there at once when its own backward computes it again."""
    found = profile_block(block, replace(run, mode="none"))
    result = run.rows * run.hidden_size * run.itemsize
    less = max(0, int((1 - MEMORY_BUDGET) * (found.kept.total - result)))
    return replace(
        found,
        kept=_plus(found.kept, -less),
        backward_peak=_plus(found.backward_peak, less),
        released=_plus(found.released, less),
    )


def _plus(difference: MemoryDelta, nbytes: int) -> MemoryDelta:
    """A difference with that many more bytes of activations."""
    by_kind = dict(difference.by_kind)
    by_kind[MemoryKind.ACTIVATIONS] = by_kind.get(MemoryKind.ACTIVATIONS, 0) + nbytes
    return MemoryDelta([by_kind.get(kind, 0) for kind in MemoryKind])


def _now(ledger: Ledger) -> tuple[int, ...]:
    return tuple(ledger.live)


def _since(now: Sequence[int], before: Sequence[int]) -> MemoryDelta:
    return MemoryDelta([a - b for a, b in zip(now, before, strict=True)])
