"""Operators of a transformer block by what they keep and what their backward makes: the inventory of activations.

Each stands for one or a few operators of PyTorch; what autograd saves is that of tools/autograd/derivatives.yaml.
Sizes are elements; an operator's result has the element size of its input unless said.
"""

from __future__ import annotations

from typing import Final

from drillyard.estimation.memory.autograd import Gradients, SizedTensor, Tape

FP32: Final = 4
BOOL: Final = 1


def to(e: Tape, x: SizedTensor, itemsize: int) -> SizedTensor:
    """A cast; nothing happens where the precision is the same already. Saves nothing."""
    if x.itemsize == itemsize:
        return x
    elements, before = x.elements, x.itemsize
    return e.made(e.empty(elements, itemsize), [x], [], lambda g: (e.empty(elements, before),))


def pointwise(e: Tape, x: SizedTensor, *, saves: str = "input") -> SizedTensor:
    """A function of each element whose backward is one kernel: silu, gelu, tanh, relu. Saves input or result."""
    out = e.empty(x.elements, x.itemsize)
    elements, itemsize = x.elements, x.itemsize
    kept = {"input": x, "result": out, "nothing": None}[saves]
    return e.made(out, [x], [kept], lambda g: (e.empty(elements, itemsize),))


def scaled(e: Tape, x: SizedTensor) -> SizedTensor:
    """Times a number: saves nothing."""
    return pointwise(e, x, saves="nothing")


def shifted(e: Tape, x: SizedTensor) -> SizedTensor:
    """Plus a number: saves nothing, and its gradient is that of the result."""
    return e.made(e.empty(x.elements, x.itemsize), [x], [], lambda g: (g,))


def power(e: Tape, x: SizedTensor, *, of_result: bool = False) -> SizedTensor:
    """x ** n (saves x) or 1 / sqrt(x) (saves the result). Backward: a power, times n, times the gradient."""
    out = e.empty(x.elements, x.itemsize)
    elements, itemsize = x.elements, x.itemsize

    def backward(g: SizedTensor) -> Gradients:
        raised = e.empty(elements, itemsize)
        times = e.empty(elements, itemsize)
        result = e.empty(elements, itemsize)
        del raised, times
        return (result,)

    return e.made(out, [x], [out if of_result else x], backward)


def mean_of_rows(e: Tape, x: SizedTensor, rows: int) -> SizedTensor:
    """The mean along the last dimension: saves nothing; backward divides the gradient, spread over x."""
    elements, itemsize = x.elements, x.itemsize
    return e.made(e.empty(rows, itemsize), [x], [], lambda g: (e.empty(elements, itemsize),))


def times(e: Tape, a: SizedTensor, b: SizedTensor) -> SizedTensor:
    """a * b, the smaller one spread over the larger: each is saved for the gradient of the other."""
    out = e.empty(max(a.elements, b.elements), max(a.itemsize, b.itemsize))
    elements, itemsize = out.elements, out.itemsize
    wanted = [(t.elements, t.itemsize) if t.node is not None else None for t in (a, b)]

    def backward(g: SizedTensor) -> Gradients:
        whole = [None if size is None else e.empty(elements, itemsize) for size in wanted]
        for number, size in enumerate(wanted):
            if size is not None:
                whole[number] = _as_small(e, whole[number], size)
        return whole

    saved = [a if b.node is not None else None, b if a.node is not None else None]
    return e.made(out, [a, b], saved, backward)


def _as_small(e: Tape, whole: SizedTensor | None, size: tuple[int, int]) -> SizedTensor | None:
    """A gradient summed to the size of what was spread, and cast to its precision."""
    assert whole is not None
    elements, itemsize = size
    if whole.elements != elements:
        whole = e.empty(elements, whole.itemsize)
    return whole if whole.itemsize == itemsize else e.empty(elements, itemsize)


def plus(e: Tape, a: SizedTensor, b: SizedTensor) -> SizedTensor:
    """a + b of one size: saves nothing, both get the gradient of the result."""
    return e.made(e.empty(a.elements, max(a.itemsize, b.itemsize)), [a, b], [], lambda g: (g, g))


def copied(e: Tape, x: SizedTensor) -> SizedTensor:
    """A copy in another layout; the gradient needs none."""
    return e.made(e.empty(x.elements, x.itemsize), [x], [], lambda g: (g,))


def copied_in_backward(e: Tape, x: SizedTensor) -> SizedTensor:
    """A view through which the gradient comes back in a layout that has to be copied first."""
    elements, itemsize = x.elements, x.itemsize
    return e.made(e.view(x), [x], [], lambda g: (e.empty(elements, itemsize),))


def linear(e: Tape, x: SizedTensor, weight: SizedTensor, outputs: int, bias: SizedTensor | None = None) -> SizedTensor:
    """x times a weight, plus a bias. Saves x where the weight is trained; the weight itself is FSDP's."""
    inputs, wide = x.elements, weight.elements
    out = e.product(outputs, x.itemsize)
    wants_x, wants_weight = x.node is not None, weight.node is not None
    biases = bias.elements if bias is not None and bias.node is not None else 0
    itemsize = x.itemsize

    def backward(g: SizedTensor) -> Gradients:
        of_weight = e.empty(wide, itemsize) if wants_weight else None
        of_x = e.empty(inputs, itemsize) if wants_x else None
        of_bias = e.empty(biases, itemsize) if biases else None
        return of_x, of_weight, of_bias

    sources = [x, weight] if bias is None else [x, weight, bias]
    return e.made(out, sources, [x if wants_weight else None], backward)


def piece(e: Tape, x: SizedTensor, elements: int) -> SizedTensor:
    """A slice of x, sharing its storage. Backward lays its gradient into zeros of the size of x."""
    whole, itemsize = x.elements, x.itemsize
    view = SizedTensor(elements, itemsize, x.storage, None)
    return e.made(view, [x], [], lambda g: (e.empty(whole, itemsize),))


def joined(e: Tape, a: SizedTensor, b: SizedTensor) -> SizedTensor:
    """a and b one after the other, as a copy; the gradients are views of that of the result."""
    first, second = a.elements, b.elements

    def backward(g: SizedTensor) -> Gradients:
        return (SizedTensor(first, g.itemsize, g.storage, None), SizedTensor(second, g.itemsize, g.storage, None))

    return e.made(e.empty(first + second, a.itemsize), [a, b], [], backward)


def repeated(e: Tape, x: SizedTensor, times_over: int, *, is_view: bool) -> SizedTensor:
    """Key or value heads repeated for their group of queries: a copy, unless there is one head and it can be spread
    as it lies. Backward sums over the group."""
    if times_over == 1:
        return x
    elements, itemsize = x.elements, x.itemsize
    wide = elements * times_over
    out = SizedTensor(wide, itemsize, x.storage, None) if is_view else e.empty(wide, itemsize)
    return e.made(out, [x], [], lambda g: (e.empty(elements, itemsize),))


def layer_norm(e: Tape, x: SizedTensor, weight: SizedTensor, bias: SizedTensor | None, rows: int) -> SizedTensor:
    """torch's layer norm. Saves x and, for each row, mean and reciprocal deviation in fp32."""
    out = e.empty(x.elements, x.itemsize)
    mean, deviation = e.empty(rows, FP32), e.empty(rows, FP32)
    elements, itemsize, wide = x.elements, x.itemsize, weight.elements
    wants = [x.node is not None, weight.node is not None, bias is not None and bias.node is not None]

    def backward(g: SizedTensor) -> Gradients:
        sizes = (elements, wide, wide)
        return [e.empty(size, itemsize) if wanted else None for size, wanted in zip(sizes, wants, strict=True)]

    sources = [x, weight] if bias is None else [x, weight, bias]
    return e.made(out, sources, [x, mean, deviation], backward)
