"""Specs of models that no family describes: from parameter counts, or from the tensors of a built
model.

`spec_from_counts` (`--params`, `--active-params`) gives 6N and the memory of weights, but neither
attention nor activations. `spec_from_shapes` (`--build`) takes the names and shapes that
transformers builds on the meta device and reads the structure from the names: the list of blocks,
attention, experts, the embedding. Its counts are exact; sliding windows are unknown, and its notes
say so.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from math import prod
from typing import Any, Final

from drillyard.errors import UserError
from drillyard.modelspec.spec import Attention, Block, Mlp, ModelSpec, Role, TensorSpec

_EXPERT_COUNTS: Final = (
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "moe_num_experts",
    "num_moe_experts",
)
_EXPERTS_CHOSEN: Final = (
    "num_experts_per_tok",
    "moe_k",
    "moe_topk",
    "num_experts_per_token",
    "num_selected_experts",
)
_INDEXED: Final = re.compile(r"(.*?)\.(\d+)\.(.*)")
_STACKED_EXPERTS: Final = re.compile(r"(^|\.)experts?(\.|_)")
_SHARED: Final = re.compile(r"shared")
_ROLES: Final[tuple[tuple[str, Role], ...]] = (
    (r"norm|(^|\.)ln_", "norm"),
    (r"router|(^|\.)gate\.|shared_expert_gate", "router"),
    (r"att(n|ention)", "attention"),
    (r"wpe|embed_positions|position_embeddings", "positions"),
    (r"lm_head|embed_out|output_layer", "head"),
    (r"embed|wte", "embedding"),
)


def spec_from_counts(parameters: int, active_parameters: int | None = None) -> ModelSpec:
    """A model of which only the number of parameters is known, and of those that one token uses
    (default: all).

    Raises UserError for counts below 1 and for more active parameters than there are.
    """
    active = parameters if active_parameters is None else active_parameters
    if parameters < 1 or active < 1:
        raise UserError(
            f"--params {parameters}, --active-params {active}: give numbers of parameters above 0."
        )
    if active > parameters:
        raise UserError(
            f"--active-params {active} is more than --params {parameters}; give the smaller one as"
            " active."
        )
    return ModelSpec(
        model_type="unknown",
        hidden_size=0,
        vocab_size=0,
        tied=False,
        blocks=(),
        root=(TensorSpec("parameters", (parameters,), "projection"),),
        blocks_path="",
        idle_root_parameters=parameters - active,
        notes=("only parameter counts are known: attention and activations are not counted",),
    )


def spec_from_shapes(
    shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any], *, source: str = "config"
) -> ModelSpec:
    """The spec of a model by the names and shapes of its parameters (a tied head not listed) and
    its config.

    Raises UserError where the config does not say what the FLOPs of attention, or of experts, need.
    """
    path = _blocks_path(shapes)
    if path is None:
        raise UserError(
            f"{source}: the model that was built has no list of blocks; give --params instead."
        )
    by_layer: dict[int, list[TensorSpec]] = defaultdict(list)
    root = []
    for name, shape in shapes.items():
        index, _, rest = name.removeprefix(f"{path}.").partition(".")
        if name.startswith(f"{path}.") and index.isdigit():
            by_layer[int(index)].append(_tensor(rest, shape, "mlp"))
        else:
            root.append(_tensor(name, shape, "projection"))
    attention = _attention(config, source)
    made: dict[tuple[TensorSpec, ...], Block] = {}
    blocks = []
    for _, in_layer in sorted(by_layer.items()):
        tensors = tuple(in_layer)
        if tensors not in made:
            made[tensors] = _block(tensors, attention, config, source)
        blocks.append(made[tensors])
    return ModelSpec(
        model_type=str(config.get("model_type")),
        hidden_size=_integer(config, "hidden_size", source),
        vocab_size=_integer(config, "vocab_size", source),
        tied=not any(tensor.role == "head" and len(tensor.shape) == 2 for tensor in root),
        blocks=tuple(blocks),
        root=tuple(root),
        blocks_path=path,
        notes=(
            (
                "sliding windows of this family are not known: attention is counted over the whole"
                " sequence"
            ),
        ),
    )


def _blocks_path(shapes: Mapping[str, tuple[int, ...]]) -> str | None:
    """The name of the list of modules that holds most parameters."""
    sizes: dict[str, int] = defaultdict(int)
    for name, shape in shapes.items():
        if indexed := _INDEXED.match(name):
            sizes[indexed[1]] += prod(shape)
    return max(sizes, key=lambda path: sizes[path], default=None)


def _tensor(name: str, shape: tuple[int, ...], otherwise: Role) -> TensorSpec:
    role: Role = next((role for pattern, role in _ROLES if re.search(pattern, name)), otherwise)
    if role in (otherwise, "norm") and _STACKED_EXPERTS.search(name) and not _SHARED.search(name):
        role = "expert"
    linear = (
        len(shape) == 2
        and name.endswith(".weight")
        and role not in ("norm", "embedding", "positions")
    )
    return TensorSpec(name, shape, role, linear)


def _attention(config: Mapping[str, Any], source: str) -> Attention:
    hidden, heads = (
        _integer(config, name, source) for name in ("hidden_size", "num_attention_heads")
    )
    head_dim = config.get("qk_head_dim") or config.get("head_dim") or hidden // heads
    return Attention(
        kind="softmax",
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        value_head_dim=config.get("v_head_dim") or head_dim,
    )


def _block(
    tensors: tuple[TensorSpec, ...], attention: Attention, config: Mapping[str, Any], source: str
) -> Block:
    count, chosen = 0, 0
    if any(tensor.role == "expert" for tensor in tensors):
        count, chosen = [
            next((config[name] for name in names if config.get(name)), 0)
            for names in (_EXPERT_COUNTS, _EXPERTS_CHOSEN)
        ]
        if not (isinstance(count, int) and isinstance(chosen, int) and 0 < chosen <= count):
            raise UserError(
                f"{source}: the model has experts, and the config does not say how many there are"
                " and are chosen\nGive --params and --active-params instead of --build."
            )
    width = config.get("intermediate_size") or 4 * _integer(config, "hidden_size", source)
    gated = any(re.search(r"gate_(up_)?proj|w3\.|gate_up", tensor.name) for tensor in tensors)
    norms = {tensor.name.rpartition(".")[0] for tensor in tensors if tensor.role == "norm"}
    return Block(
        attention=attention,
        mlp=Mlp(
            gated,
            str(config.get("hidden_act", "silu")),
            width,
            count,
            chosen,
            config.get("moe_intermediate_size") or 0,
        ),
        norm=(
            "layer" if any(t.role == "norm" and t.name.endswith("bias") for t in tensors) else "rms"
        ),
        num_norms=sum("att" not in name.rpartition(".")[0] for name in norms),
        parallel=False,
        tensors=tensors,
    )


def _integer(config: Mapping[str, Any], name: str, source: str) -> int:
    value = config.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UserError(
            f"{source}: {name} must be a positive integer, found {value!r}; give --params instead."
        )
    return value
