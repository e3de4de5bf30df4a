"""The two halves of a causal language model's forward: tokens to final hidden states, rows of those to logits.

The loss takes the halves apart so that logits exist only for a chunk of rows at a time. The second half must give the
numbers of the model's own head, which may scale them (Cohere, Granite) or soft-cap them (Gemma 2). So it is the
model's own forward that runs, on a stand-in for the model in which the base model is replaced by one that returns the
given rows: no formula is repeated here, and a head that changes with its library stays right.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from drillyard.models.architectures import architecture


def blocks(model: PreTrainedModel) -> list[nn.Module]:
    """The transformer blocks of a causal language model, first to last."""
    return list(getattr(model.base_model, architecture(model.config.model_type).blocks))


def final_hidden(
    model: PreTrainedModel, input_ids_BT: torch.Tensor, position_ids_BT: torch.Tensor, attention: dict[str, Any]
) -> torch.Tensor:
    """Hidden states [B, T, H] after the final norm; `attention` comes from `packed_attention_inputs`."""
    output = model.base_model(input_ids=input_ids_BT, position_ids=position_ids_BT, use_cache=False, **attention)
    hidden_BTH: torch.Tensor = output.last_hidden_state
    return hidden_BTH


def head_logits(model: PreTrainedModel, hidden_RH: torch.Tensor) -> torch.Tensor:
    """Logits [R, V] of final hidden states, equal to those of the model's own forward.

    The head's weights are read when it is called: under FSDP2 call it inside the root's forward, where they are
    gathered.
    """
    stand_in: Any = object.__new__(type(model))
    stand_in.__dict__.update(vars(model))
    stand_in.__dict__["_modules"] = {**model._modules, model.base_model_prefix: _GivenRows()}
    output = type(model).forward(stand_in, inputs_embeds=hidden_RH[None], use_cache=False, return_dict=True)
    logits_RV: torch.Tensor = output.logits[0]
    return logits_RV


def head_parameters(model: PreTrainedModel) -> list[nn.Parameter]:
    """The parameters that `head_logits` uses: those outside of the base model, and those it shares with it (tied)."""
    heads = [child for name, child in model.named_children() if name != model.base_model_prefix]
    return list(dict.fromkeys(parameter for head in heads for parameter in head.parameters()))


class _GivenRows(nn.Module):
    """A base model whose final hidden states are its input embeddings."""

    def forward(self, *unused: Any, inputs_embeds: torch.Tensor, **settings: Any) -> _RowsOutput:
        return _RowsOutput(inputs_embeds)


class _RowsOutput(tuple[torch.Tensor]):
    """The output of a base model that was asked for nothing but its last hidden state; every other field is None."""

    last_hidden_state: torch.Tensor

    def __new__(cls, rows: torch.Tensor) -> _RowsOutput:
        output = super().__new__(cls, (rows,))
        output.last_hidden_state = rows
        return output

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)
        return None
