"""Estimated memory against `torch.cuda.max_memory_allocated`, a setup of the trainer's own step a
row.

The second and third step are measured. What the allocator holds is compared with the sum of the
parts of the step (without the CUDA context and fragmentation); what it has reserved and what the
driver reports is listed next to the high end of everything.
"""

from __future__ import annotations

import gc
from typing import Any

import torch
from setups import Setting, assembled, compile_quickly, run_config
from training import ranks_of

from drillyard.estimation.memory import memory_estimate
from drillyard.training.trainer import StepWindow

GIB = 2**30
OUTSIDE_OF_THE_ALLOCATOR = ("CUDA context", "NCCL buffers", "allocator fragmentation")
ALLOWED = 0.05
ADAPTERS = {"rank": 16, "alpha": 32.0, "target_modules": "all-linear"}
SETUPS: dict[str, dict[str, Any]] = {
    "sdpa": {"attention": "sdpa"},
    "varlen": {},
    "varlen, full checkpointing": {"activation_checkpointing": "full"},
    "varlen, selective checkpointing": {"activation_checkpointing": "selective"},
    "varlen, compiled": {"compile": True},
    "varlen, compiled, full checkpointing": {"compile": True, "activation_checkpointing": "full"},
    "varlen, accumulation": {"gradient_accumulation": 2},
    "sdpa, fp32": {"attention": "sdpa", "precision": "fp32", "micro_batch_size": 1},
    "varlen, LoRA": {"lora": ADAPTERS},
    "varlen, LoRA, full checkpointing": {"lora": ADAPTERS, "activation_checkpointing": "full"},
    "varlen, LoRA, compiled": {"lora": ADAPTERS, "compile": True},
    "varlen, LoRA on nf4": {"lora": ADAPTERS, "quantization": "nf4"},
    "varlen, LoRA on nf4, full checkpointing": {
        "lora": ADAPTERS,
        "quantization": "nf4",
        "activation_checkpointing": "full",
    },
    "varlen, LoRA on nf4, compiled": {"lora": ADAPTERS, "quantization": "nf4", "compile": True},
    "varlen, wide vocabulary": {"vocab_size": 128256, "activation_checkpointing": "full"},
}
MODEL = {
    "architecture": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
}
SMALLER = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "vocab_size": 512,
}


def against_estimate(setting: Setting, setup: str) -> dict[str, Any]:
    """One setup of SETUPS: estimated ends and measured GiB. AssertionError where they differ by
    more than ALLOWED."""
    compile_quickly(setting)
    changes = {
        "precision": "bf16",
        "micro_batch_size": 2,
        "attention": "varlen",
        "vocab_size": 32000,
    } | SETUPS[setup]
    attention, vocab_size = changes.pop("attention"), changes.pop("vocab_size")
    if setting.device == "cpu":
        attention = "sdpa"  # the one fused kernel that it trains with
    model = MODEL | {"vocab_size": vocab_size} | (SMALLER if setting.tiny else {})
    config = run_config(setting, model, attention=attention, sequence_length=4096, **changes)
    with ranks_of(config) as ranks:
        trainer, set_up = assembled(config, ranks)
        trainer.train_step(0, StepWindow(0.0))
        gc.collect()
        if setting.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        for step in (1, 2):
            trainer.train_step(step, StepWindow(0.0))
        found = estimated(memory_estimate(set_up.resolved.setup))
        if setting.device == "cuda":
            found |= measured(found)
    return found


def estimated(estimate: Any) -> dict[str, Any]:
    """Ends of what the allocator is estimated to hold at the peak, and of everything."""
    inside = [part for part in estimate.parts if part.low.name not in OUTSIDE_OF_THE_ALLOCATOR]
    low, high = (sum(getattr(part, end).value for part in inside) for end in ("low", "high"))
    total = estimate.total
    return {
        "low_gib": low,
        "high_gib": high,
        "total_high_gib": total.high.value,
        "peak_at": estimate.peak_at,
    }


def measured(found: dict[str, Any]) -> dict[str, Any]:
    """What the allocator held at most, and how far that is outside of the estimate."""
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    allocated = torch.cuda.max_memory_allocated() / GIB
    outside = min(0.0, allocated / found["low_gib"] - 1) + max(
        0.0, allocated / found["high_gib"] - 1
    )
    ends = f"{found['low_gib']:.2f} to {found['high_gib']:.2f} GiB"
    assert abs(outside) <= ALLOWED, (
        f"{allocated:.2f} GiB are allocated, estimated {ends}: {outside:+.1%} outside"
    )
    return {
        "allocated_gib": allocated,
        "outside": outside,
        "reserved_gib": torch.cuda.max_memory_reserved() / GIB,
        "in_use_gib": (total - free) / GIB,
    }
