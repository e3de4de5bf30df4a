"""Loss on held-out sequences: nats per token, perplexity, and bits per byte where every byte of the
text is covered.

All ranks call the model equally often (FSDP2 gathers weights in every call) and with batches of one
shape (compiled blocks have a graph per shape): a rank's share of the last round is filled up with
sequences whose labels are all ignored. Sums are fp64 and are added over ranks once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from drillyard.data.mapped_sequences import Sequences
from drillyard.evaluation.failures import FailureAgreement
from drillyard.models.loss import IGNORED, LanguageModelLoss, loss_inputs
from drillyard.parallel.parallelize import reshard
from drillyard.parallel.ranks import Ranks


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
) -> dict[str, Any]:
    """Mean loss per valid token of the first `limit` sequences (None: all), and what follows, the
    same on every rank.

    Perplexity is exp(loss), or infinity; bits per byte are summed nats / ln 2 / UTF-8 bytes of the
    text, None unless every byte carries loss exactly once. `before_forward`: see FailureAgreement.
    Raises EvaluationFailed.
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
    loss = nats / tokens if tokens else math.nan
    text_bytes = sequences.document_bytes if count == len(sequences) else None
    return {
        "loss": loss,
        "perplexity": math.exp(loss) if loss < 700 else math.inf,
        "bits_per_byte": loss * int(tokens) / math.log(2) / text_bytes if text_bytes else None,
        "tokens": int(tokens),
        "sequences": count,
    }
