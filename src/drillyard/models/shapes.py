"""Names and shapes of a model's parameters, from its config.json: for families that `modelspec` does not know.

transformers builds the model on the meta device, so nothing is downloaded or allocated, whatever its size; it takes
tenths of a second beside the imports. Only families of the installed transformers can be built: code from a model
repository is never run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers import __version__ as transformers_version

from drillyard.errors import UserError
from drillyard.modelspec import ModelSpec, spec_from_shapes

# What built_spec asks for, under the names that transformers gives it in every family.
_FIELDS: Final = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "qk_head_dim",
    "v_head_dim",
    "hidden_act",
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "moe_num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
)


def build_spec(config: Mapping[str, Any], *, source: str = "model config") -> ModelSpec:
    """The spec of the model that transformers builds from the contents of a config.json.

    Raises UserError for a family that the installed transformers does not know, and for a config that it refuses.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise UserError(
            f"{source}: transformers {transformers_version} does not know model_type {model_type!r}\n"
            "Give --params and --active-params instead of --build."
        )
    try:
        resolved = CONFIG_MAPPING[model_type].from_dict(dict(config))
        with torch.device("meta"):
            # Some configs name an attention kernel of the hub, which transformers would fetch and run.
            model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                resolved, trust_remote_code=False, attn_implementation="eager"
            )
    except (ValueError, TypeError, KeyError, AttributeError, AssertionError, StrictDataclassError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"{source}: transformers cannot build this {model_type}: {reason or type(error).__name__}\n"
            "Mend the config, or give --params and --active-params instead of --build."
        ) from error
    text = resolved.get_text_config(decoder=True)
    fields = {name: getattr(text, name, None) for name in _FIELDS}
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    return spec_from_shapes(shapes, fields, source=source)
