"""A spec of what transformers builds, for families that modelspec does not know."""

from __future__ import annotations

import pytest
from tests.unit.modelspec.building import named_shapes

from drillyard.errors import UserError
from drillyard.models.meta_model import build_spec
from drillyard.modelspec import all_families, flops_per_token, model_spec


def test_a_family_without_a_row_is_counted_as_it_is_built():
    # Like Llama: two tables of 48000 x 2560, 24 times four square matrices, three of 2560 x 7040
    # and two norms, a norm.
    config = {
        "model_type": "helium",
        "vocab_size": 48000,
        "hidden_size": 2560,
        "intermediate_size": 7040,
    }
    config |= {
        "num_hidden_layers": 24,
        "num_attention_heads": 20,
        "num_key_value_heads": 20,
        "head_dim": 128,
    }
    assert "helium" not in all_families()
    spec = build_spec(config)
    assert spec.total_parameters == spec.active_parameters == 2_172_643_840
    assert (len(spec.blocks), spec.num_heads, spec.head_dim) == (24, 20, 128)
    assert flops_per_token(spec, "palm", 1024) == 6 * spec.total_parameters + 12 * 24 * 2560 * 1024


def test_a_known_family_gives_the_same_either_way():
    config = {"model_type": "olmoe", "num_hidden_layers": 2, "intermediate_size": 1024}
    built, known = build_spec(config), model_spec(config)
    assert named_shapes(built) == named_shapes(known)
    assert built.active_parameters == known.active_parameters


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "novel"}, "model_type 'novel'\n.*--params"),
        ({}, "model_type None"),
        ({"model_type": "helium", "hidden_size": "wide"}, "helium"),
        ({"model_type": "t5"}, "build .*t5"),
    ],
)
def test_what_cannot_be_built_is_refused(config, message):
    with pytest.raises(UserError, match=message) as refused:
        build_spec(config)
    assert len(str(refused.value).splitlines()) <= 2
