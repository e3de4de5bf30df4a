"""A model of eager PyTorch in which tensors have sizes and no contents: storages, saved tensors,
the order of backward.

A `Ledger` counts the bytes alive by kind, and keeps a copy of the moment when they were most. A
`CountedStorage` takes its bytes when it is made and gives them back with the last reference to it,
as a tensor's storage does: the reference counts of the interpreter that estimates are those of the
interpreter that is estimated.

Operators (operators.py) make `SizedTensor`s through a `Tape`, with what they save and what their
backward makes. The rules are autograd's own:

- A saved tensor lives until the backward of its operator has run (torch/csrc/autograd/engine.cpp,
  release_variables).
- Backward runs operators in the reverse of the order in which forward made them (the engine's ready
  queue is ordered by sequence number), gradients of weights as soon as they are there.
- Where two gradients meet, their sum is a new tensor and both go. (Without a dispatch mode the
  engine adds in place if nothing else holds the first; what is estimated is the larger of the two.)

Everything that forward's Python code holds on to (local variables, arguments) is held here by code
of the same shape, so a tensor dies where it would die there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum


class MemoryKind(IntEnum):
    """Purpose of bytes."""

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
    """Tensors that forward makes and backward needs, or that forward needs for the moment."""
    LOSS = 10
    """Logits of a chunk, what the loss makes of them, and gradients of the hidden rows that wait
    for backward."""
    TEMPORARIES = 11
    """Tensors that backward makes: gradients of activations, recomputed activations and
    intermediate ones."""


class Ledger:
    """Bytes alive by kind, and a copy of them from when their sum was greatest since
    `reset_peak`."""

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


Gradients = Sequence["SizedTensor | None"]
Backward = Callable[["SizedTensor"], Gradients]


class SizedTensor:
    """`elements` of `itemsize` bytes. `node` is the operator it came from where it carries
    gradient, else None."""

    __slots__ = ("elements", "itemsize", "node", "storage")

    def __init__(
        self,
        elements: int,
        itemsize: int,
        storage: CountedStorage | None,
        node: OperatorNode | WeightNode | None,
    ) -> None:
        self.elements = elements
        self.itemsize = itemsize
        self.storage = storage
        self.node = node


class WeightNode:
    """The end of a backward: a parameter. Its bytes are FSDP's; here only its gradient is held."""

    __slots__ = ("accumulates", "gradient")

    def __init__(self, *, accumulates: bool = False) -> None:
        self.gradient: SizedTensor | None = None
        self.accumulates = accumulates
        """Whether there is a gradient of an earlier micro-batch already: new ones are added to it
        and go."""


class OperatorNode:
    """An operator in the graph: whose gradients it makes, what it saved, and the gradient that has
    arrived so far."""

    __slots__ = ("backward", "gradient", "inputs", "saved")

    def __init__(
        self,
        inputs: tuple[OperatorNode | WeightNode | None, ...],
        saved: tuple[CountedStorage | None, ...],
        backward: Backward,
    ) -> None:
        self.inputs = inputs
        self.saved = saved
        self.backward: Backward | None = backward
        self.gradient: SizedTensor | None = None


def gradient_sink() -> OperatorNode:
    """Node at which a gradient arrives and stays, in place of the operators before the first
    one."""
    return OperatorNode((), (), lambda gradient: ())


class SplitNode(OperatorNode):
    """An operator with several results that share its input's storage; backward joins their
    gradients in a copy."""

    __slots__ = ("slots",)

    def __init__(self, source: OperatorNode | WeightNode, count: int) -> None:
        super().__init__((source,), (), lambda g: (g,))
        self.slots = [OperatorNode((), (), lambda g: ()) for _ in range(count)]


class Tape:
    """Makes tensors of a kind in a ledger and records what backward will do."""

    def __init__(
        self,
        ledger: Ledger,
        itemsize: int,
        *,
        accumulates: bool = False,
        skips_first_product: bool = False,
        gradient_itemsize: int | None = None,
    ) -> None:
        self.ledger = ledger
        self.gradient_itemsize = gradient_itemsize
        """Bytes of an element to which gradients of weights are widened as they arrive; None: they
        stay as they are."""
        self.skips_first_product = skips_first_product
        self.itemsize = itemsize
        """Bytes of an element in compute precision."""
        self.kind = MemoryKind.ACTIVATIONS
        self.tape: list[OperatorNode] = []
        self.weights: list[WeightNode] = []
        """Every trained weight that was used: their gradients stay."""
        self.accumulates = accumulates
        self.saves = True
        """False in a forward that will be done again in backward: nothing is kept for it."""
        self.kept_products: list[CountedStorage] | None = None
        """Under selective checkpointing: results that are kept in forward, and then taken from
        here."""
        self.keeps_every_product = False
        self.recomputes = False
        self._products_seen = int(skips_first_product)

    def empty(self, elements: int, itemsize: int | None = None) -> SizedTensor:
        """New memory of the present kind, without gradient."""
        itemsize = self.itemsize if itemsize is None else itemsize
        return SizedTensor(
            elements, itemsize, CountedStorage(self.ledger, elements * itemsize, self.kind), None
        )

    def weight(self, elements: int, *, trained: bool) -> SizedTensor:
        """A gathered parameter in compute precision."""
        if not trained:
            return SizedTensor(elements, self.itemsize, None, None)
        self.weights.append(WeightNode(accumulates=self.accumulates))
        return SizedTensor(elements, self.itemsize, None, self.weights[-1])

    def product(self, elements: int, itemsize: int, *, always_kept: bool = False) -> SizedTensor:
        """The result of a matrix product or (`always_kept`) of attention.

        Selective checkpointing keeps every second product and all attention
        (parallel/parallelize.py), and finds them there when it recomputes.
        """
        if self.kept_products is None:
            return self.empty(elements, itemsize)
        if not always_kept and not self.keeps_every_product:
            self._products_seen += 1
            if self._products_seen % 2 == 0:
                return self.empty(elements, itemsize)
        if self.recomputes:
            return SizedTensor(elements, itemsize, self.kept_products.pop(0), None)
        out = self.empty(elements, itemsize)
        assert out.storage is not None
        self.kept_products.append(out.storage)
        return out

    def merge_last_product(self) -> None:
        """Compiled, a product that is only added to another one is not kept: their sum is, in the
        place of both."""
        if self.keeps_every_product and self.kept_products:
            self.kept_products.pop()

    @property
    def kept_last_product(self) -> bool:
        """Whether the policy has kept the product that was made last."""
        return self._products_seen % 2 == 1

    def recompute(self) -> None:
        """From here on forward runs a second time, within backward."""
        self.saves, self.recomputes, self._products_seen = True, True, int(self.skips_first_product)

    def made(
        self,
        out: SizedTensor,
        inputs: Sequence[SizedTensor],
        saved: Sequence[SizedTensor | None],
        backward: Backward,
    ) -> SizedTensor:
        """`out` as the result of an operator on `inputs` that keeps `saved` for its `backward`.

        `backward` takes the gradient of `out` and returns those of `inputs`. It must hold no
        tensor: what it needs of them are numbers. Without an input that carries gradient nothing is
        recorded and nothing is kept.
        """
        if all(tensor.node is None for tensor in inputs):
            return out
        node = OperatorNode(
            tuple(tensor.node for tensor in inputs),
            tuple(tensor.storage for tensor in saved if tensor is not None) if self.saves else (),
            backward,
        )
        if self.saves:
            self.tape.append(node)
        out.node = node
        return out

    def split(self, x: SizedTensor, sizes: Sequence[int]) -> list[SizedTensor]:
        """Pieces of x, sharing its storage, whose gradients come back joined in one copy
        (torch.split, torch.chunk)."""
        pieces = [SizedTensor(size, x.itemsize, x.storage, None) for size in sizes]
        if x.node is not None:
            joint = SplitNode(x.node, len(sizes))
            whole, itemsize = x.elements, x.itemsize
            joint.backward = lambda g: (self.empty(whole, itemsize),)
            for tensor, slot in zip(pieces, joint.slots, strict=True):
                tensor.node = slot
            if self.saves:
                self.tape.append(joint)
        return pieces

    def backward(self) -> None:
        """Run the recorded operators from the last to the first, wherever a gradient has
        arrived."""
        before, self.kind = self.kind, MemoryKind.TEMPORARIES
        while self.tape:
            self._run(self.tape.pop())
        self.kind = before

    def _run(self, node: OperatorNode) -> None:
        if isinstance(node, SplitNode):
            node.gradient = next(
                (slot.gradient for slot in node.slots if slot.gradient is not None), None
            )
        gradient, node.gradient = node.gradient, None
        backward, node.backward = node.backward, None
        if gradient is None or backward is None:
            node.saved = ()
            return
        gradients = list(backward(gradient))
        for number, target in enumerate(node.inputs):
            if isinstance(target, WeightNode):
                gradients[number] = self._widened(gradients[number])
        node.saved = ()
        if isinstance(node, SplitNode):
            node.slots.clear()
        del gradient
        for number, target in enumerate(node.inputs):
            arrived, gradients[number] = gradients[number], None
            if target is not None and arrived is not None:
                self._arrive(target, arrived)

    def _widened(self, gradient: SizedTensor | None) -> SizedTensor | None:
        if gradient is None or self.gradient_itemsize in (None, gradient.itemsize):
            return gradient
        return self.empty(gradient.elements, self.gradient_itemsize)

    def _arrive(self, target: OperatorNode | WeightNode, gradient: SizedTensor) -> None:
        if isinstance(target, WeightNode) and gradient.storage is not None:
            gradient.storage.becomes(MemoryKind.WHOLE_GRADIENTS)
        if target.gradient is None:
            if isinstance(target, OperatorNode) or not target.accumulates:
                target.gradient = gradient
        elif isinstance(target, OperatorNode):
            target.gradient = self.empty(gradient.elements, gradient.itemsize)
