"""Norms as transformers writes them out: which intermediate tensors each keeps. Sizes: x [rows, H].

All compute in fp32, so a bf16 model keeps the input in fp32 besides the normalised one in bf16.
"""

from __future__ import annotations

from drillyard.estimation.memory.autograd import SizedTensor, Tape
from drillyard.estimation.memory.operators import FP32, layer_norm, mean_of_rows, power, shifted, times, to

GEMMA = frozenset({"gemma", "gemma2", "gemma3_text"})
COHERE = frozenset({"cohere", "cohere2"})
IN_FP32 = frozenset({"olmo2", "olmo3"})


def norm(
    e: Tape, model_type: str, kind: str, x: SizedTensor, rows: int, weight: SizedTensor, bias: SizedTensor | None
) -> SizedTensor:
    """The norm of a model type over the rows of x."""
    if model_type in COHERE:
        return _cohere(e, x, rows, weight)
    if kind == "layer":
        return layer_norm(e, x, weight, bias, rows)
    if model_type in GEMMA:
        return _gemma(e, x, rows, weight)
    return _rms(e, x, rows, weight, weigh_in_fp32=model_type in IN_FP32)


def _wide(e: Tape) -> int:
    return max(FP32, e.itemsize)


def _normalised(e: Tape, x: SizedTensor, rows: int) -> SizedTensor:
    """x over its root mean square: keeps x (for its square and for the product) and the factor per row."""
    variance = mean_of_rows(e, power(e, x), rows)
    return times(e, x, power(e, shifted(e, variance), of_result=True))


def _rms(e: Tape, hidden: SizedTensor, rows: int, weight: SizedTensor, *, weigh_in_fp32: bool) -> SizedTensor:
    """Llama's: back to compute precision before the weight (OLMo's: after it)."""
    before = hidden.itemsize
    hidden = to(e, hidden, FP32)
    variance = mean_of_rows(e, power(e, hidden), rows)
    hidden = times(e, hidden, power(e, shifted(e, variance), of_result=True))
    if weigh_in_fp32:
        return to(e, times(e, weight, hidden), before)
    return times(e, weight, to(e, hidden, before))


def _gemma(e: Tape, x: SizedTensor, rows: int, weight: SizedTensor) -> SizedTensor:
    """Gemma's: times one plus the weight, in fp32, then back to compute precision."""
    output = _normalised(e, to(e, x, FP32), rows)
    output = times(e, output, shifted(e, to(e, weight, FP32)))
    return to(e, output, x.itemsize)


def _cohere(e: Tape, hidden: SizedTensor, rows: int, weight: SizedTensor) -> SizedTensor:
    """Cohere's layer norm, written out: the centred input is made twice, once for the variance."""
    before = hidden.itemsize
    hidden = to(e, hidden, FP32)
    mean = mean_of_rows(e, hidden, rows)
    variance = mean_of_rows(e, power(e, _centred(e, hidden, mean)), rows)
    hidden = times(e, _centred(e, hidden, mean), power(e, shifted(e, variance), of_result=True))
    hidden = times(e, to(e, weight, FP32), hidden)
    return to(e, hidden, before)


def _centred(e: Tape, x: SizedTensor, mean: SizedTensor) -> SizedTensor:
    rows, elements, itemsize = mean.elements, x.elements, x.itemsize

    def backward(g: SizedTensor) -> tuple[SizedTensor, SizedTensor]:
        negative = e.empty(elements, itemsize)
        summed = e.empty(rows, itemsize)
        del negative
        return g, summed

    return e.made(e.empty(elements, itemsize), [x, mean], [], backward)
