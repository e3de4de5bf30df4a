"""Steps of small models: as on the CPU, under every kernel and mode, of every architecture, and
without waiting."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from typing import Any

import torch
from setups import (
    Setting,
    assembled,
    compile_quickly,
    largest_deviation,
    losses_and_norms,
    run_config,
    small_llama,
    small_sizes,
)
from tests.unit.models.tiny import COMMON, CONFIGS

from drillyard.config.kernel_rules import kernel_can_train
from drillyard.config.run import ParallelismConfig
from drillyard.parallel.ranks import Ranks, start_ranks, stop_ranks
from drillyard.training.trainer import StepWindow

EXACT = 1e-5
CLOSE = 0.02
DOCUMENTS = 5
MODES = ("none", "selective", "full")


@contextlib.contextmanager
def ranks_of(config: Any) -> Iterator[Ranks]:
    """One rank on the config's device."""
    ranks = start_ranks(config.training, ParallelismConfig())
    try:
        yield ranks
    finally:
        stop_ranks()


def as_on_the_cpu(setting: Setting) -> dict[str, Any]:
    """20 fp32 losses of a small Llama with the same weights on this device and on the CPU."""
    steps = 3 if setting.tiny else 20
    losses = {}
    for device in ("cpu", setting.device):
        where = Setting(device, setting.tiny, setting.directory)
        config = run_config(
            where, small_llama(setting), precision="fp32", optimizer={"learning_rate": 1.0e-4}
        )
        with ranks_of(config) as ranks:
            trainer, _ = assembled(config, ranks, documents=DOCUMENTS, seed_by_name=True)
            losses[device] = losses_and_norms(trainer, steps)[:, 0]
    deviation = largest_deviation(losses[setting.device], losses["cpu"])
    assert deviation < EXACT, f"losses differ by {deviation:.1e} of the CPU's, allowed {EXACT:.0e}"
    return {"steps": steps, "largest_deviation": deviation, "last_loss": losses[setting.device][-1]}


def kernel(
    setting: Setting, attention: str, variant: str | None = None, quantization: str | None = None
) -> dict[str, Any]:
    """bf16 losses of one attention kernel, compiled or not, under each mode of checkpointing,
    against SDPA with neither. `variant`: of adapters on all linear layers, instead of all weights;
    `quantization`: of what is frozen."""
    compile_quickly(setting)
    if not kernel_can_train(attention, setting.device, half=True):
        attention = "sdpa"  # so that a CPU runs the same lines
    adapters = {"rank": 8, "alpha": 32.0, "target_modules": "all-linear", "variant": variant}
    lora = {"lora": adapters if variant else None, "quantization": quantization}
    steps = 2 if setting.tiny else 10
    found, failures = {}, []
    with ranks_of(run_config(setting, small_llama(setting))) as ranks:
        reference = _losses(setting, ranks, steps, attention="sdpa", **lora)
        for compiled in (False, True):
            for mode in MODES[-1:] if setting.tiny and compiled else MODES:
                name = f"{'compiled' if compiled else 'not compiled'}, checkpointing {mode}"
                try:
                    chosen = {"compile": compiled, "activation_checkpointing": mode}
                    losses = _losses(setting, ranks, steps, attention=attention, **chosen, **lora)
                except Exception as error:  # the other modes are still worth knowing
                    traceback.print_exc()
                    failures.append(
                        f"{name}: {type(error).__name__}:"
                        f" {str(error).strip().splitlines()[0][:200]}"
                    )
                    continue
                found[name] = max(
                    largest_deviation(losses[:, 0], reference[:, 0]),
                    largest_deviation(losses[:1, 1], reference[:1, 1]),
                )
                if found[name] >= CLOSE:
                    failures.append(f"{name}: {found[name]:.1%} from SDPA")
    assert not failures, "; ".join(failures)
    return {
        "steps": steps,
        "kernel": attention,
        "largest_deviation": max(found.values()),
        "modes": len(found),
    }


def _losses(setting: Setting, ranks: Ranks, steps: int, *, attention: str, **settings: Any) -> Any:
    torch._dynamo.reset()
    config = run_config(
        setting, small_llama(setting), attention=attention, precision="bf16", **settings
    )
    trainer, _ = assembled(config, ranks, documents=DOCUMENTS)
    return losses_and_norms(trainer, steps)


def architectures(setting: Setting, names: list[str]) -> dict[str, Any]:
    """Three compiled bf16 steps of small models with the kernel of `auto`, against uncompiled eager
    attention."""
    compile_quickly(setting)
    found, failures = {}, []
    with ranks_of(run_config(setting, small_llama(setting))) as ranks:
        for name in names:
            torch._dynamo.reset()
            try:
                deviation, chosen = _compiled_deviation(setting, ranks, small_model(name, setting))
            except Exception as error:  # the other architectures are still worth knowing
                traceback.print_exc()
                failures.append(
                    f"{name}: {type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"
                )
                continue
            found[name] = f"{chosen}, {deviation:.2%}"
            if deviation >= CLOSE:
                failures.append(f"{name} with {chosen}: {deviation:.1%} from eager attention")
    assert not failures, "; ".join(failures)
    return found


def _compiled_deviation(setting: Setting, ranks: Ranks, model: dict[str, Any]) -> tuple[float, str]:
    losses = {}
    chosen = ""
    for attention, compiled in (("eager", False), ("auto", True)):
        config = run_config(
            setting,
            model,
            attention=attention,
            precision="bf16",
            compile=compiled,
            micro_batch_size=2,
        )
        trainer, set_up = assembled(config, ranks, documents=DOCUMENTS)
        losses[attention] = losses_and_norms(trainer, 3)[:, 0]
        chosen = set_up.attention
    return largest_deviation(losses["auto"], losses["eager"]), chosen


def small_model(name: str, setting: Setting) -> dict[str, Any]:
    """A small inline config of an architecture, with what is particular to it."""
    sizes = small_sizes(setting)
    width, head_dim = sizes["hidden_size"], sizes["hidden_size"] // 4
    own = {
        "head_dim": head_dim,
        "query_pre_attn_scalar": head_dim,
        "sliding_window": 48,
        "moe_intermediate_size": 128,
        "n_embd": width,
        "n_positions": 256,
    }
    particular = {key: own.get(key, value) for key, value in CONFIGS[name].items()}
    if name == "gpt2":
        return {"architecture": name, **particular, "vocab_size": sizes["vocab_size"]}
    return {"architecture": name, **COMMON, **particular, **sizes, "max_position_embeddings": 256}


def without_waiting(setting: Setting) -> dict[str, Any]:
    """Steps, logged ones too, never wait for the device: torch raises where one does."""
    compile_quickly(setting)
    with ranks_of(run_config(setting, small_llama(setting))) as ranks:
        for compiled in (False, True):
            config = run_config(
                setting,
                small_llama(setting),
                precision="bf16",
                compile=compiled,
                gradient_accumulation=2,
                micro_batch_size=2,
            )
            trainer, _ = assembled(config, ranks, documents=DOCUMENTS)
            for step in range(8):
                if step == 3 and setting.device == "cuda":
                    torch.cuda.synchronize()
                    torch.cuda.set_sync_debug_mode("error")
                loss, norm = trainer.train_step(step, StepWindow(0.0))
                trainer.recent.keep(step, loss, norm)
                # What a logged step does until its figures are read.
                trainer.queue_figures(step, loss, norm, StepWindow(0.0, steps=1))
            if setting.device == "cuda":
                torch.cuda.set_sync_debug_mode("default")
            assert torch.isfinite(loss).item()
    return {"steps": 5, "compiled": "both"}
