"""Generation with a KV cache, greedy or sampled, batched, with the prompts shared out among data
ranks.

All ranks make the same number of forward calls, because a sharded model gathers its weights in
each. Prompts are sorted by length before they are dealt into batches and padded on the left. A
batch ends when the rows of every rank have ended.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from transformers import DynamicCache

from drillyard.errors import UserError
from drillyard.evaluation.failures import FailureAgreement
from drillyard.models.attention import resolve_attention
from drillyard.models.loss import LanguageModelLoss
from drillyard.parallel.parallelize import reshard
from drillyard.parallel.ranks import Ranks

FILLER = 0
"""The token to the left of shorter prompts. The attention mask hides it, so that no tokenizer needs
a pad token."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn: logits divided by `temperature` (above 0), then the `top_k` most likely
    tokens (0: all), then the fewest most likely ones whose probabilities reach `top_p`.

    Each prompt has a random generator of its own, of `seed` and its number: its tokens do not
    depend on the other prompts of its batch.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0

    def generator(self, prompt: int, device: torch.device) -> torch.Generator:
        """The random generator of prompt number `prompt`."""
        # On a CPU torch uses the lower 32 bits alone, so both numbers are mixed into them.
        mixed = np.random.SeedSequence([self.seed, prompt]).generate_state(1)[0]
        return torch.Generator(device).manual_seed(int(mixed))

    def draw(self, logits_V: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """One token of `logits_V`, as a scalar."""
        sorted_V, tokens_V = torch.sort(logits_V.float() / self.temperature, descending=True)
        if self.top_k:
            sorted_V, tokens_V = sorted_V[: self.top_k], tokens_V[: self.top_k]
        probabilities_V = sorted_V.softmax(dim=-1)
        # A token is left out where those before it are enough; the first never is.
        before_V = probabilities_V.cumsum(dim=-1) - probabilities_V
        enough_V = (before_V >= self.top_p) & (before_V > 0)
        probabilities_V = probabilities_V.masked_fill(enough_V, 0)
        return tokens_V[torch.multinomial(probabilities_V, 1, generator=generator)[0]]


@torch.no_grad()
def generate(
    root: LanguageModelLoss,
    prompts: Sequence[list[int]],
    ranks: Ranks,
    *,
    end_tokens: Collection[int],
    max_new_tokens: int,
    batch_size: int,
    sampling: Sampling | None = None,
    numbers: Sequence[int] | None = None,
    on_tokens: Callable[[list[int]], None] = lambda tokens: None,
    before_forward: Callable[[], None] = lambda: None,
) -> list[list[int]]:
    """The continuation of every prompt, up to the first of `end_tokens` and without it; the whole
    list on every rank.

    Without `end_tokens` every continuation has `max_new_tokens` tokens. Greedy without `sampling`,
    which draws by the `numbers` of the prompts (default: from 0). `on_tokens` gets the next token
    of each row of this rank's batch, as they come. `before_forward`: see FailureAgreement. Raises
    EvaluationFailed.
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
                own_numbers = [i if numbers is None else numbers[i] for i in dealt]
                batch = agreement.alone(
                    functools.partial(_Batch, root, rows, own_numbers, ranks, end_tokens, sampling)
                )
                for _ in range(room):
                    agreement.forward(batch.extend)
                    on_tokens(batch.columns[-1].tolist())
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
        numbers: list[int],
        ranks: Ranks,
        end_tokens: Collection[int],
        sampling: Sampling | None,
    ) -> None:
        """`numbers`: of the prompts in `rows`; none where this rank has no prompt and only takes
        part."""
        width = max(len(row) for row in rows)
        device = ranks.device
        self.root, self.ranks, self.sampling = root, ranks, sampling
        self.end_tokens = frozenset(end_tokens)
        self.end_tokens_E = torch.tensor(sorted(self.end_tokens), dtype=torch.int64, device=device)
        self.generators = (
            [] if sampling is None else [sampling.generator(number, device) for number in numbers]
        )
        self.input_ids_BT = torch.tensor(
            [[FILLER] * (width - len(row)) + row for row in rows], device=device
        )
        self.mask_BT = torch.tensor(
            [[0] * (width - len(row)) + [1] * len(row) for row in rows], device=device
        )
        self.position_ids_BT = (self.mask_BT.cumsum(1) - 1).clamp(min=0)
        self.cache = DynamicCache(config=root.causal_lm.config)
        self.ended_B = torch.full((len(rows),), not numbers, dtype=torch.bool, device=device)
        self.columns: list[torch.Tensor] = []

    def extend(self) -> None:
        """Append the next token to every row; one forward."""
        logits_BV = self.root.next_logits(
            input_ids=self.input_ids_BT,
            attention_mask=self.mask_BT,
            position_ids=self.position_ids_BT,
            past_key_values=self.cache,
            use_cache=True,
        )
        if logits_BV.isnan().any():
            raise UserError(
                "the model's logits are NaN: its weights are damaged, or too large for its"
                " precision"
            )
        if self.sampling is not None and self.generators:
            drawn = [
                self.sampling.draw(logits_V, generator)
                for logits_V, generator in zip(logits_BV, self.generators, strict=True)
            ]
            next_B = torch.stack(drawn)
        else:
            next_B = logits_BV.argmax(dim=-1)
        if self.end_tokens:
            next_B = torch.where(self.ended_B, self.end_tokens_E[0], next_B)
            self.ended_B = self.ended_B | torch.isin(next_B, self.end_tokens_E)
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
        """The new tokens of each row, up to the first end token."""
        rows = torch.stack(self.columns, dim=1).tolist()
        return [
            list(itertools.takewhile(lambda token: token not in self.end_tokens, row))
            for row in rows
        ]
