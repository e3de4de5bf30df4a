"""From a config.json to a ModelSpec, without torch.

Cost: well under a millisecond. Limits: decoder-only models of the families in families.yaml. Any
other model is refused, with what to do, rather than approximated.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from drillyard.errors import UserError
from drillyard.guarded_files import read_json
from drillyard.modelspec.block_modules import (
    Tensors,
    attention_module,
    expert_mlp,
    linear,
    mlp_module,
    norm,
)
from drillyard.modelspec.config_fields import REMEDY, ConfigFields, require_plausible_sizes
from drillyard.modelspec.families import TEXT_PARTS, Family, all_families
from drillyard.modelspec.layer_rules import SPARSE_RULES, LayerKind, layer_kinds, window_of
from drillyard.modelspec.spec import Attention, Block, ModelSpec, TensorSpec

_PUBLISHED: Final = ("hidden_size", "num_hidden_layers")
"""Fields of every published config.json."""


def read_config(path: Path) -> dict[str, Any]:
    """The contents of a config.json, or of the one in a directory.

    Raises UserError where there is none or it is not a JSON object.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        config = read_json(file)
    except OSError as error:
        raise UserError(
            f"{file}: cannot be read: {error.strerror}\nGive the config.json of a model."
        ) from error
    except (ValueError, RecursionError) as error:
        where = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        if isinstance(error, UnicodeDecodeError):
            where = "not UTF-8"
        if isinstance(error, json.JSONDecodeError):
            where = f"line {error.lineno}: {error.msg}"
        raise UserError(f"{file}: not JSON: {where}\nGive the config.json of a model.") from error
    if not isinstance(config, dict):
        raise UserError(f"{file}: not a JSON object\nGive the config.json of a model.")
    return config


def model_spec(
    config: Mapping[str, Any],
    *,
    source: str = "model config",
    built: bool = False,
    published: bool = False,
) -> ModelSpec:
    """The spec of the model in a config.json, or in an inline `model.config` with `architecture`
    for `model_type`.

    Of a multimodal config the text part counts. `source` names the config in errors. `built`:
    transformers built this model, so unknown fields are ignored. `published`: it is a config.json,
    which must have a hidden size and a number of layers.

    Raises UserError for an unknown family, an unknown field that may change shapes, and a wrong
    type or value.
    """
    require_plausible_sizes(config, source)
    config, notes = _text_part(config)
    model_type = config.get("model_type") or config.get("architecture")
    family = all_families().get(model_type) if isinstance(model_type, str) else None
    if family is None or not isinstance(model_type, str):
        raise _unknown_family(model_type, source)
    for encoder in ("is_encoder_decoder", "add_cross_attention"):
        if config.get(encoder):
            raise UserError(f"{source}: {encoder} is set; only decoders are known.{REMEDY}")
    fields = ConfigFields(config, model_type, family, source=source, built=built)
    cut = [name for name in fields.left_out if name in _PUBLISHED]
    if published and cut:
        raise fields.error(
            f"{' and '.join(cut)} missing: is this the whole config.json of a model?"
        )
    _check(fields, family)
    return ModelSpec(
        model_type=model_type,
        hidden_size=fields.hidden,
        vocab_size=fields.vocab,
        tied=fields.flag("tie_word_embeddings"),
        blocks=_blocks(family, fields),
        root=_root(family, fields),
        blocks_path=family.blocks,
        positions=fields.integer(family.positions) if family.positions else None,
        notes=(*notes, *_notes(family, fields, config)),
    )


def _text_part(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """The text part of a multimodal config, with a note; any other config as it is."""
    text = config.get("text_config")
    if not isinstance(text, Mapping) or config.get("model_type") in all_families():
        return config, ()
    outer = config.get("model_type")
    inner = {"model_type": TEXT_PARTS.get(str(outer))} | dict(text)
    if isinstance(config.get("tie_word_embeddings"), bool):
        inner["tie_word_embeddings"] = config["tie_word_embeddings"]
    return inner, (f"only the text part of this {outer} model is counted",)


def _unknown_family(model_type: Any, source: str) -> UserError:
    if model_type is None:
        return UserError(f"{source}: model_type is missing; give it, for example llama.{REMEDY}")
    near = difflib.get_close_matches(str(model_type), all_families(), n=1)
    hint = f"; did you mean {near[0]}?" if near else "."
    return UserError(
        f"{source}: model_type {model_type!r} is not one whose shapes are known{hint}{REMEDY}"
    )


def _check(f: ConfigFields, family: Family) -> None:
    if family.hidden_divides_by_heads and f.hidden % f.heads:
        raise f.error(f"the hidden size {f.hidden} does not divide by {f.heads} attention heads")
    if family.head_dim_is_derived and f.head_dim * f.heads != f.hidden:
        raise f.error(
            f"head_dim is {f.head_dim}, but {f.model_type} takes {f.hidden} / {f.heads} (hidden"
            " size / heads)"
        )


def _blocks(family: Family, f: ConfigFields) -> tuple[Block, ...]:
    """The blocks in order. Layers of the same kind, with or without experts, share one object."""
    sparse = SPARSE_RULES[family.sparse_layers](f) if family.sparse_layers else frozenset()
    layers = [
        (kind, layer in sparse) for layer, kind in enumerate(layer_kinds(f, *family.layer_kinds))
    ]
    made = {layer: _block(family, f, *layer) for layer in dict.fromkeys(layers)}
    return tuple(made[layer] for layer in layers)


def _block(family: Family, f: ConfigFields, kind: LayerKind, sparse: bool) -> Block:
    settings = family.linear_attention if kind == "linear_attention" else family.attention
    if settings is None:
        raise f.error(f"layer_types: {f.model_type} has no linear attention")
    attributes, attention = attention_module(f, settings)
    mlp, feed_forward = (
        expert_mlp(f, **family.experts)
        if sparse and family.experts is not None
        else mlp_module(f, family.mlp)
    )
    names = _block_norms(family, f)
    return Block(
        attention=Attention(
            **attributes, window=window_of(f, kind), chunked=kind == "chunked_attention"
        ),
        mlp=mlp,
        norm="rms" if family.norm == "rms_norm" else "layer",
        num_norms=len(names),
        parallel=f.switch(family.parallel),
        tensors=(*attention, *feed_forward, *(t for name in names for t in _norm(family, f, name))),
    )


def _block_norms(family: Family, f: ConfigFields) -> Sequence[str]:
    if family.parallel_block_norms is None or not f.switch(family.parallel):
        return family.block_norms
    if f.has("num_ln_in_parallel_attn"):  # Falcon: one norm for attention and MLP, or one for each
        number = f.integer(
            "num_ln_in_parallel_attn", 2 if f.flag("new_decoder_architecture") else 1
        )
        return ("ln_attn", "ln_mlp") if number == 2 else family.parallel_block_norms
    return family.parallel_block_norms


def _norm(family: Family, f: ConfigFields, name: str) -> Tensors:
    return norm(family.norm, name, f.hidden) if f.switch(family.norm_weights) else ()


def _root(family: Family, f: ConfigFields) -> Tensors:
    """Embedding, learned positions, final norm, and the head where it is not tied."""
    hidden, width = f.hidden, f.integer(family.embedding_size, f.hidden)
    tensors = [TensorSpec(f"{family.embedding}.weight", (f.vocab, width), "embedding")]
    if family.embedding_norm:
        tensors += _norm(family, f, family.embedding_norm)
    if family.positions and family.position_table:
        positions = f.integer(family.positions) + family.extra_positions
        tensors.append(
            TensorSpec(f"{family.position_table}.weight", (positions, hidden), "positions")
        )
    if family.embedding_projections and width != hidden:
        into, out = family.embedding_projections
        tensors += linear(into, width, hidden, "projection")
        tensors += linear(out, hidden, width, "projection")
    if all(f.flag(name) == value for name, value in family.final_norm_flags.items()):
        tensors += _norm(family, f, family.final_norm)
    head = linear(family.head, width, f.vocab, "head", bias=f.switch(family.head_bias))
    # A tied matrix is the embedding's; a bias stays.
    return (*tensors, *(head[1:] if f.flag("tie_word_embeddings") else head))


def _notes(family: Family, f: ConfigFields, config: Mapping[str, Any]) -> Iterator[str]:
    if f.left_out:
        yield f"{', '.join(f.left_out)} not in the config: the defaults of transformers count"
    if family.extra_prediction_layers and f.integer(family.extra_prediction_layers, 0, minimum=0):
        yield (
            "the layers for multi-token prediction are not counted: transformers does not build"
            " them"
        )
    if config.get("quantization_config"):
        yield "the weights are quantised on disk; parameters are counted as before quantisation"
