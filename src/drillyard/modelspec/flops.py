"""FLOPs per token of a training step under each named formula, and MFU. A figure without its formula says little: one
and the same B200 run is 42.4 % to 45.7 % by the formulas below.

Letters: N parameters (active ones in a mixture of experts), L layers, H query heads, Q head dimension, S sequence
length, h hidden size, V vocabulary. One multiply-add is 2 FLOPs; forward and backward are 3 times the forward.

| name | FLOPs per token | source |
|---|---|---|
| 6N | 6 N | Kaplan et al. 2020, arXiv 2001.08361; attention left out |
| palm | 6 N + 12 L H Q S | PaLM, arXiv 2204.02311 appendix B: the definition of MFU; attention over all S positions |
| causal | 6 N + 6 L H Q S | what causal kernels execute: half of the above |
| torchtitan | 6 (N - input embedding if untied) + 12 L H Q S | pytorch/torchtitan get_dense_model_nparams_and_flops |
| megatron | 6 (matrices of attention, MLP and logits) + 6 L H Q S | Megatron-LM num_floating_point_operations |
| hfu-full | 8 N + 16 L H Q S | palm with full activation recomputation: hardware FLOPs, not model FLOPs |

A layer with a sliding window w < S attends to w positions where the formula counts all S, and to w - w^2 / 2S on
average where it counts the causal half (S / 2 without a window). Query heads count: grouped queries change nothing.
With packing, attention stays within documents and does less than these formulas count: they take one document of
length S.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, get_args

from drillyard.errors import UserError
from drillyard.modelspec.spec import ModelSpec, model_spec

Formula = Literal["6N", "palm", "causal", "torchtitan", "megatron", "hfu-full"]
FORMULAS: Final[tuple[Formula, ...]] = get_args(Formula)


def _attention(spec: ModelSpec, sequence_length: int) -> float:
    """Forward FLOPs of scores and values per token over all layers, every position attending to all: 4 L H Q S."""
    attended = sum(min(sequence_length, window or sequence_length) for window in spec.windows)
    return 4.0 * spec.num_heads * spec.head_dim * attended


def _causal_attention(spec: ModelSpec, sequence_length: int) -> float:
    """The same with a causal mask: 2 L H Q S, by the mean number of positions attended to."""
    widths = (min(sequence_length, window or sequence_length) for window in spec.windows)
    return 4.0 * spec.num_heads * spec.head_dim * sum(w - w * w / (2 * sequence_length) for w in widths)


def _torchtitan(spec: ModelSpec, sequence_length: int) -> float:
    parameters = spec.active_parameters - (0 if spec.tied else spec.embedding_parameters)
    return 6.0 * parameters + 3 * _attention(spec, sequence_length)


def _megatron(spec: ModelSpec, sequence_length: int) -> float:
    query, key = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    projections = spec.num_layers * (spec.hidden_size * (query + 2 * key) + query * spec.hidden_size)
    matrices = projections + spec.active_mlp_matmul_parameters + spec.hidden_size * spec.vocab_size
    return 6.0 * matrices + 3 * _causal_attention(spec, sequence_length)


_FLOPS_PER_TOKEN: Final[dict[Formula, Callable[[ModelSpec, int], float]]] = {
    "6N": lambda spec, sequence_length: 6.0 * spec.active_parameters,
    "palm": lambda spec, sequence_length: 6.0 * spec.active_parameters + 3 * _attention(spec, sequence_length),
    "causal": lambda spec, sequence_length: 6.0 * spec.active_parameters + 3 * _causal_attention(spec, sequence_length),
    "torchtitan": _torchtitan,
    "megatron": _megatron,
    "hfu-full": lambda spec, sequence_length: 8.0 * spec.active_parameters + 4 * _attention(spec, sequence_length),
}


def flops_per_token(spec: ModelSpec, formula: Formula, sequence_length: int) -> float:
    """FLOPs per token of a training step of `spec` under `formula`, for sequences of `sequence_length` tokens.

    Raises UserError for a formula that is not one of FORMULAS.
    """
    if formula not in _FLOPS_PER_TOKEN:
        raise UserError(f"FLOPs formula {formula!r} is not known; choose one of {', '.join(FORMULAS)}.")
    return _FLOPS_PER_TOKEN[formula](spec, sequence_length)


def training_flops_per_token(config: Mapping[str, Any], formula: Formula, sequence_length: int) -> float:
    """`flops_per_token` of the model that a config.json describes. All weights are taken as trained (no LoRA)."""
    return flops_per_token(model_spec(config), formula, sequence_length)


def mfu(
    *, flops_per_token: float, tokens_per_second_per_gpu: float, peak_flops_per_second: float | None
) -> float | None:
    """Model FLOPs utilisation as a fraction of the accelerator's dense peak at the precision used; None without a peak.

    Name the formula of `flops_per_token`, the peak and the precision wherever the result is shown.
    """
    if peak_flops_per_second is None:
        return None
    return flops_per_token * tokens_per_second_per_gpu / peak_flops_per_second
