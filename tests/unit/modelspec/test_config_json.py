"""A config.json as it is read: windows, other names of fields, and what a wrong or unknown one
gets."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.facts import says
from tests.unit.modelspec.building import named_shapes

from drillyard.errors import UserError
from drillyard.modelspec import all_families, model_spec, read_config

LLAMA = {"model_type": "llama"}


@pytest.mark.parametrize(
    ("config", "layers_with_window"),
    [
        ({"model_type": "gemma3_text", "num_hidden_layers": 12}, 10),
        ({"model_type": "gemma3_text", "num_hidden_layers": 4, "sliding_window_pattern": 2}, 2),
        (
            {
                "model_type": "gemma3_text",
                "num_hidden_layers": 2,
                "layer_types": ["sliding_attention"] * 2,
            },
            2,
        ),
        ({"model_type": "exaone4", "num_hidden_layers": 8, "sliding_window_pattern": "LLLG"}, 6),
        ({"model_type": "exaone4", "num_hidden_layers": 8, "sliding_window": None}, 0),
        ({"model_type": "mistral", "num_hidden_layers": 3}, 3),
        ({"model_type": "mistral", "num_hidden_layers": 3, "sliding_window": None}, 0),
        ({"model_type": "llama4_text", "num_hidden_layers": 8}, 6),
        ({"model_type": "gpt_oss", "num_hidden_layers": 5}, 3),
        ({"model_type": "qwen3", "num_hidden_layers": 3, "sliding_window": 8}, 0),
        (
            {
                "model_type": "qwen3",
                "num_hidden_layers": 5,
                "sliding_window": 8,
                "use_sliding_window": True,
                "max_window_layers": 3,
            },
            2,
        ),
        ({"model_type": "llama", "num_hidden_layers": 3, "sliding_window": 8}, 0),
    ],
)
def test_which_layers_have_a_window(config, layers_with_window):
    windows = model_spec(config).windows
    assert len(windows) == config["num_hidden_layers"]
    assert sum(window is not None for window in windows) == layers_with_window


def test_layers_of_one_kind_are_one_object():
    spec = model_spec({"model_type": "deepseek_v3"})
    assert len(spec.blocks) == 61
    assert len({id(block) for block in spec.blocks}) == 2


def test_an_inline_config_names_its_architecture():
    assert model_spec({"architecture": "gpt2", "hidden_size": 24, "n_layer": 1}) == model_spec(
        {"model_type": "gpt2", "n_embd": 24, "num_hidden_layers": 1}
    )


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"model_type": "lama"},
            r"'lama'.*llama\?\n.*--params.*--build",
        ),
        ({"model_type": "bert"}, r"'bert' is not .*\n.*--active-params"),
        ({"model_type": ["llama"]}, "shapes"),
        ({}, "model_type is missing"),
        ({"text_config": {"hidden_size": 8}}, "model_type is missing"),
        (LLAMA | {"hidden_size": "4096"}, "hidden_size.*'4096'"),
        (LLAMA | {"hidden_size": 4096.0}, r"hidden_size.*4096\.0"),
        (LLAMA | {"num_hidden_layers": 0}, "num_hidden_layers.*0"),
        (LLAMA | {"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, more than 10000"),
        (LLAMA | {"vocab_size": None}, "vocab_size.*None"),
        (LLAMA | {"attention_bias": 1}, "attention_bias.*true or false"),
        (LLAMA | {"hidden_size": 100, "num_attention_heads": 32}, "100.*32"),
        (LLAMA | {"num_attention_heads": 32, "num_key_value_heads": 5}, "divide by 5"),
        ({"model_type": "mistral", "hidden_size": 100, "num_attention_heads": 32}, "100.*32"),
        ({"model_type": "mixtral", "num_experts_per_tok": 9}, "9.*8 experts"),
        ({"model_type": "deepseek_v2"}, "num_experts_per_tok.*None"),
        (
            {"model_type": "gemma3_text", "layer_types": ["full_attention"]},
            "names 1 layers, num_hidden_layers is 26",
        ),
        (
            {"model_type": "qwen3", "num_hidden_layers": 1, "layer_types": ["mamba"]},
            "'mamba' .*known",
        ),
        (
            {"model_type": "qwen3", "num_hidden_layers": 1, "layer_types": ["linear_attention"]},
            "no linear attention",
        ),
        ({"model_type": "qwen3", "layer_types": "full_attention"}, "layer_types.*list"),
        ({"model_type": "smollm3", "no_rope_layers": [1]}, "no_rope_layers names 1 layers"),
        (
            {"model_type": "cohere2", "head_dim": 100},
            r"head_dim is 100, but cohere2 takes 8192 / 64",
        ),
        ({"model_type": "qwen3_next", "linear_num_value_heads": 17}, "17.*linear_num_key_heads 16"),
        (
            {"model_type": "gpt2", "n_embd": 8, "hidden_size": 16},
            "n_embd is 8, but hidden_size.* is 16",
        ),
        ({"model_type": "gpt2", "add_cross_attention": True}, "only decoders"),
        (LLAMA | {"is_encoder_decoder": True}, "only decoders"),
    ],
)
def test_a_wrong_config_is_refused_by_field(config, message):
    with pytest.raises(UserError, match=message) as refused:
        model_spec(config, source="some/config.json")
    assert str(refused.value).startswith("some/config.json: ")
    assert len(str(refused.value).splitlines()) <= 2


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (LLAMA | {"num_experts": 8}, "num_experts: llama"),
        (LLAMA | {"intermediate_sizes": [8, 16]}, "intermediate_sizes.*intermediate_size"),
        (LLAMA | {"qk_layernorm": True}, "qk_layernorm: llama"),
        ({"model_type": "qwen2", "attention_bias": True}, "attention_bias: qwen2"),
        ({"model_type": "deepseek_v3", "moe_layer_freq": 2}, "moe_layer_freq.*2.*deepseek_v3.*1"),
        ({"model_type": "deepseek_v3", "index_topk": 2048}, "index_topk: deepseek_v3"),
        ({"model_type": "starcoder2", "mlp_type": "gated"}, "mlp_type is 'gated'"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "only False is known"),
    ],
)
def test_a_field_that_may_change_shapes_is_refused_where_it_is_not_known(config, message):
    with pytest.raises(UserError, match=message) as refused:
        model_spec(config)
    assert "--build" in str(refused.value)


@pytest.mark.parametrize("value", [None, False, 0, [], {}, ""])
def test_an_unknown_field_that_is_switched_off_is_no_concern(value):
    assert model_spec(LLAMA | {"num_experts": value}) == model_spec(LLAMA)


def test_of_a_model_that_transformers_has_built_unknown_fields_are_no_concern():
    assert model_spec(LLAMA | {"my_note": 7}, built=True) == model_spec(LLAMA)
    phi = {"model_type": "phi3"}
    assert model_spec(phi | {"attention_bias": True}, built=True) == model_spec(phi)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"model_type": "llama",}', "not JSON: line 1"),
        ("[1, 2]", "not a JSON object"),
        (b"\xff\xfe{}", "not UTF-8"),
        (None, "No such file"),
    ],
)
def test_a_file_that_is_no_config_is_refused_by_its_name(tmp_path, text, message):
    file = tmp_path / "config.json"
    if text is not None:
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError, match=rf"config\.json: .*{message}"):
        read_config(tmp_path)


def test_a_config_is_read_from_a_file_or_its_directory(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA))
    assert read_config(file) == read_config(tmp_path) == LLAMA


scalars = (
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5)
)
lists = st.lists(scalars | st.lists(scalars, max_size=2), max_size=3)
values = scalars | lists | st.dictionaries(st.text(max_size=5), scalars | lists, max_size=2)


@given(st.sampled_from(sorted(all_families())), st.data())
def test_any_value_of_any_field_gives_a_spec_or_an_error_for_the_user(family, data):
    known = all_families()[family]
    names = [*known.defaults, *known.aliases, *known.fixed, "text_config", "other"]
    config = data.draw(st.dictionaries(st.sampled_from(names), values, max_size=3))
    try:
        spec = model_spec({"model_type": family} | config)
    except UserError as error:
        assert len(str(error).splitlines()) <= 2
    else:
        assert 0 < spec.active_parameters <= spec.total_parameters
        assert spec.total_parameters == sum(_size(shape) for shape in named_shapes(spec).values())


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for length in shape:
        size *= length
    return size


def test_a_part_of_a_config_json_is_no_model():
    whole = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 100}
    assert model_spec(whole, published=True).notes == ()
    for name, meant in (("n_embd", "hidden_size"), ("n_layer", "num_hidden_layers")):
        part = {key: value for key, value in whole.items() if key != name}
        with pytest.raises(UserError, match=f"^cut.json: {meant} missing"):
            model_spec(part, source="cut.json", published=True)
        assert any(meant in note for note in model_spec(part).notes), (
            "an inline config may leave it to transformers"
        )


def test_sizes_that_are_left_to_transformers_are_named():
    (note,) = model_spec(
        {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4}, published=True
    ).notes
    assert says(note, "vocab_size")
