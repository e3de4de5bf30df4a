"""A model of eager PyTorch in which tensors have sizes and no contents: storages, saved tensors, the order of backward.

Operators (operators.py) make `SizedTensor`s through an `Tape`, and say what they save and what their backward makes.
The rules are autograd's own:

- A saved tensor lives until the backward of its operator has run (torch/csrc/autograd/engine.cpp, release_variables).
- Backward runs operators in the reverse of the order in which forward made them (the engine's ready queue is ordered by
  sequence number), gradients of weights as soon as they are there.
- Where two gradients meet, their sum is a new tensor and both go. (Without a dispatch mode the engine adds in place if
  nobody else holds the first; what is predicted is the larger of the two.)

Everything that forward's Python code holds on to (local variables, arguments) is held here by code of the same shape,
so a tensor dies where it would die there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from drillyard.estimation.memory.ledger import CountedStorage, Ledger, MemoryKind

Gradients = Sequence["SizedTensor | None"]
Backward = Callable[["SizedTensor"], Gradients]


class SizedTensor:
    """`elements` of `itemsize` bytes. `node` is the operator it came from where it carries gradient, else None."""

    __slots__ = ("elements", "itemsize", "node", "storage")

    def __init__(
        self, elements: int, itemsize: int, storage: CountedStorage | None, node: OperatorNode | WeightNode | None
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
        """Whether there is a gradient of an earlier micro-batch already: new ones are added to it and go."""


class OperatorNode:
    """An operator in the graph: whose gradients it makes, what it saved, and the gradient that has arrived so far."""

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
    """Where a gradient arrives and stays: what stands for the operators before the first one that is looked at."""
    return OperatorNode((), (), lambda gradient: ())


class SplitNode(OperatorNode):
    """An operator with several results that share its input's storage; backward joins their gradients in a copy."""

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
    ) -> None:
        self.ledger = ledger
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
        """Under selective checkpointing: results that are kept in forward, and then taken from here."""
        self.keeps_every_product = False
        self.recomputes = False
        self._products_seen = int(skips_first_product)

    def empty(self, elements: int, itemsize: int | None = None) -> SizedTensor:
        """New memory of the present kind, without gradient."""
        itemsize = self.itemsize if itemsize is None else itemsize
        return SizedTensor(elements, itemsize, CountedStorage(self.ledger, elements * itemsize, self.kind), None)

    def weight(self, elements: int, *, trained: bool) -> SizedTensor:
        """A gathered parameter in compute precision."""
        if not trained:
            return SizedTensor(elements, self.itemsize, None, None)
        self.weights.append(WeightNode(accumulates=self.accumulates))
        return SizedTensor(elements, self.itemsize, None, self.weights[-1])

    def product(self, elements: int, itemsize: int, *, always_kept: bool = False) -> SizedTensor:
        """The result of a matrix product or (`always_kept`) of attention.

        Selective checkpointing keeps every second product and all attention (parallel/parallelize.py), and finds
        them there when it recomputes.
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

    @property
    def kept_last_product(self) -> bool:
        """Whether the policy has kept the product that was made last."""
        return self._products_seen % 2 == 1

    def recompute(self) -> None:
        """From here on forward runs a second time, within backward."""
        self.saves, self.recomputes, self._products_seen = True, True, int(self.skips_first_product)

    def made(
        self, out: SizedTensor, inputs: Sequence[SizedTensor], saved: Sequence[SizedTensor | None], backward: Backward
    ) -> SizedTensor:
        """`out` as the result of an operator on `inputs` that keeps `saved` for its `backward`.

        `backward` takes the gradient of `out` and returns those of `inputs`. It must hold no tensor: what it needs of
        them are numbers. Without an input that carries gradient nothing is recorded and nothing is kept.
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
        """Pieces of x, sharing its storage, whose gradients come back joined in one copy (torch.split, torch.chunk)."""
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

    def view(self, tensor: SizedTensor) -> SizedTensor:
        """Another tensor on the same storage, of which nothing more needs to be known."""
        return SizedTensor(tensor.elements, tensor.itemsize, tensor.storage, tensor.node)

    def backward(self, first: int = 0) -> None:
        """Run the recorded operators from the last to number `first`, wherever a gradient has arrived."""
        before, self.kind = self.kind, MemoryKind.TEMPORARIES
        while len(self.tape) > first:
            self._run(self.tape.pop())
        self.kind = before

    def _run(self, node: OperatorNode) -> None:
        if isinstance(node, SplitNode):
            node.gradient = next((slot.gradient for slot in node.slots if slot.gradient is not None), None)
        gradient, node.gradient = node.gradient, None
        backward, node.backward = node.backward, None
        if gradient is None or backward is None:
            node.saved = ()
            return
        gradients = list(backward(gradient))
        node.saved = ()
        if isinstance(node, SplitNode):
            node.slots.clear()
        del gradient
        for number, target in enumerate(node.inputs):
            arrived, gradients[number] = gradients[number], None
            if target is not None and arrived is not None:
                self._arrive(target, arrived)

    def _arrive(self, target: OperatorNode | WeightNode, gradient: SizedTensor) -> None:
        if isinstance(target, WeightNode) and gradient.storage is not None:
            gradient.storage.becomes(MemoryKind.WHOLE_GRADIENTS)
        if target.gradient is None:
            if isinstance(target, OperatorNode) or not target.accumulates:
                target.gradient = gradient
        elif isinstance(target, OperatorNode):
            target.gradient = self.empty(gradient.elements, gradient.itemsize)
