"""The two halves of the forward give the numbers of the model's own, logits and gradients, for
every architecture."""

from __future__ import annotations

import pytest
import torch
from tests.unit.models.tiny import CONFIGS, LENGTH, VOCAB, filled_model
from torch import nn

from drillyard.config.model_files import ARCHITECTURES
from drillyard.models.architectures import blocks
from drillyard.models.loss import final_hidden, head_logits


def tokens() -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(2, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    return ids, torch.arange(LENGTH).expand(2, -1)


def test_every_architecture_of_the_table_is_tested() -> None:
    assert set(CONFIGS) == set(ARCHITECTURES)


@pytest.mark.parametrize("architecture", CONFIGS)
def test_logits_of_rows_equal_those_of_the_models_own_forward(architecture: str) -> None:
    model = filled_model(architecture)
    ids, positions = tokens()
    own = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    hidden = final_hidden(model, ids, positions, {})
    rows = torch.tensor([0, 5, LENGTH + 3])
    assert torch.equal(head_logits(model, hidden.flatten(0, 1)), own.flatten(0, 1))
    torch.testing.assert_close(
        head_logits(model, hidden.flatten(0, 1)[rows]), own.flatten(0, 1)[rows]
    )


@pytest.mark.parametrize("architecture", CONFIGS)
def test_gradients_through_rows_in_parts_equal_those_of_the_models_own_forward(
    architecture: str,
) -> None:
    model = filled_model(architecture, dtype=torch.float64)
    ids, positions = tokens()
    gradients = []
    for chunked in (False, True):
        model.zero_grad()
        if chunked:
            hidden = final_hidden(model, ids, positions, {}).flatten(0, 1)
            parts = [head_logits(model, rows) for rows in hidden.split(7)]
            logits = torch.cat(parts)
        else:
            logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits.flatten(
                0, 1
            )
        logits.square().sum().backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-9, atol=1e-9, msg=name)


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("gemma2", {"final_logit_softcapping": 2.0}),
        ("cohere", {"logit_scale": 0.25}),
        ("granite", {"logits_scaling": 4.0}),
    ],
)
def test_the_head_is_more_than_its_matrix_where_the_model_says_so(
    architecture: str, changes: dict[str, float]
) -> None:
    """Guards the tests above: these heads do scale or cap, so a bare matrix product would fail
    them."""
    model = filled_model(architecture, **changes)
    rows = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    assert not torch.allclose(head_logits(model, rows), model.lm_head(rows))


def test_the_model_itself_is_left_as_it_was() -> None:
    model = filled_model("llama")
    base = model.model
    head_logits(model, torch.zeros(2, 32))
    assert model.model is base and model._modules["model"] is base


@pytest.mark.parametrize("architecture", CONFIGS)
def test_blocks_are_the_layers_in_order(architecture: str) -> None:
    model = filled_model(architecture)
    found = blocks(model)
    assert len(found) == 2
    assert len({type(block) for block in found}) == 1
    names = [
        name for name, module in model.named_modules() if any(module is block for block in found)
    ]
    assert [name.split(".")[-1] for name in names] == ["0", "1"]
    inside = sum(parameter.numel() for block in found for parameter in block.parameters())
    assert inside > 0.6 * sum(parameter.numel() for parameter in model.parameters())
    assert all(isinstance(block, nn.Module) for block in found)
