"""Greedy generation with a KV cache, batched, with the prompts shared out among the data ranks.

All ranks make the same number of forward calls, because a sharded model gathers its weights in
each. Prompts are sorted by length before they are dealt into batches and padded on the left. A
batch ends when the rows of every rank have ended.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from transformers import DynamicCache

from drillyard.evaluation.failures import FailureAgreement
from drillyard.models.attention import resolve_attention
from drillyard.models.loss import LanguageModelLoss
from drillyard.parallel.parallelize import reshard
from drillyard.parallel.ranks import Ranks

FILLER = 0
"""The token to the left of shorter prompts. The attention mask hides it, so that no tokenizer needs
a pad token."""


@torch.no_grad()
def generate(
    root: LanguageModelLoss,
    prompts: Sequence[list[int]],
    ranks: Ranks,
    *,
    eos_token_id: int | None,
    max_new_tokens: int,
    batch_size: int,
    before_forward: Callable[[], None] = lambda: None,
) -> list[list[int]]:
    """The greedy continuation of every prompt, without the end-of-text token; the whole list on
    every rank.

    Without an `eos_token_id` every continuation has `max_new_tokens` tokens. `before_forward`: see
    FailureAgreement. Raises EvaluationFailed.
    """
    was_training = root.training
    root.eval()
    config = root.causal_lm.config
    cached, config.use_cache = config.use_cache, True
    # Kernels for packed training take no KV cache: on the CPU's terms `auto` is SDPA, or eager
    # where that does not fit.
    plain = resolve_attention("auto", "cpu", config=config)
    kernel, config._attn_implementation = config._attn_implementation, plain
    positions = getattr(config, "n_positions", None)
    order = sorted(range(len(prompts)), key=lambda i: (len(prompts[i]), i))
    mine: dict[int, list[int]] = {}
    round_size = batch_size * ranks.num_data_ranks
    agreement = FailureAgreement(root, ranks, before_forward)
    try:
        for start in range(0, len(order), round_size):
            dealt = order[start + ranks.data_rank : start + round_size : ranks.num_data_ranks]
            rows = [prompts[i] for i in dealt] or [[FILLER]]
            # Learned positions end somewhere; the limit is that of the round's longest prompt, the
            # same on every rank.
            longest = max(len(prompts[i]) for i in order[start : start + round_size])
            room = max_new_tokens if positions is None else min(max_new_tokens, positions - longest)
            if room <= 0:
                mine.update({i: [] for i in dealt})
                continue
            # Every token is another shape, for which compiled blocks would be compiled again.
            with torch.compiler.set_stance("force_eager"):
                batch = agreement.alone(
                    functools.partial(_Batch, root, rows, ranks, eos_token_id, ended=not dealt)
                )
                for _ in range(room):
                    agreement.forward(batch.extend)
                    if batch.all_ended():
                        break
            mine.update(zip(dealt, batch.answers(), strict=False))
    finally:
        config.use_cache, config._attn_implementation = cached, kernel
        reshard(root)
        root.train(was_training)
    answers = {
        i: tokens for share in ranks.gather_from_data_ranks(mine) for i, tokens in share.items()
    }
    return [answers[i] for i in range(len(prompts))]


class _Batch:
    """Prompts of one batch on their device, and the tokens that follow them so far."""

    def __init__(
        self,
        root: LanguageModelLoss,
        rows: list[list[int]],
        ranks: Ranks,
        eos: int | None,
        *,
        ended: bool,
    ) -> None:
        width = max(len(row) for row in rows)
        device = ranks.device
        self.root, self.ranks, self.eos = root, ranks, eos
        self.input_ids_BT = torch.tensor(
            [[FILLER] * (width - len(row)) + row for row in rows], device=device
        )
        self.mask_BT = torch.tensor(
            [[0] * (width - len(row)) + [1] * len(row) for row in rows], device=device
        )
        self.position_ids_BT = (self.mask_BT.cumsum(1) - 1).clamp(min=0)
        self.cache = DynamicCache(config=root.causal_lm.config)
        self.ended_B = torch.full((len(rows),), ended, dtype=torch.bool, device=device)
        self.columns: list[torch.Tensor] = []

    def extend(self) -> None:
        """Append the most likely next token to every row; one forward."""
        logits_BV = self.root.next_logits(
            input_ids=self.input_ids_BT,
            attention_mask=self.mask_BT,
            position_ids=self.position_ids_BT,
            past_key_values=self.cache,
            use_cache=True,
        )
        next_B = logits_BV.argmax(dim=-1)
        if self.eos is not None:
            next_B = torch.where(self.ended_B, self.eos, next_B)
            self.ended_B = self.ended_B | (next_B == self.eos)
        self.columns.append(next_B)
        self.input_ids_BT = next_B[:, None]
        self.position_ids_BT = self.position_ids_BT[:, -1:] + 1
        self.mask_BT = torch.cat([self.mask_BT, self.mask_BT.new_ones(len(next_B), 1)], dim=1)

    def all_ended(self) -> bool:
        """Whether the rows of every rank have ended."""
        unfinished = (~self.ended_B).any().to(torch.int32)
        if self.ranks.world_size > 1:
            dist.all_reduce(unfinished, op=dist.ReduceOp.MAX)
        return not unfinished.item()

    def answers(self) -> list[list[int]]:
        """The new tokens of each row, without the end-of-text token."""
        rows = torch.stack(self.columns, dim=1).tolist()
        return [
            row[: row.index(self.eos)] if self.eos is not None and self.eos in row else row
            for row in rows
        ]
