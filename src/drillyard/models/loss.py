"""Next-token cross entropy inside the root's forward, with the vocabulary never whole in memory.

The root module that FSDP2 shards is the causal language model *and* its loss. Its forward keeps the
final hidden states, takes only the rows that carry loss, and turns them into logits a chunk at a
time. A chunk's gradient is made as soon as its loss is, while its logits are there: at most chunk x
V logits exist at once, nothing is computed twice, and what waits for backward is the gradient of
the hidden rows and of the head's weights. Those belong to the root's FSDP group, which is gathered
while the root's forward and backward run.

Cost: rows that carry loss times three products with the head (one forward, two backward). The
head's gradient, V x H, is alive from the loss on and summed by its products (head_product.py): in
compute precision, or in that of the reduction where FSDP2 asks for it (from torch 2.15 on). A
forward with gradients enabled is taken to be followed by a backward.

Letters: B sequences, T tokens per sequence, R rows that carry loss (padded to a whole number of
chunks), C rows of a chunk, H hidden, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from transformers import PreTrainedModel

from drillyard.config.kernel_rules import resolve_loss_chunk
from drillyard.data.mapped_sequences import Batch
from drillyard.models.attention import packed_attention_inputs, to_device
from drillyard.models.head_product import SummedGradient, summed_gradient
from drillyard.models.kernels import builds_kernels

IGNORED = -100


class LanguageModelLoss(nn.Module):
    """A causal language model with its summed loss as forward: what is sharded, called and
    trained."""

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
        scale: float = 1.0,
    ) -> torch.Tensor:
        """`scale` times the cross entropy summed over all targets, in nats: a scalar of fp32 (fp64
        when the model is).

        `rows_R` indexes the flattened [B*T] positions that carry loss; padding rows have target
        -100. Dividing by the valid tokens belongs here, as `scale`: gradients are made in forward,
        and scaled while they are still fp32.
        """
        hidden_BTH = final_hidden(self.causal_lm, input_ids_BT, position_ids_BT, attention)
        hidden_RH = hidden_BTH.flatten(0, 1).index_select(0, rows_R)
        if torch.is_grad_enabled():
            weights = [weight for weight in head_parameters(self.causal_lm) if weight.requires_grad]
            total: torch.Tensor = _LossWithGradients.apply(
                self.causal_lm, targets_R, chunk_rows, scale, hidden_RH, *weights
            )
            return total
        losses = (
            chunk_loss(head_logits(self.causal_lm, hidden_CH), targets_C) * scale
            for hidden_CH, targets_C in _chunks(hidden_RH, targets_R, chunk_rows)
        )
        return functools.reduce(torch.add, losses)

    def next_logits(self, **inputs: Any) -> torch.Tensor:
        """Logits [B, V] that follow the last position; for generation with a KV cache in
        `inputs`."""
        logits: torch.Tensor = self.causal_lm(**inputs, logits_to_keep=1).logits
        return logits[:, -1]


class _LossWithGradients(torch.autograd.Function):
    """The summed loss of rows of hidden states, whose gradients are made along with it, chunk by
    chunk."""

    @staticmethod
    def forward(
        ctx: Any,
        causal_lm: PreTrainedModel,
        targets_R: torch.Tensor,
        chunk_rows: int,
        scale: float,
        hidden_RH: torch.Tensor,
        *weights: torch.Tensor,
    ) -> torch.Tensor:
        hidden_gradient_RH = torch.empty_like(hidden_RH)
        head = summed_gradient(causal_lm)
        others = [weight for weight in weights if head is None or weight is not head.weight]
        of_others: list[torch.Tensor] = []
        losses = []
        done = 0
        for hidden_CH, targets_C in _chunks(hidden_RH, targets_R, chunk_rows):
            with torch.enable_grad():
                hidden_CH = hidden_CH.detach().requires_grad_()
                logits_CV = head_logits(causal_lm, hidden_CH, head)
            loss, logits_gradient_CV = loss_and_gradient(logits_CV.detach(), targets_C, scale)
            gradients = torch.autograd.grad(logits_CV, [hidden_CH, *others], logits_gradient_CV)
            losses.append(loss)
            hidden_gradient_RH[done : done + len(targets_C)] = gradients[0]
            done += len(targets_C)
            if of_others:
                torch._foreach_add_(of_others, gradients[1:])
            else:
                of_others = list(gradients[1:])
            # Or they would be in memory while the next chunk's are made.
            del logits_CV, logits_gradient_CV, gradients
        # Neither inputs nor outputs; held plainly so that backward can hand them over without a
        # copy.
        of_each = dict(zip(others, of_others, strict=True))
        if head is not None:
            assert head.total is not None
            of_each[head.weight] = head.total
        ctx.gradients = [hidden_gradient_RH, *(of_each[weight] for weight in weights)]
        return functools.reduce(torch.add, losses)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, loss_gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        # Exact where this is 1, as in training; any other factor is rounded to the gradients'
        # precision.
        torch._foreach_mul_(gradients, loss_gradient)
        return None, None, None, None, *gradients


def _chunks(
    hidden_RH: torch.Tensor, targets_R: torch.Tensor, chunk_rows: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    return zip(torch.split(hidden_RH, chunk_rows), torch.split(targets_R, chunk_rows), strict=True)


def loss_and_gradient(
    logits_CV: torch.Tensor, targets_C: torch.Tensor, scale: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """`scale` times the summed cross entropy of a chunk, and its gradient [C, V] in the logits'
    precision: `scale` times (softmax less the target). Rows of target -100 add nothing. The
    arithmetic is that of `loss_dtype`. On a GPU the gradient takes the logits' place, where the
    kernel for it can be built.
    """
    is_for_kernel = logits_CV.is_contiguous() and logits_CV.dtype != torch.float64
    if logits_CV.is_cuda and is_for_kernel and builds_kernels(logits_CV.device):
        # Imported here: triton comes only with builds of torch for GPUs.
        from drillyard.models.loss_kernel import turn_into_gradient

        return turn_into_gradient(logits_CV, targets_C, scale, IGNORED), logits_CV
    log_probabilities_CV = F.log_softmax(logits_CV, dim=-1, dtype=loss_dtype(logits_CV.dtype))
    loss = (
        F.nll_loss(log_probabilities_CV, targets_C, ignore_index=IGNORED, reduction="sum") * scale
    )
    weights_C1 = (targets_C != IGNORED).to(log_probabilities_CV.dtype)[:, None] * scale
    gradient_CV = log_probabilities_CV.exp_().mul_(weights_C1)
    gradient_CV.scatter_add_(1, targets_C.clamp(min=0)[:, None], -weights_C1)
    return loss, gradient_CV.to(logits_CV.dtype)


def chunk_loss(logits_CV: torch.Tensor, targets_C: torch.Tensor) -> torch.Tensor:
    """Summed cross entropy of a chunk in `loss_dtype`."""
    logits_CV = logits_CV.to(loss_dtype(logits_CV.dtype))
    return F.cross_entropy(logits_CV, targets_C, ignore_index=IGNORED, reduction="sum")


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


def loss_inputs(
    batch: Batch,
    model: PreTrainedModel,
    attention: str,
    device: torch.device,
    chunk_tokens: int | None,
) -> LossInputs:
    """Move a micro-batch to the device, without blocking, with the rows that carry loss found on
    the host.

    R is padded to a multiple of an eighth of the chunk, so that shapes repeat and compiled code is
    reused.
    """
    chunk_rows = resolve_loss_chunk(batch.labels.size, chunk_tokens)
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


def final_hidden(
    model: PreTrainedModel,
    input_ids_BT: torch.Tensor,
    position_ids_BT: torch.Tensor,
    attention: dict[str, Any],
) -> torch.Tensor:
    """Hidden states [B, T, H] after the final norm; `attention` comes from
    `packed_attention_inputs`."""
    output = model.base_model(
        input_ids=input_ids_BT, position_ids=position_ids_BT, use_cache=False, **attention
    )
    hidden_BTH: torch.Tensor = output.last_hidden_state
    return hidden_BTH


def head_logits(
    model: PreTrainedModel, hidden_RH: torch.Tensor, head: SummedGradient | None = None
) -> torch.Tensor:
    """Logits [R, V] of final hidden states, equal to those of the model's own forward. `head` takes
    the place of the model's.

    Under FSDP2 call it inside the root's forward, where the head's weights are gathered.
    """
    stand_in: Any = object.__new__(type(model))
    stand_in.__dict__.update(vars(model))
    modules: dict[str, Any] = {**model._modules, model.base_model_prefix: _GivenRows()}
    if head is not None:
        own = cast(Any, model).get_output_embeddings()
        modules |= {name: head for name, module in modules.items() if module is own}
    stand_in.__dict__["_modules"] = modules
    output = type(model).forward(
        stand_in, inputs_embeds=hidden_RH[None], use_cache=False, return_dict=True
    )
    # A view of all of them: the gradient of `logits[0]` would be a copy.
    logits_RV: torch.Tensor = output.logits.flatten(0, 1)
    return logits_RV


def head_parameters(model: PreTrainedModel) -> list[nn.Parameter]:
    """The parameters that `head_logits` uses: those outside of the base model, and those it shares
    with it (tied)."""
    heads = [child for name, child in model.named_children() if name != model.base_model_prefix]
    return list(dict.fromkeys(parameter for head in heads for parameter in head.parameters()))


class _GivenRows(nn.Module):
    """A base model whose final hidden states are its input embeddings."""

    def forward(self, *unused: Any, inputs_embeds: torch.Tensor, **settings: Any) -> _RowsOutput:
        return _RowsOutput(inputs_embeds)


class _RowsOutput(tuple[torch.Tensor]):
    """The output of a base model that was asked for nothing but its last hidden state; every other
    field is None."""

    last_hidden_state: torch.Tensor

    def __new__(cls, rows: torch.Tensor) -> _RowsOutput:
        output = super().__new__(cls, (rows,))
        output.last_hidden_state = rows
        return output

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)
        return None
