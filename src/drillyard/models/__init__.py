"""Causal language models of transformers for sharded training: built on the meta device, initialised or loaded in
shards.

`build_model` -> (sharded by `parallel`) -> `to_empty` -> `init_random` or `load_pretrained` -> `final_hidden` and
`head_logits` in each step, with what `packed_attention_inputs` gives -> `export`.
"""

from drillyard.models.architectures import ARCHITECTURES, is_supported
from drillyard.models.attention import packed_attention_inputs, resolve_attention
from drillyard.models.export import export
from drillyard.models.forward import blocks, final_hidden, head_logits
from drillyard.models.meta_model import build_model, load_config, load_generation_config
from drillyard.models.pretrained import load_pretrained, stored_dtypes
from drillyard.models.random_init import init_random
from drillyard.models.tokenizer_files import save_tokenizer

__all__ = [
    "ARCHITECTURES",
    "blocks",
    "build_model",
    "export",
    "final_hidden",
    "head_logits",
    "init_random",
    "is_supported",
    "load_config",
    "load_generation_config",
    "load_pretrained",
    "packed_attention_inputs",
    "resolve_attention",
    "save_tokenizer",
    "stored_dtypes",
]
