"""Loss on held-out sequences: nats per token, perplexity, and bits per byte where every byte of the text is covered.

All ranks call the model the same number of times (FSDP2 gathers weights in every call), so sequences are dealt out in
rounds and a rank without any left runs one whose labels are all ignored. Sums are taken in fp64 and added over ranks
once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from drillyard.data import Batch, Sequences
from drillyard.models.loss import IGNORED, LanguageModelLoss, loss_inputs
from drillyard.parallel.apply import reshard
from drillyard.parallel.ranks import Ranks


@dataclass(frozen=True)
class LossResult:
    """Loss over one held-out source."""

    loss: float
    tokens: int
    sequences: int
    text_bytes: int | None

    @property
    def perplexity(self) -> float:
        """exp(loss); infinity where that is over the largest float."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def bits_per_byte(self) -> float | None:
        """Summed nats / ln 2 / UTF-8 bytes of the text; None unless every byte carries loss exactly once."""
        if not self.text_bytes:
            return None
        return self.loss * self.tokens / math.log(2) / self.text_bytes

    def as_dict(self) -> dict[str, Any]:
        """The figures as they go into metrics and summaries."""
        return {
            "loss": self.loss,
            "perplexity": self.perplexity,
            "bits_per_byte": self.bits_per_byte,
            "tokens": self.tokens,
            "sequences": self.sequences,
        }


@torch.no_grad()
def evaluate_loss(
    root: LanguageModelLoss,
    sequences: Sequences,
    ranks: Ranks,
    *,
    attention: str,
    batch_size: int,
    limit: int | None,
    chunk_tokens: int | None,
) -> LossResult:
    """Mean loss per valid token of the first `limit` sequences (all of them when None), the same on every rank."""
    count = len(sequences) if limit is None else min(limit, len(sequences))
    covers_all = count == len(sequences)
    sums = torch.zeros(2, dtype=torch.float64, device=ranks.device)
    was_training = root.training
    root.eval()
    round_size = batch_size * ranks.world_size
    try:
        for start in range(0, count, round_size):
            first = start + ranks.rank * batch_size
            indices = np.arange(first, min(first + batch_size, count), dtype=np.int64)
            batch = sequences.read(indices) if len(indices) else silent(sequences.read(np.zeros(1, dtype=np.int64)))
            inputs = loss_inputs(batch, root.causal_lm, attention, ranks.device, chunk_tokens)
            sums[0] += root(**vars(inputs)).double()
            sums[1] += int((batch.labels != IGNORED).sum())
        ranks.all_reduce_sum(sums)
    finally:
        # Also where the ranks have agreed to stop: a last step of training follows.
        reshard(root)
        root.train(was_training)
    nats, tokens = sums.tolist()
    return LossResult(
        loss=nats / tokens if tokens else math.nan,
        tokens=int(tokens),
        sequences=count,
        text_bytes=sequences.document_bytes if covers_all else None,
    )


def silent(batch: Batch) -> Batch:
    """The same batch without any label: it keeps a rank in step and adds nothing."""
    return Batch(batch.input_ids, np.full_like(batch.labels, IGNORED), batch.position_ids, batch.document_ids)
