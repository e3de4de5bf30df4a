"""Operators of a transformer block by what they keep and what their backward makes: the inventory
of activations.

Each is one or a few operators of PyTorch; what autograd saves is that of
tools/autograd/derivatives.yaml. Sizes are elements; an operator's result has the element size of
its input unless said. Most are one of two kinds: `unary`, and `contraction`, whose backward makes a
gradient of each input that wants one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

from drillyard.estimation.memory.autograd import Gradients, SizedTensor, Tape

FP32: Final = 4
GEMMA: Final = frozenset({"gemma", "gemma2", "gemma3_text"})
COHERE: Final = frozenset({"cohere", "cohere2"})
IN_FP32: Final = frozenset({"olmo2", "olmo3"})

Saved = Literal["input", "result", "nothing"]


def unary(
    e: Tape,
    x: SizedTensor,
    out: SizedTensor | None = None,
    *,
    saves: Saved = "nothing",
    passes: bool = False,
) -> SizedTensor:
    """`out` (default: new, of x's size) from x. Backward makes a gradient of x's size, or `passes`
    it on."""
    elements, itemsize = x.elements, x.itemsize
    out = out or e.empty(elements, itemsize)
    kept = {"input": x, "result": out, "nothing": None}[saves]
    return e.made(
        out, [x], [kept], (lambda g: (g,)) if passes else (lambda g: (e.empty(elements, itemsize),))
    )


def contraction(
    e: Tape, out: SizedTensor, inputs: Sequence[SizedTensor], saved: Sequence[SizedTensor | None]
) -> SizedTensor:
    """`out` from several inputs; one kernel of backward makes the gradients of all that want
    one."""
    sizes = [(x.elements, x.itemsize) if x.node is not None else None for x in inputs]
    return e.made(
        out, inputs, saved, lambda g: [None if size is None else e.empty(*size) for size in sizes]
    )


def to(e: Tape, x: SizedTensor, itemsize: int) -> SizedTensor:
    """A cast; nothing happens where the precision is the same already."""
    return x if x.itemsize == itemsize else unary(e, x, e.empty(x.elements, itemsize))


def scaled(e: Tape, x: SizedTensor) -> SizedTensor:
    """Times a number."""
    return unary(e, x)


def shifted(e: Tape, x: SizedTensor) -> SizedTensor:
    """Plus a number; also a copy in another layout."""
    return unary(e, x, passes=True)


def activated(e: Tape, x: SizedTensor) -> SizedTensor:
    """silu, gelu or relu: one kernel that keeps its input."""
    return unary(e, x, saves="input")


def power(e: Tape, x: SizedTensor, *, of_result: bool = False) -> SizedTensor:
    """x ** n (saves x) or 1 / sqrt(x) (saves the result). Backward: a power, times n, times the
    gradient."""
    out = e.empty(x.elements, x.itemsize)
    elements, itemsize = x.elements, x.itemsize

    def backward(g: SizedTensor) -> Gradients:
        raised, times_n, result = (e.empty(elements, itemsize) for _ in range(3))
        del raised, times_n
        return (result,)

    return e.made(out, [x], [out if of_result else x], backward)


def softmax(e: Tape, x: SizedTensor) -> SizedTensor:
    """In fp32; keeps its result."""
    elements, out = x.elements, e.empty(x.elements, FP32)
    return e.made(out, [x], [out], lambda g: (e.empty(elements, FP32),))


def times(e: Tape, a: SizedTensor, b: SizedTensor) -> SizedTensor:
    """a * b, the smaller one spread over the larger: each is saved for the gradient of the
    other."""
    out = e.empty(max(a.elements, b.elements), max(a.itemsize, b.itemsize))
    elements, itemsize = out.elements, out.itemsize
    wanted = [(x.elements, x.itemsize) if x.node is not None else None for x in (a, b)]

    def backward(g: SizedTensor) -> Gradients:
        whole = [None if size is None else e.empty(elements, itemsize) for size in wanted]
        for number, size in enumerate(wanted):
            if size is not None:
                whole[number] = _as_small(e, whole[number], size)
        return whole

    return e.made(out, [a, b], crosswise(a, b), backward)


def crosswise(a: SizedTensor, b: SizedTensor) -> list[SizedTensor | None]:
    """Tensors that a product saves: each factor for the gradient of the other."""
    return [a if b.node is not None else None, b if a.node is not None else None]


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


def copied_in_backward(e: Tape, x: SizedTensor) -> SizedTensor:
    """A view through which the gradient comes back in a layout that has to be copied first."""
    return unary(e, x, SizedTensor(x.elements, x.itemsize, x.storage, x.node))


def linear(
    e: Tape,
    x: SizedTensor,
    weight: SizedTensor,
    outputs: int,
    bias: SizedTensor | None = None,
    *,
    grouped: bool = False,
) -> SizedTensor:
    """x times a weight, plus a bias. Saves x where the weight has a gradient, and a weight that is
    not FSDP's for x's.

    `grouped`: one product for all experts, whose gradient has the size of all of them.
    """
    out = e.product(outputs, x.itemsize, always_kept=grouped)
    sources = [x, weight] if bias is None else [x, weight, bias]
    return contraction(e, out, sources, crosswise(x, weight))


def packed_linear(e: Tape, x: SizedTensor, weight: int, outputs: int) -> SizedTensor:
    """x times a frozen weight in nf4 of so many elements, made whole for the product and, again,
    for x's gradient."""
    elements, itemsize = x.elements, x.itemsize
    whole = e.empty(weight)
    out = e.product(outputs, itemsize)
    del whole

    def backward(g: SizedTensor) -> Gradients:
        whole = e.empty(weight)
        gradient = e.empty(elements, itemsize)
        del whole
        return (gradient,)

    return e.made(out, [x], [], backward)


def piece(e: Tape, x: SizedTensor, elements: int) -> SizedTensor:
    """A slice of x, sharing its storage. Backward lays its gradient into zeros of the size of x."""
    return unary(e, x, SizedTensor(elements, x.itemsize, x.storage, None))


def joined(e: Tape, *parts: SizedTensor) -> SizedTensor:
    """Parts one after the other, as a copy; the gradients are views of that of the result."""
    sizes = [part.elements for part in parts]

    def backward(g: SizedTensor) -> Gradients:
        return [SizedTensor(elements, g.itemsize, g.storage, None) for elements in sizes]

    return e.made(e.empty(sum(sizes), parts[0].itemsize), parts, [], backward)


def repeated(e: Tape, x: SizedTensor, times_over: int, *, is_view: bool) -> SizedTensor:
    """Key or value heads repeated for their group of queries: a copy, unless there is one head and
    it can be spread as it lies. Backward sums over the group."""
    if times_over == 1:
        return x
    wide = x.elements * times_over
    return unary(
        e,
        x,
        SizedTensor(wide, x.itemsize, x.storage, None) if is_view else e.empty(wide, x.itemsize),
    )


# Norms as transformers writes them out, local variables included. All compute in fp32, so a bf16
# model keeps the input in fp32 besides the normalised one in bf16.


def norm(
    e: Tape,
    model_type: str,
    kind: str,
    x: SizedTensor,
    rows: int,
    weight: SizedTensor,
    bias: SizedTensor | None,
) -> SizedTensor:
    """The norm of a model type over the rows of x [rows, H]."""
    if model_type in COHERE:
        return _cohere(e, x, rows, weight)
    if kind == "layer":
        # torch's own: saves x and, for each row, mean and reciprocal deviation in fp32.
        out, mean, deviation = (
            e.empty(x.elements, x.itemsize),
            e.empty(rows, FP32),
            e.empty(rows, FP32),
        )
        return contraction(
            e, out, [x, weight] if bias is None else [x, weight, bias], [x, mean, deviation]
        )
    if model_type in GEMMA:
        # Times one plus the weight, in fp32, then back to compute precision.
        output = _normalised(e, to(e, x, FP32), rows)
        output = times(e, output, shifted(e, to(e, weight, FP32)))
        return to(e, output, x.itemsize)
    return _rms(e, x, rows, weight, weigh_in_fp32=model_type in IN_FP32)


def _normalised(e: Tape, x: SizedTensor, rows: int) -> SizedTensor:
    """x over its root mean square: keeps x (for its square and for the product) and the factor per
    row."""
    variance = _row_means(e, power(e, x), rows)
    return times(e, x, _inverse_root(e, variance))


def _rms(
    e: Tape, hidden: SizedTensor, rows: int, weight: SizedTensor, *, weigh_in_fp32: bool
) -> SizedTensor:
    """Llama's: back to compute precision before the weight (OLMo's: after it)."""
    before = hidden.itemsize
    hidden = to(e, hidden, FP32)
    variance = _row_means(e, power(e, hidden), rows)
    hidden = times(e, hidden, _inverse_root(e, variance))
    if weigh_in_fp32:
        return to(e, times(e, weight, hidden), before)
    return times(e, weight, to(e, hidden, before))


def _cohere(e: Tape, hidden: SizedTensor, rows: int, weight: SizedTensor) -> SizedTensor:
    """Layer norm, written out: the centred input is made twice, once for the variance."""
    before = hidden.itemsize
    hidden = to(e, hidden, FP32)
    mean = _row_means(e, hidden, rows)
    variance = _row_means(e, power(e, _centred(e, hidden, mean)), rows)
    hidden = times(e, _centred(e, hidden, mean), _inverse_root(e, variance))
    hidden = times(e, to(e, weight, FP32), hidden)
    return to(e, hidden, before)


def _row_means(e: Tape, x: SizedTensor, rows: int) -> SizedTensor:
    """The mean along the last dimension; backward divides the gradient, spread over x."""
    return unary(e, x, e.empty(rows, x.itemsize))


def _inverse_root(e: Tape, variance: SizedTensor) -> SizedTensor:
    return power(e, shifted(e, variance), of_result=True)


def _centred(e: Tape, x: SizedTensor, mean: SizedTensor) -> SizedTensor:
    rows, elements, itemsize = mean.elements, x.elements, x.itemsize

    def backward(g: SizedTensor) -> tuple[SizedTensor, SizedTensor]:
        negative = e.empty(elements, itemsize)
        summed = e.empty(rows, itemsize)
        del negative
        return g, summed

    return e.made(e.empty(elements, itemsize), [x, mean], [], backward)
