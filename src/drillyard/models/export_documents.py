"""config.json and generation_config.json of an export, for transformers 4 and 5 and what reads the
files themselves.

A model that began from a base keeps the base's own files: transformers 5 writes other keys than it
reads, and transformers 4, servers and converters know the older ones. Only what training changed is
changed: the fields in which the trained config differs from the base's file as transformers reads
it.

Keys that transformers 4 lacks are added beside those of transformers 5, which reads both alike:
`torch_dtype` beside `dtype`; `rope_theta`, `rope_scaling`, `rope_local_base_freq` and
`partial_rotary_factor` beside `rope_parameters`. Without them transformers 4 takes its defaults and
says nothing. Its names are those of its config classes (configuration_*.py of 4.57). It has no key
for what only the newer ones can say: a scaling of the sliding layers alone.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from transformers import CONFIG_MAPPING, GenerationConfig, PreTrainedConfig
from transformers.utils import logging as transformers_logging

from drillyard.guarded_files import is_there, read_bytes

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"

# Set for training alone, or no property of the model.
_BASES_OWN = frozenset(
    {"use_cache", "output_router_logits", "transformers_version", "_name_or_path", "dtype"}
)
# Fields of transformers 5 by the names that transformers 4 gives them.
_OLDER_NAMES = {"qwen3_moe": {"num_experts": "num_local_experts"}}
# The only keys besides `type` that transformers 4 takes in the scaling of these, and those that it
# finds elsewhere or does not need. It refuses any other.
_SCALING_KEYS = {
    "olmo2": ({"factor"}, {"rope_type", "type"}),
    "phi3": (
        {"short_factor", "long_factor"},
        {"rope_type", "type", "factor", "original_max_position_embeddings"},
    ),
}


def base_documents(source: str | Path) -> dict[str, bytes]:
    """The two documents of a model directory, or of a hub id from the local Hugging Face cache, by
    name; those that are there. Raises OSError."""
    directory = Path(source).expanduser()
    found: dict[str, bytes] = {}
    for name in (CONFIG, GENERATION_CONFIG):
        path = directory / name if directory.is_dir() else try_to_load_from_cache(str(source), name)
        if isinstance(path, str | Path) and is_there(Path(path)):
            found[name] = read_bytes(Path(path))
    return found


def config_document(config: PreTrainedConfig, base: bytes | None) -> bytes:
    """config.json of a model with `config`, whose dtype is that of its files; `base`: that of the
    model it began from. Raises ValueError where `base` is not JSON."""
    trained = _fields(config)
    if base is None:
        content: dict[str, Any] = json.loads(config.to_json_string())
    else:
        content = json.loads(base)
        # Code is not copied, so what names its files would name none.
        content.pop("auto_map", None)
        read = _fields(_as_a_model_has_it(content, config.model_type))
        content |= {
            name: value
            for name, value in trained.items()
            if name not in _BASES_OWN and (name not in read or read[name] != value)
        }
    is_newer_form = bool(content.get("rope_parameters"))
    dtype_keys = {"torch_dtype", "dtype"}
    for key in (dtype_keys & content.keys() if base is not None else None) or dtype_keys:
        content[key] = trained["dtype"]
    for older, name in _OLDER_NAMES.get(config.model_type, {}).items():
        if older not in content:
            content[older] = trained[name]
    if is_newer_form:
        content |= {"torch_dtype": trained["dtype"], **_older_rope(config.model_type, trained)}
    if base is not None and content == json.loads(base):
        return base
    return f"{json.dumps(content, indent=2, sort_keys=base is None)}\n".encode()


def generation_document(config: GenerationConfig, base: bytes | None) -> bytes:
    """generation_config.json: the base's own, with the special tokens that it lacks. Raises
    ValueError where `base` is not JSON."""
    if base is None:
        return config.to_json_string().encode()
    content = json.loads(base)
    added = {
        name: value
        for name in ("bos_token_id", "eos_token_id", "pad_token_id")
        if content.get(name) is None and (value := getattr(config, name)) is not None
    }
    return f"{json.dumps(content | added, indent=2)}\n".encode() if added else base


def _as_a_model_has_it(content: Mapping[str, Any], model_type: str) -> PreTrainedConfig:
    """The config that transformers makes of a file's content, and a model completes."""
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        config = CONFIG_MAPPING[model_type].from_dict(copy.deepcopy(dict(content)))
        if getattr(config, "rope_parameters", None):
            config.standardize_rope_params()
        return config
    finally:
        transformers_logging.set_verbosity(verbosity)


def _fields(config: PreTrainedConfig) -> dict[str, Any]:
    """All fields of a config, as a JSON file has them."""
    fields: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return fields


def _older_rope(model_type: str, trained: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of transformers 4 for `rope_parameters`, one table or one for each type of layer."""
    parameters: dict[str, Any] = trained["rope_parameters"]
    tables = {name: table for name, table in parameters.items() if isinstance(table, dict)}
    table = tables.get("full_attention", parameters)
    older: dict[str, Any] = {"rope_theta": table["rope_theta"], "rope_scaling": None}
    if (rope_type := table.get("rope_type", "default")) != "default":
        older["rope_scaling"] = _older_scaling(model_type, table)
    if rope_type == "longrope":
        # Transformers 4 looks for it there alone.
        name = "original_max_position_embeddings"
        older[name] = trained.get(name) or table[name]
    if "partial_rotary_factor" in table:
        older["partial_rotary_factor"] = table["partial_rotary_factor"]
    if model_type == "gemma3_text":
        older["rope_local_base_freq"] = tables["sliding_attention"]["rope_theta"]
    return older


def _older_scaling(model_type: str, table: Mapping[str, Any]) -> dict[str, Any]:
    apart = ("rope_theta", "partial_rotary_factor")
    scaling = {name: value for name, value in table.items() if name not in apart}
    needed, unneeded = _SCALING_KEYS.get(model_type, (set(), set()))
    if not needed or not needed <= scaling.keys() <= needed | unneeded:
        return scaling
    kept = {name: scaling[name] for name in sorted(needed)}
    if "factor" in kept:
        kept["factor"] = float(kept["factor"])  # an integer is refused too
    return {"type": scaling["rope_type"], **kept}
