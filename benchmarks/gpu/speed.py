"""Training speed at real shapes: the trainer's own step, a bare FSDP2 loop, and HF Trainer, on the
same model.

Llama 3.2's shapes with its vocabulary, random weights, full sequences of one document, full
fine-tuning with fused AdamW in fp32 and bf16 compute: all three do the same arithmetic. The result
is the median of steps after the first ones, with a device synchronisation after each. MFU is 6 N
(N: all parameters, without attention) times tokens per second over the catalog's dense bf16 peak.
Where memory runs out, the micro-batch is halved and the row says so.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import torch
from benchmarks.bare_loop import BareLoop
from machine import measured_rates
from setups import Setting, assembled, compile_quickly, run_config
from training import ranks_of

from drillyard.estimation.memory import memory_estimate
from drillyard.estimation.setup import Setup
from drillyard.estimation.step_roofline import part_work
from drillyard.hardware import find_accelerator
from drillyard.models import adapters, loss
from drillyard.models.architectures import blocks
from drillyard.models.meta_model import build_model
from drillyard.models.random_init import init_buffers, init_random
from drillyard.parallel import parallelize
from drillyard.training import optimizer as optimizers
from drillyard.training import trainer as trainers
from drillyard.training.trainer import StepWindow

GIB = 2**30
WARMUP, STEPS = 4, 10
SHAPES: dict[str, dict[str, Any]] = {
    "3B": {
        "hidden_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 24,
        "head_dim": 128,
    },
    "1B": {"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "head_dim": 64},
    "8B": {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "head_dim": 128,
        "intermediate_size": 14336,
        "tie_word_embeddings": False,
    },
}
"""Of meta-llama/Llama-3.2-3B, -1B and Llama-3.1-8B, config.json; what they have in common is in
`model_of`."""

TECHNIQUES: dict[str, Callable[[], Any]] = {
    "shared adapter products": lambda: mock.patch.object(
        adapters, "use_own_forward", lambda model: None
    ),
    "narrow gradients": lambda: mock.patch.object(
        trainers, "expect_one_micro_batch", lambda *_: None
    ),
    "summed head gradient": lambda: mock.patch.object(loss, "summed_gradient", lambda model: None),
    "one-pass optimizer": lambda: mock.patch.object(
        optimizers, "_fits_one_pass", lambda shards, device: False
    ),
}
"""Patches that leave one out, by its name."""


def ours(
    setting: Setting,
    shape: str,
    sequence_length: int,
    micro_batch: int,
    recompute: str,
    lora: dict[str, Any] | None = None,
    quantization: str | None = None,
    fsdp2: bool = False,
    compiled: bool | str = "auto",
    optimizer: str = "adamw",
    fp8_scaling: str | None = None,
    without: str | None = None,
) -> dict[str, Any]:
    """The trainer's step. `recompute`: a mode of activation checkpointing, or auto. `lora`:
    adapters, if any, on a frozen model, which rests in bf16 or in nf4. `fsdp2`: gather and reduce
    among the one rank, as where weights do not fit whole.
    `compiled` and `optimizer` are the settings `training.compile` and `training.optimizer.name`;
    with `fp8_scaling` the products are done in fp8. `without`: a technique of
    TECHNIQUES that is left out."""
    compile_quickly(setting)

    def measured(size: int) -> dict[str, Any]:
        model = model_of(shape, setting)
        config = run_config(
            setting,
            model,
            sequence_length=sequence_length,
            precision="fp8" if fp8_scaling else "bf16",
            fp8_scaling=fp8_scaling,
            compile=compiled,
            optimizer={"name": optimizer, "learning_rate": 1.0e-3},
            micro_batch_size=size,
            activation_checkpointing=recompute,
            lora=lora,
            quantization=quantization,
        )
        own_rule = parallelize.holds_whole
        rule = (lambda *_, **__: False) if fsdp2 else own_rule
        left_out = TECHNIQUES[without]() if without else contextlib.nullcontext()
        whole = mock.patch.object(parallelize, "holds_whole", rule)
        with ranks_of(config) as ranks, whole, left_out:
            trainer, set_up = assembled(config, ranks)
            seconds = timed(lambda step: trainer.train_step(step, StepWindow(0.0)), setting)
            bound = roofline_seconds(set_up.resolved.setup, setting)
            estimated = memory_estimate(set_up.resolved.setup).total
            chosen = set_up.resolved.setup
            return {
                **figures(
                    setting, set_up.num_parameters, seconds, size * config.data.sequence_length
                ),
                "roofline_seconds": bound,
                "over_roofline": statistics.median(seconds) / bound,
                "predicted_gib": f"{estimated.low.value:.1f} to {estimated.high.value:.1f}",
                "attention": chosen.kernel,
                "compiled": chosen.compiled,
                "optimizer": "in one pass" if trainer.optimizer.one_pass else "torch's operators",
                "checkpointing": chosen.activation_checkpointing,
                "weights": "gathered"
                if fsdp2 or not chosen.holds_whole
                else "whole, without FSDP2",
            }

    return halving(measured, micro_batch)


def bare_loop(
    setting: Setting, shape: str, sequence_length: int, micro_batch: int, recompute: str
) -> dict[str, Any]:
    """The least that an FSDP2 step can be (benchmarks/bare_loop.py), compiled, with SDPA's causal
    kernel."""
    compile_quickly(setting)
    length = length_of(setting, sequence_length)

    def measured(size: int) -> dict[str, Any]:
        config = run_config(setting, model_of(shape, setting), sequence_length=length)
        with ranks_of(config) as ranks:
            model = build_model(
                config.model,
                vocab_size=None,
                dtype=torch.float32,
                attention="sdpa",
                sequence_length=length,
            )
            num_parameters = sum(parameter.numel() for parameter in model.parameters())
            options = {
                "param_dtype": torch.bfloat16,
                "compiled": True,
                "recompute": recompute == "full",
            }
            loop = BareLoop(
                model, blocks(model), ranks.fsdp_mesh, 1e-4, 1.0, ranks.device, **options
            )
            init_random(model, 0)
            init_buffers(model)
            tokens, positions = random_batch(setting, size, length)
            seconds = timed(lambda step: loop.step(tokens, positions, {}, tokens), setting)
            return {
                **figures(setting, num_parameters, seconds, size * length),
                "attention": "sdpa",
                "compiled": True,
                "checkpointing": recompute,
            }

    return halving(measured, micro_batch)


def hf_trainer(
    setting: Setting,
    shape: str,
    sequence_length: int,
    micro_batch: int,
    recompute: str,
    compiled: bool,
    lora: dict[str, Any] | None = None,
    quantization: str | None = None,
) -> dict[str, Any]:
    """HF Trainer with Liger's kernels, fused AdamW and SDPA's causal kernel; adapters are those of
    peft on a frozen model in bf16, or in nf4 by bitsandbytes."""
    from transformers import (
        AutoModelForCausalLM,
        LlamaConfig,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    on_gpu = setting.device == "cuda"
    length = length_of(setting, sequence_length)

    def measured(size: int) -> dict[str, Any]:
        fields = {
            key: value for key, value in model_of(shape, setting).items() if key != "architecture"
        }
        with torch.device(setting.device):
            model = AutoModelForCausalLM.from_config(
                LlamaConfig(**fields, max_position_embeddings=length, use_cache=False),
                dtype=torch.bfloat16 if lora else torch.float32,
                attn_implementation="sdpa",
            )
        num_parameters = model.num_parameters()
        if quantization == "nf4" and on_gpu:
            in_nf4_by_bitsandbytes(model)
        if lora:
            model = with_adapters(model, lora, recompute)
            num_parameters += model.num_parameters(only_trainable=True)
        ends: list[float] = []

        class Clock(TrainerCallback):
            def on_step_end(self, *unused: Any, **state: Any) -> None:
                _wait(setting)
                ends.append(time.perf_counter())

        steps = _steps(setting)
        options = TrainingArguments(
            output_dir=str(setting.directory / "hf"),
            max_steps=sum(steps),
            per_device_train_batch_size=size,
            bf16=on_gpu,
            use_cpu=not on_gpu,
            optim="adamw_torch_fused",
            learning_rate=1e-4,
            lr_scheduler_type="constant",
            max_grad_norm=1.0,
            gradient_checkpointing=recompute == "full",
            gradient_checkpointing_kwargs={"use_reentrant": False},
            torch_compile=compiled and not setting.tiny,
            use_liger_kernel=on_gpu,
            # Liger's fused loss cannot be traced (addmm of fp32 and bf16): compiled, the loss is
            # left to the compiler.
            liger_kernel_config={"fused_linear_cross_entropy": not compiled},
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        tokens, _ = random_batch(setting, size * sum(steps), length)
        rows = [{"input_ids": row, "labels": row} for row in tokens.cpu()]
        Trainer(model=model, args=options, train_dataset=rows, callbacks=[Clock()]).train()
        seconds = [
            later - earlier
            for earlier, later in zip(ends[steps[0] - 1 :], ends[steps[0] :], strict=False)
        ]
        return {
            **figures(setting, num_parameters, seconds, size * length),
            "attention": "sdpa",
            "liger": on_gpu,
            "compiled": compiled,
            "checkpointing": recompute,
        }

    return halving(measured, micro_batch)


def roofline_seconds(setup: Setup, setting: Setting) -> float:
    """The least that a step of `setup` could take at the rates that this device reaches alone."""
    rates = measured_rates(setting)
    return sum(part.seconds(*rates) for part in part_work(setup).values())


def with_adapters(model: Any, lora: dict[str, Any], recompute: str) -> Any:
    """peft's model with adapters in fp32, as its documents set it up for training."""
    from peft import LoraConfig, get_peft_model

    if recompute == "full":
        model.enable_input_require_grads()
    options = {
        "r": lora["rank"],
        "lora_alpha": lora["alpha"],
        "target_modules": lora["target_modules"],
    }
    return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **options))


def in_nf4_by_bitsandbytes(model: Any) -> None:
    """Put bitsandbytes' layers in the place of all linear ones but the head; magnitudes in fp32, as
    the trainer has them."""
    import bitsandbytes as bnb

    for name, layer in list(model.named_modules()):
        if type(layer) is torch.nn.Linear and layer is not model.lm_head:
            quantized = bnb.nn.Linear4bit(
                layer.in_features,
                layer.out_features,
                bias=False,
                compute_dtype=torch.bfloat16,
                compress_statistics=False,
                quant_type="nf4",
            )
            device = layer.weight.device
            options = {"requires_grad": False, "compress_statistics": False, "quant_type": "nf4"}
            quantized.weight = bnb.nn.Params4bit(layer.weight.data.cpu(), **options)
            parent, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, quantized.to(device))


def model_of(shape: str, setting: Setting) -> dict[str, Any]:
    """The inline config of a shape; tiny, it has one block of 64 features."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 8, "head_dim": 8}
    common = {
        "intermediate_size": 8192,
        "vocab_size": 128256,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    }
    if setting.tiny:
        common |= {"intermediate_size": 128, "vocab_size": 512}
    return {
        "architecture": "llama",
        **common,
        **(sizes if setting.tiny else SHAPES[shape]),
        "rope_theta": 500000.0,
    }


def halving(measured: Callable[[int], dict[str, Any]], micro_batch: int) -> dict[str, Any]:
    """What `measured(micro_batch)` returns, or with half as many sequences where memory runs
    out."""
    while True:
        try:
            return {"micro_batch": micro_batch, **measured(micro_batch)}
        except torch.OutOfMemoryError:
            if micro_batch == 1:
                raise
        micro_batch //= 2
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        torch._dynamo.reset()


def timed(step: Callable[[int], Any], setting: Setting) -> list[float]:
    """Seconds of each step after the first ones."""
    warmup, steps = _steps(setting)
    seconds = []
    for number in range(warmup + steps):
        _wait(setting)
        started = time.perf_counter()
        step(number)
        _wait(setting)
        seconds.append(time.perf_counter() - started)
    return seconds[warmup:]


def figures(
    setting: Setting, num_parameters: int, seconds: list[float], tokens: int
) -> dict[str, Any]:
    """Speed from the median step, MFU with its formula, and the most memory that tensors took."""
    median = statistics.median(seconds)
    found: dict[str, Any] = {
        "tokens_per_second_per_gpu": tokens / median,
        "step_seconds": median,
        "slowest_step_seconds": max(seconds),
        "parameters": num_parameters,
    }
    if setting.device == "cuda":
        accelerator = find_accelerator(torch.cuda.get_device_name())
        tflops = 6 * num_parameters * tokens / median / 1e12
        peak = accelerator.peak_tflops.get("bf16") if accelerator else None
        found |= {
            "tflops_per_gpu": tflops,
            "mfu_6n": tflops / peak if peak else None,
            "allocated_gib": torch.cuda.max_memory_allocated() / GIB,
        }
    return found


def random_batch(setting: Setting, size: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random tokens and their positions, int64 [size, length]."""
    vocab_size = model_of("1B", setting)["vocab_size"]
    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, vocab_size, (size, length)))
    return tokens.to(setting.device), torch.arange(length, device=setting.device).expand(
        size, length
    )


def _steps(setting: Setting) -> tuple[int, int]:
    return (1, 2) if setting.tiny else (WARMUP, STEPS)


def length_of(setting: Setting, sequence_length: int) -> int:
    """Tokens of a sequence: `sequence_length`, or a few in a smoke test."""
    return 32 if setting.tiny else sequence_length


def _wait(setting: Setting) -> None:
    if setting.device == "cuda":
        torch.cuda.synchronize()
