"""Specs of models that no family describes (that families are read off their tensors too is in
test_families.py)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.facts import says

from drillyard.errors import UserError
from drillyard.modelspec import spec_from_counts, spec_from_shapes

CONFIG = {"model_type": "novel", "hidden_size": 8, "vocab_size": 10, "num_attention_heads": 2}
DENSE = {
    "model.embed_tokens.weight": (10, 8),
    "model.layers.0.self_attn.q_proj.weight": (8, 8),
    "model.layers.0.mlp.up_proj.weight": (32, 8),
    "model.layers.0.norm.weight": (8,),
    "model.layers.1.self_attn.q_proj.weight": (8, 8),
    "model.norm.weight": (8,),
}
# Experts as modules of their own, one of three chosen.
EXPERTS = {f"model.layers.0.mlp.experts.{n}.w{w}.weight": (4, 8) for n in range(3) for w in (1, 2)}
SHARED = {
    "model.layers.0.mlp.shared_experts.w1.weight": (4, 8),
    "model.layers.0.mlp.gate.weight": (3, 8),
}


@given(st.integers(1, 10**15), st.integers(1, 10**15))
def test_counts_alone_make_a_spec(one, another):
    total, active = max(one, another), min(one, another)
    spec = spec_from_counts(total, active)
    assert (spec.total_parameters, spec.active_parameters) == (total, active)
    assert spec_from_counts(total).active_parameters == total
    assert says(spec.notes[0], "only parameter counts")


@pytest.mark.parametrize(("total", "active"), [(0, None), (-1, None), (10, 0), (10, 11)])
def test_counts_that_cannot_be_are_refused(total, active):
    with pytest.raises(UserError, match=r"--active-params|--params"):
        spec_from_counts(total, active)


def test_blocks_are_the_longest_list_and_the_rest_is_root():
    spec = spec_from_shapes(DENSE, CONFIG)
    assert [block.parameters for block in spec.blocks] == [64 + 256 + 8, 64]
    assert (spec.root_parameters, spec.tied, spec.embedding_parameters) == (88, True, 80)
    assert spec.active_parameters == spec.total_parameters == sum((328, 64, 88))
    assert "sliding windows" in spec.notes[0]


def test_experts_that_are_modules_of_their_own_are_counted_by_those_chosen():
    spec = spec_from_shapes(
        DENSE | EXPERTS | SHARED, CONFIG | {"num_experts": 3, "num_experts_per_tok": 1}
    )
    assert spec.total_parameters - spec.active_parameters == 2 * 64


@pytest.mark.parametrize(
    ("shapes", "config", "message"),
    [
        (DENSE | EXPERTS, CONFIG, "experts"),
        (DENSE | EXPERTS, CONFIG | {"num_experts": 3, "num_experts_per_tok": 4}, "experts"),
        ({"weight": (3, 3)}, CONFIG, "blocks.*--params"),
        (DENSE, CONFIG | {"num_attention_heads": None}, "num_attention_heads.*None"),
    ],
)
def test_what_the_names_do_not_say_is_refused(shapes, config, message):
    with pytest.raises(UserError, match=message):
        spec_from_shapes(shapes, config)
