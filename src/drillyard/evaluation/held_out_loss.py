"""Loss on held-out sequences: nats per token, perplexity, and bits per byte where every byte of the text is covered.

All ranks call the model equally often (FSDP2 gathers weights in every call) and with batches of one shape (compiled
blocks have a graph per shape): a rank's share of the last round is filled up with sequences whose labels are all
ignored. Sums are fp64 and are added over ranks once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from drillyard.data import Sequences
from drillyard.evaluation.failures import FailureAgreement
from drillyard.models.loss import IGNORED, LanguageModelLoss, loss_inputs
from drillyard.parallel.parallelize import reshard
from drillyard.parallel.ranks import Ranks


@dataclass(frozen=True)
class HeldOutLoss:
    """Loss over one held-out source."""

    loss: float
    tokens: int
    sequences: int
    text_bytes: int | None

    def as_dict(self) -> dict[str, Any]:
        """The figures as they go into metrics and summaries.

        Perplexity is exp(loss), or infinity; bits per byte are summed nats / ln 2 / UTF-8 bytes of the text, None
        unless every byte carries loss exactly once.
        """
        bits = self.loss * self.tokens / math.log(2)
        return {
            "loss": self.loss,
            "perplexity": math.exp(self.loss) if self.loss < 700 else math.inf,
            "bits_per_byte": bits / self.text_bytes if self.text_bytes else None,
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
    before_forward: Callable[[], None] = lambda: None,
) -> HeldOutLoss:
    """Mean loss per valid token of the first `limit` sequences (None: all), the same on every rank.

    `before_forward`: see FailureAgreement. Raises EvaluationFailed.
    """
    count = len(sequences) if limit is None else min(limit, len(sequences))
    sums = torch.zeros(2, dtype=torch.float64, device=ranks.device)
    was_training = root.training
    root.eval()
    round_size = batch_size * ranks.num_data_ranks
    agreement = FailureAgreement(root, ranks, before_forward)

    def add_round(start: int) -> None:
        first = start + ranks.data_rank * batch_size
        indices = np.arange(first, first + batch_size, dtype=np.int64)
        batch = sequences.read(np.minimum(indices, count - 1))
        batch = replace(batch, labels=np.where((indices < count)[:, None], batch.labels, IGNORED))
        inputs = loss_inputs(batch, root.causal_lm, attention, ranks.device, chunk_tokens)
        sums[0] += root(**vars(inputs)).double()
        sums[1] += int((batch.labels != IGNORED).sum())

    try:
        for start in range(0, count, round_size):
            agreement.forward(functools.partial(add_round, start))
        ranks.sum_over_data_ranks(sums)
    finally:
        reshard(root)
        root.train(was_training)
    nats, tokens = sums.tolist()
    return HeldOutLoss(
        loss=nats / tokens if tokens else math.nan,
        tokens=int(tokens),
        sequences=count,
        text_bytes=sequences.document_bytes if count == len(sequences) else None,
    )
