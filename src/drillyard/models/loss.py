"""Next-token cross entropy inside the root's forward, with the vocabulary never whole in memory.

The root module that FSDP2 shards is the causal language model *and* its loss. Its forward keeps the final hidden
states, takes only the rows that carry loss, and turns them into logits a chunk at a time. Each chunk is recomputed in
backward (non-reentrant checkpointing), so at most chunk x V logits exist at once, in forward and in backward. The
head's weights belong to the root's FSDP group, which is gathered while the root's forward and backward run; called from
outside, the head would be a shard.

Cost: the head's matrix product twice in forward (once again in backward). Rows without a label cost nothing, which in
supervised fine-tuning with long prompts more than pays for the recomputation.

Letters: B sequences, T tokens per sequence, R rows that carry loss (padded to a whole number of chunks), H hidden, V
vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from drillyard.data import Batch
from drillyard.models.attention import packed_attention_inputs
from drillyard.models.forward import final_hidden, head_logits

IGNORED = -100
LARGEST_CHUNK = 2048


class LanguageModelLoss(nn.Module):
    """A causal language model with its summed loss as forward: what is sharded, called and trained."""

    def __init__(self, causal_lm: PreTrainedModel) -> None:
        super().__init__()
        self.causal_lm = causal_lm

    def forward(
        self,
        input_ids_BT: torch.Tensor,
        position_ids_BT: torch.Tensor,
        attention: dict[str, Any],
        rows_R: torch.Tensor,
        targets_R: torch.Tensor,
        chunk_rows: int,
    ) -> torch.Tensor:
        """The cross entropy summed over all targets, in nats: a scalar of fp32 (fp64 when the model is).

        `rows_R` indexes the flattened [B*T] positions that carry loss; padding rows have target -100.
        """
        hidden_BTH = final_hidden(self.causal_lm, input_ids_BT, position_ids_BT, attention)
        hidden_RH = hidden_BTH.flatten(0, 1).index_select(0, rows_R)
        total = hidden_RH.new_zeros((), dtype=loss_dtype(hidden_RH.dtype))
        for hidden_CH, targets_C in zip(
            torch.split(hidden_RH, chunk_rows), torch.split(targets_R, chunk_rows), strict=True
        ):
            if torch.is_grad_enabled():
                total = total + checkpoint(self._chunk_loss, hidden_CH, targets_C, use_reentrant=False)
            else:
                total = total + self._chunk_loss(hidden_CH, targets_C)
        return total

    def _chunk_loss(self, hidden_CH: torch.Tensor, targets_C: torch.Tensor) -> torch.Tensor:
        logits_CV = head_logits(self.causal_lm, hidden_CH)
        logits_CV = logits_CV.to(loss_dtype(logits_CV.dtype))
        return F.cross_entropy(logits_CV, targets_C, ignore_index=IGNORED, reduction="sum")

    def next_logits(self, **inputs: Any) -> torch.Tensor:
        """Logits [B, V] that follow the last position; for generation with a KV cache in `inputs`."""
        logits: torch.Tensor = self.causal_lm(**inputs, logits_to_keep=1).logits
        return logits[:, -1]


def loss_dtype(dtype: torch.dtype) -> torch.dtype:
    """Precision of the loss: fp64 for fp64 models, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class LossInputs:
    """One micro-batch on its device, as the root's forward takes it."""

    input_ids_BT: torch.Tensor
    position_ids_BT: torch.Tensor
    attention: dict[str, Any]
    rows_R: torch.Tensor
    targets_R: torch.Tensor
    chunk_rows: int


def chunk_rows_for(num_positions: int, configured: int | None) -> int:
    """Rows of logits in memory at once: as configured, else a quarter of the micro-batch and at most 2048."""
    return configured or max(1, min(LARGEST_CHUNK, -(-num_positions // 4)))


def loss_inputs(
    batch: Batch, model: PreTrainedModel, attention: str, device: torch.device, chunk_tokens: int | None
) -> LossInputs:
    """Move a micro-batch to the device, with the rows that carry loss found on the host.

    R is padded to a multiple of an eighth of the chunk, so that shapes repeat and compiled code is reused; on a GPU the
    copies do not block.
    """
    chunk_rows = chunk_rows_for(batch.labels.size, chunk_tokens)
    flat_labels = batch.labels.reshape(-1)
    rows = np.flatnonzero(flat_labels != IGNORED)
    granule = max(1, chunk_rows // 8)
    padded = max(granule, -(-len(rows) // granule) * granule)
    rows_R = np.zeros(padded, dtype=np.int64)
    targets_R = np.full(padded, IGNORED, dtype=np.int64)
    rows_R[: len(rows)] = rows
    targets_R[: len(rows)] = flat_labels[rows]
    return LossInputs(
        to_device(batch.input_ids, device),
        to_device(batch.position_ids, device),
        packed_attention_inputs(batch, model, attention, device),
        to_device(rows_R, device),
        to_device(targets_R, device),
        chunk_rows,
    )


def to_device(array: np.ndarray[Any, Any], device: torch.device) -> torch.Tensor:
    """A numpy array as a tensor on `device`, through pinned memory and without blocking where that is a GPU."""
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor
