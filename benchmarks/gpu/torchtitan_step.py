"""The step of torchtitan 0.2.2 on one GPU, on the model and batch of speed.py.

Model, recomputation, compile, precision, loss, clipping and optimizer are torchtitan's own
functions, in the order of its trainer. Alone, a rank has no FSDP2 there either: weights are fp32,
and autocast casts them to bf16. torchtitan's Llama never ties the head to the embedding; where the
shape does, it is tied here, so that all do the same arithmetic.
"""

from __future__ import annotations

from typing import Any

import torch
from setups import Setting, compile_quickly
from speed import figures, halving, length_of, model_of, random_batch, timed


def torchtitan(
    setting: Setting, shape: str, sequence_length: int, micro_batch: int, recompute: str
) -> dict[str, Any]:
    """Speed and memory (`figures` of speed.py) of steps without data, logging and checkpoints.
    `sequence_length`: tokens; `micro_batch`: sequences, halved where memory runs out; `recompute`:
    torchtitan's mode of activation checkpointing: none, selective (every second block) or full."""
    from torchtitan.components.loss import build_cross_entropy_loss
    from torchtitan.components.optimizer import build_optimizers
    from torchtitan.config import JobConfig
    from torchtitan.distributed import ParallelDims, utils
    from torchtitan.models.llama3 import Transformer, parallelize_llama
    from torchtitan.models.llama3.model.args import TransformerModelArgs

    compile_quickly(setting)
    length = length_of(setting, sequence_length)
    dims = ParallelDims(dp_replicate=1, dp_shard=1, cp=1, tp=1, pp=1, ep=1, etp=1, world_size=1)
    job = JobConfig()
    job.training.seq_len = length
    job.activation_checkpoint.mode = recompute
    job.compile.enable = not setting.tiny
    job.optimizer.lr = 1e-4
    loss_of = build_cross_entropy_loss(job)

    def measured(size: int) -> dict[str, Any]:
        sizes = model_of(shape, setting)
        arguments = TransformerModelArgs(
            dim=sizes["hidden_size"],
            n_layers=sizes["num_hidden_layers"],
            n_heads=sizes["num_attention_heads"],
            n_kv_heads=sizes["num_key_value_heads"],
            vocab_size=sizes["vocab_size"],
            # It rounds 8/3 of dim, times the second, up to a multiple of the first.
            multiple_of=sizes["intermediate_size"],
            ffn_dim_multiplier=0.5,
            rope_theta=sizes["rope_theta"],
            max_seq_len=length,
        )
        with torch.device("meta"):
            model = Transformer(arguments)
        model = parallelize_llama(model, dims, job)
        model.to_empty(device=setting.device)
        if sizes["tie_word_embeddings"]:
            model.output.weight = model.tok_embeddings.weight
        with torch.no_grad():
            model.init_weights()
        model.train()
        optimizer = build_optimizers([model], job.optimizer, dims)
        parameters = list(model.parameters())
        amp = utils.maybe_enable_amp(dims, job.training.mixed_precision_param, setting.device)
        tokens, _ = random_batch(setting, size, length)

        def step(number: int) -> None:
            optimizer.zero_grad()
            with amp:
                loss = loss_of(model(tokens), tokens) / tokens.numel()
            loss.backward()
            utils.clip_grad_norm_(parameters, job.training.max_norm, foreach=True)
            optimizer.step()

        num_parameters = sum(parameter.numel() for parameter in parameters)
        seconds = timed(step, setting)
        return {
            **figures(setting, num_parameters, seconds, size * length),
            "attention": "sdpa",
            "compiled": job.compile.enable,
            "checkpointing": recompute,
        }

    return halving(measured, micro_batch)
