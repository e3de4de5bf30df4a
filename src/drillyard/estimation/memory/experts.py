"""A mixture of experts by what it keeps, as transformers' grouped matrix product runs it (integrations/moe.py).

Every token is copied once for each of its experts, sorted by expert, multiplied in one grouped product per matrix,
weighted, brought back into order and summed. Sizes: rows * experts_per_token "routed" rows, whatever the router
chooses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from drillyard.estimation.memory.autograd import Gradients, SizedTensor, Tape
from drillyard.estimation.memory.operators import FP32, linear, plus, pointwise, times, to
from drillyard.modelspec import Block

if TYPE_CHECKING:
    from drillyard.estimation.memory.block_forward import BlockWeights

INT64: Final = 8
SCORES_IN_FP32: Final = frozenset({"mixtral"})
"""The experts' weights stay in fp32, and with them the sum over experts."""


def mixture(e: Tape, block: Block, rows: int, w: BlockWeights, x: SizedTensor) -> SizedTensor:
    """The block's feed-forward part [rows, H]: router, experts, and shared experts where there are some."""
    mlp = block.mlp
    hidden = x.elements // rows
    scores, order = _routed(e, block, rows, w, x)
    states = _gathered_rows(e, x, rows * mlp.experts_per_token * hidden)
    up = _grouped(e, w, "gate_up_proj", states, rows * mlp.experts_per_token * 2 * mlp.expert_size)
    states = _gated(e, up)
    del up
    states = _grouped(e, w, "down_proj", states, rows * mlp.experts_per_token * hidden)
    weighted = times(e, states, scores)
    restored = _permuted(e, weighted)
    del weighted
    result = to(e, _summed_over_experts(e, restored, rows * hidden), x.itemsize)
    del restored, states, order
    shared = [name for name in w.named("mlp") if name]
    if not shared:
        return result
    gate, into, down = (shared * 3)[:3] if len(shared) < 3 else shared[:3]
    return plus(e, result, w.linear(down, times(e, pointwise(e, w.linear(gate, x)), w.linear(into, x))))


def _routed(e: Tape, block: Block, rows: int, w: BlockWeights, x: SizedTensor) -> tuple[SizedTensor, list[SizedTensor]]:
    """Weights of the chosen experts, one per routed row, and the index tensors that backward needs."""
    number, chosen = block.mlp.num_experts, block.mlp.experts_per_token
    name = next(name for name in w.shapes if w.shapes[name].role == "router")
    weight = w.get(name)
    assert weight is not None
    probabilities = _softmax(e, to(e, linear(e, x, weight, rows * number), FP32))
    indices = [e.empty(rows * chosen, INT64) for _ in range(4)]
    top = _chosen(e, probabilities, rows * chosen)
    total = _summed_over_experts(e, top, rows)
    top = times(e, top, total)
    return top if w.run.model_type in SCORES_IN_FP32 else to(e, top, x.itemsize), indices


def _softmax(e: Tape, x: SizedTensor) -> SizedTensor:
    elements = x.elements
    out = e.empty(elements, FP32)
    return e.made(out, [x], [out], lambda g: (e.empty(elements, FP32),))


def _chosen(e: Tape, x: SizedTensor, elements: int) -> SizedTensor:
    before = x.elements
    return e.made(e.empty(elements, x.itemsize), [x], [], lambda g: (e.empty(before, g.itemsize),))


def _gathered_rows(e: Tape, x: SizedTensor, elements: int) -> SizedTensor:
    before, itemsize = x.elements, x.itemsize
    return e.made(e.empty(elements, itemsize), [x], [], lambda g: (e.empty(before, itemsize),))


def _permuted(e: Tape, x: SizedTensor) -> SizedTensor:
    elements, itemsize = x.elements, x.itemsize
    return e.made(e.empty(elements, itemsize), [x], [], lambda g: (e.empty(elements, itemsize),))


def _summed_over_experts(e: Tape, x: SizedTensor, elements: int) -> SizedTensor:
    return e.made(e.empty(elements, x.itemsize), [x], [], lambda g: (g,))


def _grouped(e: Tape, w: BlockWeights, name: str, x: SizedTensor, outputs: int) -> SizedTensor:
    """One product for all experts: keeps its input; its weights' gradient has the size of all experts."""
    full = next(key for key in w.shapes if key.endswith(f"experts.{name}"))
    weight = w.get(full)
    assert weight is not None
    out = e.product(outputs, x.itemsize, always_kept=True)
    inputs, itemsize, wide = x.elements, x.itemsize, weight.elements
    wants_x, wants_weight = x.node is not None, weight.node is not None

    def backward(g: SizedTensor) -> Gradients:
        of_x = e.empty(inputs, itemsize) if wants_x else None
        return of_x, e.empty(wide, itemsize) if wants_weight else None

    return e.made(out, [x, weight], [x if wants_weight else None], backward)


def _gated(e: Tape, together: SizedTensor) -> SizedTensor:
    gate, up = e.split(together, (together.elements // 2,) * 2)
    return times(e, pointwise(e, gate), up)
