"""Causal language models of transformers for sharded training: built on the meta device,
initialised or loaded in shards.

`build_model` -> (sharded by `parallel`) -> `to_empty` -> `init_random` or `load_pretrained` ->
`loss.LanguageModelLoss` in each step, with what `packed_attention_inputs` gives -> `export`.
"""
