"""From a run config to a `Setup`: every open setting is resolved here, in one function, with its
reason.

The trainer and `drillyard estimate` both call `resolve_setup`, so the setup that is estimated is
the one that runs.

`activation_checkpointing: auto` is the least recomputation that fits: of none, memory-budget (only
where blocks are compiled), selective and full the first one whose estimated peak, at the high end
of its range, is within the memory. Recomputing costs time (full: the whole forward once more, a
third of the FLOPs of a step) and gains nothing but memory. Where memory is not known or cannot be
estimated, it is full: slower is better than a run that ends for lack of memory. Weights then stay
whole from forward to backward, and gradients over micro-batches, where that fits too, or where the
model is small (`unsharded_is_small`). Before that, beside adapters, every rank holds the frozen
weights whole where they fit, so that no step gathers them. Both come after the least recomputation
and the micro-batch, since a gather is hidden by the computing of a few thousand tokens, and a
forward that is repeated by nothing. `shard: auto` is all ranks that `replicate` leaves, never
fewer: copies of the model (HSDP) save traffic between nodes and cost memory, and `replicate`
requests them; its default of 1 is a number like any other. The other settings follow fixed rules
(`config/kernel_rules.py`).

The result is a pure function of its arguments, so all ranks of a run get the same for the same
memory. It changes with versions: a run records what it resolved, and a resume on the same layout
keeps that (`training/resolved_record.py`).

`micro_batch_size: auto` is decided before: see `largest_fitting`. The sequences of a step are those
of `global_batch_size`, so it changes rounding alone.

Cost: up to five memory estimates, 10 to 40 ms in all. Limits: sequences are taken to be full, as
after packing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, NamedTuple, get_args

from drillyard.config.kernel_rules import (
    HALF,
    AttentionKernel,
    fastest_kernel,
    resolve_compile,
    resolve_fp8_scaling,
    resolve_loss_chunk,
    resolve_shard,
    unsharded_is_small,
)
from drillyard.config.run import RunConfig
from drillyard.config.run_checks import least_micro_batch, num_data_ranks, resolve_accumulation
from drillyard.errors import UserError
from drillyard.estimation.memory import MemoryEstimate, memory_estimate
from drillyard.estimation.setup import Checkpointing, Setup, lora_setup
from drillyard.formatting import three_digits
from drillyard.modelspec import ModelSpec

GIB: Final = 2**30
CHECKPOINTING_MODES: Final[tuple[Checkpointing, ...]] = get_args(Checkpointing)
"""From the least recomputation to the most."""


def checkpointing_modes(*, compiled: bool) -> tuple[Checkpointing, ...]:
    """Those that blocks can have, from the least recomputation to the most."""
    return tuple(mode for mode in CHECKPOINTING_MODES if compiled or mode != "memory-budget")


MOST_TOKENS: Final = 16_384
FEWEST_TOKENS: Final = 2_048
"""Tokens of a micro-batch that `auto` chooses at most, as products get no faster from there on, and
for which it would rather not recompute more."""

FIELDS_OF_FAMILIES: Final[Mapping[str, Mapping[str, float]]] = {
    "gemma2": {"attn_logit_softcapping": 50.0},
    "gpt2": {"attn_pdrop": 0.1},
    "gpt_bigcode": {"attn_pdrop": 0.1},
    "seed_oss": {"attention_dropout": 0.1},
}
"""Defaults of transformers' config classes for the fields that exclude a kernel, where config.json
has none."""


class SettingDecision(NamedTuple):
    """Value that a setting left open resolves to, and the reason."""

    key: str
    value: Any
    reason: str


@dataclass(frozen=True, slots=True)
class ResolvedSetup:
    """A setup without open settings, and what was decided to get there, in the order of the
    config's keys.

    `memory` is the estimate that decided `activation_checkpointing: auto`, None where there was
    none.
    """

    setup: Setup
    decisions: tuple[SettingDecision, ...]
    memory: MemoryEstimate | None = None

    def settings(self) -> dict[str, Any]:
        """The values of all settings that can be left open, decided or given, by their dotted keys;
        `micro_batch_size` only where it was decided, as it is a part of the layout."""
        setup = self.setup
        decided = {each.key: each.value for each in self.decisions}
        size = {key: decided[key] for key in ("training.micro_batch_size",) if key in decided}
        return {
            "model.attention": setup.kernel,
            **size,
            "training.activation_checkpointing": setup.activation_checkpointing,
            "training.compile": setup.compiled,
            "training.loss_chunk_tokens": setup.loss_chunk_tokens,
            "parallelism.shard": setup.shard,
        }


def resolve_setup(
    config: RunConfig,
    spec: ModelSpec,
    *,
    num_gpus: int,
    gpus_per_node: int,
    memory_gib: float | None,
    device_type: Literal["cuda", "cpu"],
    kernel: AttentionKernel | None = None,
    model_config: Mapping[str, Any] | None = None,
) -> ResolvedSetup:
    """The training step of `config` on `num_gpus` ranks, each with `memory_gib` (None: not known)
    of its own.

    `device_type` is `cuda` or `cpu`. `kernel` is the attention kernel where it is known; otherwise
    `auto` is decided by the soft cap and dropout of `model_config`, the contents of the model's
    config.json (default: `model.config`). Raises UserError where the batch or the ranks do not
    divide.
    """
    training, lora = config.training, config.model.lora
    shard = resolve_shard(config.parallelism, num_gpus)
    if shard < 1 or shard * config.parallelism.replicate != num_gpus:
        raise UserError(
            f"parallelism: shard {config.parallelism.shard} x replicate"
            f" {config.parallelism.replicate} is not the number of GPUs, {num_gpus}; write shard:"
            " auto, or choose another number"
        )
    data_ranks = num_data_ranks(config, num_gpus)
    sizes = micro_batch_sizes(config, data_ranks)
    of_rank = least_micro_batch(config) * resolve_accumulation(config, data_ranks)
    is_small = memory_gib is not None and unsharded_is_small(
        spec.total_parameters, training.precision, memory_gib * GIB
    )
    scales_rows = resolve_fp8_scaling(training) == "rowwise"
    # DoRA needs the weights themselves.
    reads_fp8_alone = training.precision == "fp8" and (lora is None or lora.variant != "dora")
    setup = Setup(
        spec=spec,
        precision=training.precision,
        sequence_length=config.data.sequence_length,
        micro_batch_size=sizes[0],
        gradient_accumulation=of_rank // sizes[0],
        activation_checkpointing="full",
        shard=shard,
        replicate=config.parallelism.replicate,
        gpus_per_node=gpus_per_node,
        kernel=kernel or _kernel(config, spec, device_type, model_config),
        compiled=resolve_compile(training, device_type),
        loss_chunk_tokens=1,
        clips_gradients=training.gradient_clipping is not None,
        adapters=None if lora is None else lora_setup(lora),
        quantized=config.model.quantization is not None,
        stores_fp8=reads_fp8_alone and lora is not None,
        scales_rows=scales_rows,
        casts_before_gather=reads_fp8_alone and not scales_rows,
        packed_moments=training.optimizer.name == "adamw-8bit",
        keeps_unsharded=is_small,
        keeps_frozen_whole=is_small and lora is not None,
        device_type=device_type,
    )
    if training.activation_checkpointing == "memory-budget" and not setup.compiled:
        raise UserError(
            "training.activation_checkpointing: memory-budget is done by torch.compile, and the"
            " blocks of this run are not compiled; write selective, or training.compile: true"
        )
    modes = (
        checkpointing_modes(compiled=setup.compiled)
        if training.activation_checkpointing == "auto"
        else (training.activation_checkpointing,)
    )
    setup = largest_fitting(setup, sizes, modes, memory_gib, training.loss_chunk_tokens)
    if training.activation_checkpointing == "auto":
        mode, why, memory = choose_checkpointing(setup, memory_gib)
    else:
        mode, why, memory = training.activation_checkpointing, "", None
    setup = replace(setup, activation_checkpointing=mode)
    if not setup.keeps_unsharded and memory_gib is not None:
        kept = keep_whole(setup, memory_gib)
        if kept is not setup:
            setup, memory = kept, memory and memory_estimate(kept)
    return ResolvedSetup(setup, tuple(_decisions(config, setup, why, device_type)), memory)


def keep_whole(setup: Setup, memory_gib: float) -> Setup:
    """`setup` that also keeps whole what fits: first frozen weights, on every rank, then gathered
    weights, from forward to backward."""
    if setup.adapters is not None:
        kept = replace(setup, keeps_frozen_whole=True)
        # Weights that rest in fp8 are loaded in bf16.
        if fitting_estimate(replace(kept, stores_fp8=False), memory_gib) is not None:
            setup = kept
    kept = replace(setup, keeps_unsharded=True)
    return setup if fitting_estimate(kept, memory_gib) is None else kept


def micro_batch_sizes(config: RunConfig, data_ranks: int) -> list[int]:
    """The sizes that a micro-batch may have, largest first: the one that is configured, or of
    `auto` the divisors of a rank's sequences with at most MOST_TOKENS tokens."""
    size = config.training.micro_batch_size
    if size != "auto":
        return [size]
    sequences = resolve_accumulation(config, data_ranks)  # of micro-batches of one
    most = max(1, MOST_TOKENS // config.data.sequence_length)
    return [each for each in range(min(sequences, most), 0, -1) if sequences % each == 0]


def largest_fitting(
    setup: Setup,
    sizes: Sequence[int],
    modes: Sequence[Checkpointing],
    memory_gib: float | None,
    loss_chunk: int | None,
) -> Setup:
    """`setup` with the micro-batch of `sizes` that is fastest by rule: of the least recomputation
    of `modes` with which one of FEWEST_TOKENS fits, else of any size, the largest; the smallest
    where none fits or the memory is not known."""
    sequences = setup.micro_batch_size * setup.gradient_accumulation

    def of_size(size: int) -> Setup:
        chunk = resolve_loss_chunk(size * setup.sequence_length, loss_chunk)
        return replace(
            setup,
            micro_batch_size=size,
            gradient_accumulation=sequences // size,
            loss_chunk_tokens=chunk,
        )

    if len(sizes) > 1 and memory_gib is not None:
        full_sized = [each for each in sizes if each * setup.sequence_length >= FEWEST_TOKENS]
        for candidates in (full_sized or sizes[:1], sizes):
            for mode in modes:
                for size in candidates:
                    found = replace(of_size(size), activation_checkpointing=mode)
                    if fitting_estimate(found, memory_gib) is not None:
                        return of_size(size)
    return of_size(sizes[-1])


def choose_checkpointing(
    setup: Setup, memory_gib: float | None
) -> tuple[Checkpointing, str, MemoryEstimate | None]:
    """The first of the modes that fits in `memory_gib` at the high end of the estimate,
    else `full`; why, and the memory estimated with it."""
    if memory_gib is None:
        return "full", "the memory is not known", None
    memory, high = None, 0.0
    for mode in checkpointing_modes(compiled=setup.compiled):
        try:
            memory = memory_estimate(replace(setup, activation_checkpointing=mode))
        except UserError as error:
            return "full", f"the memory cannot be estimated: {str(error).splitlines()[0]}", None
        high = memory.total.high.value
        if high <= memory_gib:
            why = (
                f"the least recomputation that fits: up to {three_digits(high)} of"
                f" {three_digits(memory_gib)} GiB"
            )
            return mode, why, memory
    why = (
        f"nothing fits: up to {three_digits(high)} GiB even so, and there are"
        f" {three_digits(memory_gib)} GiB"
    )
    return "full", why, memory


def fitting_estimate(setup: Setup, memory_gib: float) -> MemoryEstimate | None:
    """The estimate of a setup that fits at the high end of its range; None for any other."""
    try:
        memory = memory_estimate(setup)
    except UserError:
        return None
    return memory if memory.total.high.value <= memory_gib else None


def _decisions(
    config: RunConfig, setup: Setup, why_recomputed: str, device_type: str
) -> list[SettingDecision]:
    training = config.training
    fastest = f"the fastest that can train this model on {device_type} in {training.precision}"
    all_ranks = (
        "all ranks" if setup.replicate == 1 else f"the ranks of each of {setup.replicate} copies"
    )
    quarter = "a quarter of a micro-batch, at most 2048"
    rows = (
        ("model.attention", config.model.attention, setup.kernel, fastest),
        (
            "training.micro_batch_size",
            training.micro_batch_size,
            setup.micro_batch_size,
            f"the largest that is estimated to fit, of at most {MOST_TOKENS:,} tokens, with the"
            " least recomputation",
        ),
        (
            "training.activation_checkpointing",
            training.activation_checkpointing,
            setup.activation_checkpointing,
            why_recomputed,
        ),
        ("training.compile", training.compile, setup.compiled, "GPUs only"),
        (
            "training.loss_chunk_tokens",
            training.loss_chunk_tokens,
            setup.loss_chunk_tokens,
            quarter,
        ),
        ("parallelism.shard", config.parallelism.shard, setup.shard, all_ranks),
    )
    return [
        SettingDecision(key, value, reason)
        for key, written, value, reason in rows
        if written in ("auto", None)
    ]


def _kernel(
    config: RunConfig, spec: ModelSpec, device_type: str, model_config: Mapping[str, Any] | None
) -> AttentionKernel:
    if config.model.attention != "auto":
        return config.model.attention
    given = model_config if model_config is not None else config.model.config or {}
    inner = given.get("text_config")
    fields = {
        **FIELDS_OF_FAMILIES.get(spec.model_type, {}),
        **(inner if isinstance(inner, Mapping) else given),
    }
    return fastest_kernel(
        device_type,
        half=config.training.precision in HALF,
        softcap=fields.get("attn_logit_softcapping"),
        dropout=fields.get("attention_dropout") or fields.get("attn_pdrop") or 0.0,
        head_dim=spec.head_dim if spec.blocks else None,
    )
