"""FLOPs per token of a training step under each named formula, and which MFU cannot be right.

An MFU needs its formula: one B200 run is 42.4 % to 45.7 % by the formulas for model FLOPs below. A
value above the best published matmul rate of the accelerator is nearly always an error of units: it
is shown as computed, with a warning.

Letters: N active parameters, L layers, H query heads, Q head dimension, S sequence length. One
multiply-add is 2 FLOPs. A weight takes 2 in the forward pass, 2 for the gradient of its input and 2
for its own; attention (scores and values) takes 4 H Q S a token and layer in the forward pass and
twice that in the backward pass.

| name | FLOPs per token | source |
|---|---|---|
| 6N | 6 N | Kaplan et al. 2020, arXiv 2001.08361; attention left out |
| palm | 6 N + 12 L H Q S | PaLM, arXiv 2204.02311 appendix B: the definition of MFU; attention over all S positions |
| causal | 6 N + 6 L H Q S | what causal kernels execute: half of the above |
| torchtitan | 6 (N - input embedding if untied) + 12 L H Q S | pytorch/torchtitan get_dense_model_nparams_and_flops |
| megatron | 6 (matrices of attention, MLP and logits) + 6 L H Q S | Megatron-LM num_floating_point_operations |
| hfu-full | 8 N + 16 L H Q S | palm with every forward pass done twice: hardware FLOPs, not model FLOPs |
| hfu-attention | 6 N + 16 L H Q S | palm with the forward pass of attention done twice (selective recomputation) |

What the letters leave open:
- A layer with a sliding window w < S attends to w positions where a formula counts all S, and to w
  - w^2 / 2S on average where it counts the causal half (S / 2 without a window). With chunks of w
  positions it attends to w and, causally, to half of its chunk.
- Query heads count: grouped queries change nothing. Where values are narrower than queries and keys
  (latent attention), 2 Q becomes the sum of both widths.
- Linear attention (gated delta rule) takes 6 FLOPs per entry of its state: read, correct, query. It
  does not depend on S in this recurrent form; kernels that work in chunks do more.
- Frozen weights need no gradient of their own, so with adapters every 6 becomes 4 for them and
  stays 6 for the adapters. That autograd stops at the lowest adapter is not counted.
- Megatron-LM pads the vocabulary before it counts the logits; here it is counted as the config
  gives it.
- With packing, attention stays within documents and does less than counted here: one document of
  length S is taken.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal, get_args

from drillyard.errors import UserError
from drillyard.modelspec.spec import Attention, ModelSpec

Formula = Literal["6N", "palm", "causal", "torchtitan", "megatron", "hfu-full", "hfu-attention"]
FORMULAS: Final[tuple[Formula, ...]] = get_args(Formula)

PLAUSIBLE_BF16: Final = 0.80
"""The limit in bf16 where the achievable matmul rate of an accelerator is not published. The
published ones lie between 77.6 % (B200) and 86.9 % (A100) of peak, and a training step has more to
do than matmuls."""

CAUSES: Final = (
    "another precision's peak (fp8 runs take the fp8 peak), tokens/s of all GPUs taken for one"
    " GPU's, step times in another unit, padding counted as tokens, FLOPs of another sequence"
    " length"
)


@dataclass(frozen=True, slots=True)
class _FlopsRule:
    """Parts of a formula: which weights, which attention, and what is computed a second time."""

    weights: Callable[[ModelSpec], int]
    attention: Literal["none", "full", "causal"]
    weights_again: bool = False
    attention_again: bool = False


def _active(spec: ModelSpec) -> int:
    return spec.active_parameters


_FLOPS_RULES: Final[dict[Formula, _FlopsRule]] = {
    "6N": _FlopsRule(_active, "none"),
    "palm": _FlopsRule(_active, "full"),
    "causal": _FlopsRule(_active, "causal"),
    "torchtitan": _FlopsRule(
        lambda spec: _active(spec) - (0 if spec.tied else spec.embedding_parameters), "full"
    ),
    "megatron": _FlopsRule(lambda spec: spec.active_matmul_parameters, "causal"),
    "hfu-full": _FlopsRule(_active, "full", weights_again=True, attention_again=True),
    "hfu-attention": _FlopsRule(_active, "full", attention_again=True),
}


def flops_per_token(
    spec: ModelSpec,
    formula: Formula,
    sequence_length: int,
    *,
    adapter_parameters: int | None = None,
) -> float:
    """FLOPs per token of a training step of `spec` under `formula`, for sequences of
    `sequence_length` tokens.

    With `adapter_parameters` the weights of `spec` are frozen and that many adapter parameters are
    trained. Raises UserError for a formula that is not one of FORMULAS, and for one beyond 6N where
    `spec` has no layers.
    """
    if formula not in _FLOPS_RULES:
        raise UserError(
            f"FLOPs formula {formula!r} is not known; choose one of {', '.join(FORMULAS)}."
        )
    if not spec.blocks and formula != "6N":
        raise UserError(
            f"FLOPs formula {formula} needs the model's layers, and only its parameters are known;"
            " use 6N."
        )
    rule = _FLOPS_RULES[formula]
    weights, again = rule.weights(spec), 2.0 if rule.weights_again else 0.0
    if adapter_parameters is None:
        flops = (6 + again) * weights
    else:
        flops = (4 + again) * weights + (6 + again) * adapter_parameters
    if rule.attention == "none":
        return flops
    passes = 4 if rule.attention_again else 3
    return flops + passes * attention_flops_per_token(
        spec, sequence_length, causal=rule.attention == "causal"
    )


def formula_label(formula: Formula, *, adapters: bool = False) -> str:
    """The formula as outputs name it: with adapters frozen weights take 4 instead of 6."""
    if not adapters:
        return formula
    return "4N frozen + 6N trained" if formula == "6N" else f"{formula}, 4N frozen + 6N trained"


def attention_flops_per_token(spec: ModelSpec, sequence_length: int, *, causal: bool) -> float:
    """Forward FLOPs per token of scores and values (of the state, in linear attention) over all
    layers."""
    return sum(
        _attention_flops(block.attention, sequence_length, causal=causal) for block in spec.blocks
    )


def _attention_flops(attention: Attention, sequence_length: int, *, causal: bool) -> float:
    if attention.kind == "linear":
        return 6.0 * attention.num_heads * attention.head_dim * attention.value_head_dim
    attended = mean_attended_length(attention, sequence_length, causal=causal)
    return 2.0 * attention.num_heads * (attention.head_dim + attention.value_head_dim) * attended


def mean_attended_length(attention: Attention, sequence_length: int, *, causal: bool) -> float:
    """The positions that a token attends to, on average over a sequence; causal: half of its own
    position counts."""
    width = min(sequence_length, attention.window or sequence_length)
    if not causal:
        return float(width)
    if attention.chunked:
        chunks, rest = divmod(sequence_length, width)
        return (chunks * width**2 + rest**2) / (2 * sequence_length)
    return width - width**2 / (2 * sequence_length)


def implausible_mfu(fraction: float, precision: str, achievable: float | None = None) -> str | None:
    """Reason why an MFU (or HFU) of `fraction` cannot be right, or None.

    `achievable` is the best published matmul rate as a fraction of the peak. Without it the limit
    is 80 % in bf16 and the peak itself in other precisions.
    """
    if fraction > 1:
        limit = "the peak itself"
    elif achievable is not None and fraction > achievable:
        limit = f"the best matmul rate published for this accelerator, {achievable:.1%} of peak"
    elif achievable is None and precision == "bf16" and fraction > PLAUSIBLE_BF16:
        limit = f"training in bf16 reaches on any accelerator, {PLAUSIBLE_BF16:.0%} of peak"
    else:
        return None
    return f"{fraction:.1%} is more than {limit}: an error of units. Usual causes: {CAUSES}."
