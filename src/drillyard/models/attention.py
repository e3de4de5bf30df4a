"""Attention in packed batches: which kernel a device can train with, and what keeps documents
apart.

A position attends to positions of its own document up to itself. Padding counts as a document of
its own, so a row of padding attends to itself and no softmax is ever empty (an empty one is NaN, in
backward even where no loss reads it).

- `sdpa`, `eager`: explicit masks [B, 1, T, T], made once per micro-batch and shared by all layers.
- `varlen`: flash attention over the documents laid end to end (`torch.nn.attention.varlen`), on
  CUDA in half precision.
- `flex`: FlexAttention with a block mask, on CUDA.

What depends on the documents is found on the host and copied once: the model's forward waits for
nothing. Letters: B sequences, T tokens per sequence, H heads, K key/value heads, D head size, N
documents.
"""

from __future__ import annotations

import inspect
from typing import Any, cast

import numpy as np
import torch
from torch.nn.attention import varlen
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

from drillyard.config.kernel_rules import (
    FLASH_CAPABILITY,
    AttentionKernel,
    AttentionNeeds,
    fastest_kernel,
    kernel_can_train,
    kernel_limitation,
)
from drillyard.data.mapped_sequences import Batch
from drillyard.errors import UserError
from drillyard.models.architectures import architecture

TRANSFORMERS_NAMES = {
    "sdpa": "sdpa",
    "eager": "eager",
    "varlen": "drillyard_varlen",
    "flex": "flex_attention",
}

# torch 2.11 has no such argument; key and value heads are then repeated, which every kernel
# computes alike.
KERNEL_GROUPS_HEADS = "enable_gqa" in inspect.signature(varlen.varlen_attn).parameters

# Fewer entries than this are padded up to it, so that offsets have few shapes. Each entry more is
# an empty document, for which kernels start blocks that find nothing to do.
SMALLEST_OFFSETS = 8


def resolve_attention(
    attention: str,
    device_type: str,
    compute_dtype: torch.dtype = torch.bfloat16,
    config: PreTrainedConfig | None = None,
    capability: tuple[int, int] | None = None,
) -> AttentionKernel:
    """The kernel to use for a run config's `attention`; `auto` becomes the fastest that can train.

    `config`, the model's, lets `auto` pass over kernels that cannot soft-cap scores, drop attention
    weights or compute heads of its size; `capability` is the GPU's compute capability (None:
    recent). Raises UserError for a kernel without a backward on the device or in the precision, and
    for one that does not fit the model.
    """
    half = compute_dtype in (torch.bfloat16, torch.float16)
    if attention == "auto":
        return fastest_kernel(device_type, half=half, capability=capability, **_demands(config))
    if attention not in TRANSFORMERS_NAMES:
        raise UserError(
            f"model.attention: {attention!r} is none of auto, {', '.join(TRANSFORMERS_NAMES)}"
        )
    if not kernel_can_train(attention, device_type, half=half, capability=capability):
        if device_type != "cuda":
            reason = f"has no backward on {device_type}"
        elif not half:
            reason = "computes in bf16 only"
        else:
            assert capability is not None
            least, found = (
                ".".join(map(str, version)) for version in (FLASH_CAPABILITY, capability)
            )
            reason = (
                f"needs a GPU of compute capability {least} or higher, and this one has {found}"
            )
        raise UserError(
            f"model.attention: {attention} cannot train here: it {reason}\nuse attention: auto,"
            " sdpa or eager"
        )
    if config is not None:
        refuse_unfit_kernel(config, attention)
    return cast(AttentionKernel, attention)


def _demands(config: PreTrainedConfig | None) -> AttentionNeeds:
    """Requirements of the model's config for a kernel; the size of a head as transformers' models
    derive it."""
    dropout = (
        getattr(config, "attention_dropout", None) or getattr(config, "attn_pdrop", None) or 0.0
    )
    head_dim: int | None = getattr(config, "head_dim", None)
    if head_dim is None and config is not None:
        head_dim = config.hidden_size // config.num_attention_heads
    return AttentionNeeds(
        softcap=getattr(config, "attn_logit_softcapping", None), dropout=dropout, head_dim=head_dim
    )


def refuse_unfit_kernel(config: PreTrainedConfig, attention: str) -> None:
    """Raise UserError when the kernel does not compute what the model's config asks for."""
    if (reason := kernel_limitation(attention, **_demands(config))) is not None:
        raise UserError(
            f"model.attention: {attention} does not fit this {config.model_type} model\n{reason}"
        )


def packed_attention_inputs(
    batch: Batch, model: PreTrainedModel, attention: str, device: torch.device
) -> dict[str, Any]:
    """Inputs of the base model's forward besides tokens and positions that keep documents apart, on
    `device`."""
    if attention == "varlen":
        return varlen_inputs(batch.document_ids, device)
    document_ids_BT = to_device(batch.document_ids, device)
    config = model.config
    masks: dict[int | None, Any] = {}

    def mask(window: int | None) -> Any:
        if window not in masks:
            masks[window] = _document_mask(document_ids_BT, window, attention)
        return masks[window]

    window: int | None = getattr(config, "sliding_window", None)
    match architecture(config.model_type).masks:
        case "full":
            return {"attention_mask": mask(None)}
        case "window":
            return {"attention_mask": mask(window)}
        case "by-layer-type":
            by_type = {"full_attention": None, "sliding_attention": window}
            return {
                "attention_mask": {
                    kind: mask(by_type[kind]) for kind in sorted(set(config.layer_types))
                }
            }


def document_mask(document_ids_BT: torch.Tensor, window: int | None) -> torch.Tensor:
    """Bool [B, 1, T, T]: whether row q attends to column k. With a window, q sees itself and the
    window-1 before it."""
    length = document_ids_BT.shape[1]
    ones_TT = torch.ones(length, length, dtype=torch.bool, device=document_ids_BT.device)
    seen_TT = ones_TT.tril() if window is None else ones_TT.tril() & ones_TT.triu(1 - window)
    same_B1TT = document_ids_BT[:, None, :, None] == document_ids_BT[:, None, None, :]
    return same_B1TT & seen_TT


def _document_mask(document_ids_BT: torch.Tensor, window: int | None, attention: str) -> Any:
    if attention == "flex":
        return _block_mask(document_ids_BT, window)
    mask_B1TT = document_mask(document_ids_BT, window)
    if attention == "sdpa":
        return mask_B1TT
    # Eager attention adds the mask to the scores. The smallest finite number keeps its softmax
    # exact: exp() of it is 0.
    return torch.zeros_like(mask_B1TT, dtype=torch.float32).masked_fill_(
        ~mask_B1TT, torch.finfo(torch.float32).min
    )


def _block_mask(document_ids_BT: torch.Tensor, window: int | None) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    def attends(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        seen = (k <= q) & (document_ids_BT[b, q] == document_ids_BT[b, k])
        return seen if window is None else seen & (k > q - window)

    num_sequences, length = document_ids_BT.shape
    return create_block_mask(
        attends, num_sequences, None, length, length, device=document_ids_BT.device
    )


def varlen_inputs(document_ids_BT: np.ndarray[Any, Any], device: torch.device) -> dict[str, Any]:
    """Offsets of the documents of a micro-batch laid end to end, under transformers' names for
    packed attention.

    So that one compiled graph takes any number of documents, offsets are padded to a power of two
    with empty documents, their number is marked as dynamic, and the greatest length is T.
    """
    starts = np.ones(document_ids_BT.shape, dtype=bool)
    starts[:, 1:] = document_ids_BT[:, 1:] != document_ids_BT[:, :-1]
    offsets = np.flatnonzero(starts)
    size = max(SMALLEST_OFFSETS, 1 << len(offsets).bit_length())
    padded = np.full(size, document_ids_BT.size, dtype=np.int32)
    padded[: len(offsets)] = offsets
    offsets_N = to_device(padded, device)
    torch._dynamo.maybe_mark_dynamic(offsets_N, 0)
    length = int(document_ids_BT.shape[1])
    return {
        "cu_seq_lens_q": offsets_N,
        "cu_seq_lens_k": offsets_N,
        "max_length_q": length,
        "max_length_k": length,
    }


def varlen_attention(
    module: torch.nn.Module,
    query_BHTD: torch.Tensor,
    key_BKTD: torch.Tensor,
    value_BKTD: torch.Tensor,
    attention_mask: None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: torch.Tensor,
    cu_seq_lens_k: torch.Tensor,
    max_length_q: int,
    max_length_k: int,
    **unused: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface over `torch.nn.attention.varlen`: output [B, T, H, D],
    causal per document."""

    def end_to_end(states: torch.Tensor) -> torch.Tensor:
        return states.transpose(1, 2).flatten(0, 1)

    group = query_BHTD.shape[1] // key_BKTD.shape[1]
    options: dict[str, Any] = {"enable_gqa": group > 1} if KERNEL_GROUPS_HEADS else {}
    if not KERNEL_GROUPS_HEADS:
        key_BKTD, value_BKTD = (
            states.repeat_interleave(group, dim=1) for states in (key_BKTD, value_BKTD)
        )
    output: Any = varlen.varlen_attn(
        end_to_end(query_BHTD),
        end_to_end(key_BKTD),
        end_to_end(value_BKTD),
        cu_seq_lens_q,
        cu_seq_lens_k,
        max_length_q,
        max_length_k,
        scale=scaling,
        # The window counts the positions before the query; transformers' counts the query itself
        # too.
        window_size=(-1 if sliding_window is None else sliding_window - 1, 0),
        **options,
    )
    return output.unflatten(0, (query_BHTD.shape[0], query_BHTD.shape[2])), None


def to_device(array: np.ndarray[Any, Any], device: torch.device) -> torch.Tensor:
    """A numpy array as a tensor on `device`, through pinned memory and without blocking where that
    is a GPU."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


AttentionInterface.register(TRANSFORMERS_NAMES["varlen"], varlen_attention)
