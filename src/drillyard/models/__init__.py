"""Causal language models of transformers for sharded training: built on the meta device, initialised or loaded in
shards.

`build_model` -> (sharded by `parallel`) -> `to_empty` -> `init_random` or `load_pretrained` -> `loss.LanguageModelLoss`
in each step, with what `packed_attention_inputs` gives -> `export`.
"""

from drillyard.models.architectures import ARCHITECTURES, blocks
from drillyard.models.attention import packed_attention_inputs, resolve_attention
from drillyard.models.export import export, save_tokenizer
from drillyard.models.meta_model import build_model, load_config, load_generation_config
from drillyard.models.pretrained import load_pretrained, stored_dtypes
from drillyard.models.random_init import init_random

__all__ = [
    "ARCHITECTURES",
    "blocks",
    "build_model",
    "export",
    "init_random",
    "load_config",
    "load_generation_config",
    "load_pretrained",
    "packed_attention_inputs",
    "resolve_attention",
    "save_tokenizer",
    "stored_dtypes",
]
