"""Causal language models of transformers for sharded training: built on the meta device, initialised or loaded in
shards.

`build_model` -> (sharded by `parallel`) -> `to_empty` -> `init_random` or `load_pretrained` -> `final_hidden` and
`head_logits` in each step, with what `packed_attention_inputs` gives -> `export`.
"""

from drillyard.models.architectures import ARCHITECTURES, known
from drillyard.models.attention import packed_attention_inputs, resolve_attention
from drillyard.models.build import build_model, load_config, load_generation_config
from drillyard.models.export import export
from drillyard.models.forward import blocks, final_hidden, head_logits
from drillyard.models.initialise import init_random
from drillyard.models.pretrained import load_pretrained, stored_dtypes
from drillyard.models.tokenizer_files import save_tokenizer

__all__ = [
    "ARCHITECTURES",
    "blocks",
    "build_model",
    "export",
    "final_hidden",
    "head_logits",
    "init_random",
    "known",
    "load_config",
    "load_generation_config",
    "load_pretrained",
    "packed_attention_inputs",
    "resolve_attention",
    "save_tokenizer",
    "stored_dtypes",
]
