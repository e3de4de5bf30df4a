"""`drillyard bench` on one rank: the trainer's own step over the run's own data, measured.

Model, weights, optimizer and step are those of `drillyard train`; the data are its first rows,
packed as it packs them and repeated. Nothing of a run directory is read or written. The first steps
(compiling, caches, the allocator) are left out; each figure is the median of the others.
"""

from __future__ import annotations

import resource
import statistics
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch.profiler import ProfilerActivity, profile

from drillyard.config.run import RunConfig, TrainingConfig
from drillyard.config.run_checks import require_valid, resolve_global_batch
from drillyard.data.prepared_data import PreparedData, prepare_sample
from drillyard.errors import UserError
from drillyard.estimation.memory import MemoryEstimate, memory_estimate
from drillyard.estimation.setup import Setup
from drillyard.estimation.step_roofline import PARTS, Part, part_work
from drillyard.hardware import find_accelerator
from drillyard.modelspec import Formula, flops_per_token, formula_label
from drillyard.parallel.collectives import gather
from drillyard.parallel.parallelize import COMPUTE_DTYPE
from drillyard.parallel.ranks import Ranks, start_ranks, stop_ranks
from drillyard.training.bench_document import VERSION, BenchDocument
from drillyard.training.build import batch_shape, with_micro_batch
from drillyard.training.device_rates import DeviceRates, device_rates
from drillyard.training.model_setup import (
    GIB,
    ShardedModel,
    build_sharded_model,
    fill_weights,
    least_memory_bytes,
    require_trainable,
    set_determinism,
)
from drillyard.training.optimizer import ShardedAdamW
from drillyard.training.out_of_memory import explained_out_of_memory
from drillyard.training.part_clock import marked_parts
from drillyard.training.resume import seed_rank
from drillyard.training.trainer import StepWindow, Trainer

RULERS: Final[tuple[Formula, ...]] = ("6N", "torchtitan", "megatron")
"""What runs report (no attention), and the two by which speeds are published: attention counted
whole, and its causal half."""
MOST_SEQUENCES: Final = 1024
"""Sequences of the data that are read at least; steps beyond repeat them."""
SIZES: Final = {"cuda": (8192, 1024), "cpu": (256, 64)}
"""Rows of the product, and MiB of the copy, that a kind of device is measured with."""
ON_A_CPU: Final = "the CPU was measured: a GPU's figures do not follow from these"


@dataclass(frozen=True)
class BenchRequest:
    """`steps` are measured after `warmup`; `trace`: file for the trace of one more step."""

    config: RunConfig
    steps: int
    warmup: int
    trace: Path | None = None


@dataclass(frozen=True)
class MeasuredSteps:
    """Seconds of the parts of each measured step, mean over ranks, and of idling in one more, with
    the file of its trace where one was written."""

    parts: list[Mapping[Part, float]]
    idle_seconds: float | None
    trace: Path | None

    @property
    def seconds(self) -> list[float]:
        return [sum(step.values()) for step in self.parts]


def bench_on_ranks(request: BenchRequest) -> BenchDocument:
    """Measure as one of the ranks; all of them return the same document. Collective.

    Raises UserError for a mistake in the config, and where memory runs out.
    """
    total = request.warmup + request.steps + 1
    total_steps = _schedule_steps(request.config.training, total)
    set_determinism(request.config)
    ranks = start_ranks(request.config.training, request.config.parallelism)
    config = with_length(request.config, total_steps, ranks.num_data_ranks)
    require_valid(config, ranks.world_size)
    require_trainable(config, ranks.device, needs_weights=True)
    size, copied_mib = SIZES[ranks.device.type]
    dtype = COMPUTE_DTYPE[config.training.precision]
    fp8 = config.training.precision == "fp8"
    rates = device_rates(ranks.device, dtype, size=size, copied_mib=copied_mib, fp8=fp8)
    if ranks.device.type == "cuda":
        torch.cuda.empty_cache()
    batch = resolve_global_batch(config, ranks.num_data_ranks)
    sequences = min(total * batch, MOST_SEQUENCES)
    with prepare_sample(config, sequences) as data:
        model = build_sharded_model(config, data.tokenizer, ranks)
        config = with_micro_batch(config, model)
        training, shape = config.training, batch_shape(config, ranks.num_data_ranks)
        optimizer = ShardedAdamW(model.root, training.optimizer, training.gradient_clipping, ranks)
        fill_weights(config, model)
        seed_rank(training.seed, 0, ranks)
        trainer = Trainer(config, ranks, model, optimizer, data.train, shape, total_steps)
        measured = measure(trainer, model, request)
        document = _document(request, data, trainer, model, rates, measured)
    stop_ranks()
    return document


def with_length(config: RunConfig, total_steps: int, num_data_ranks: int) -> RunConfig:
    """The config for `total_steps`. Megatron-LM's order, which is made for a number of samples, is
    made for as many."""
    length = {"steps": total_steps, "epochs": None}
    data, megatron = config.data, config.data.megatron
    if megatron is not None and megatron.samples is not None:
        needed = total_steps * resolve_global_batch(config, num_data_ranks)
        enough = {"samples": max(megatron.samples, needed)}
        data = data.model_copy(update={"megatron": megatron.model_copy(update=enough)})
    training = config.training.model_copy(update=length)
    return config.model_copy(update={"training": training, "data": data})


def _schedule_steps(training: TrainingConfig, measured: int) -> int:
    """The steps over which the learning rate goes its way: the run's own, or as many as its warm-up
    and decay need, so that any schedule is measured from its beginning."""
    schedule = training.schedule
    enough = 2 * (measured + schedule.warmup_steps + (schedule.decay_steps or 0))
    return max(training.steps or 0, enough)


def measure(trainer: Trainer, model: ShardedModel, request: BenchRequest) -> MeasuredSteps:
    """Run the steps. UserError where memory runs out, with the part and what would fit."""
    ranks = trainer.ranks
    parts: list[Mapping[Part, float]] = []
    with marked_parts(trainer) as clock, explained_out_of_memory(model, ranks):
        for step in range(request.warmup + request.steps):
            clock.switch("data")
            trainer.train_step(step, StepWindow(0.0))
            taken = clock.take()
            if step >= request.warmup:
                parts.append(_mean(gather(taken)))
        last = request.warmup + request.steps
        idle, trace = _profiled(trainer, last, request.trace if ranks.rank == 0 else None)
    return MeasuredSteps(parts, idle, trace)


def _mean(of_ranks: list[dict[Part, float]]) -> Mapping[Part, float]:
    return {part: statistics.fmean(one[part] for one in of_ranks) for part in PARTS}


def _profiled(trainer: Trainer, step: int, trace: Path | None) -> tuple[float | None, Path | None]:
    """Do `step` under the profiler where a trace is wanted or a GPU may idle; returns the seconds
    in which it did, and `trace` where it was written."""
    on_gpu = trainer.ranks.device.type == "cuda"
    if not on_gpu and trace is None:
        # On every rank or on none: the step has collectives.
        if trainer.ranks.world_size > 1:
            trainer.train_step(step, StepWindow(0.0))
        return None, None
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu
    with profile(activities=activities) as profiler:
        trainer.train_step(step, StepWindow(0.0))
        if on_gpu:
            torch.cuda.synchronize(trainer.ranks.device)
    if trace is not None and not write_trace(profiler, trace):
        trace = None
    if not on_gpu:
        return None, trace
    kernels = [
        (event.time_range.start, event.time_range.end)
        for event in profiler.events()
        if event.device_type.name == "CUDA" and not getattr(event, "is_user_annotation", False)
    ]
    return idle_microseconds(kernels) / 1e6, trace


def write_trace(profiler: profile, path: Path) -> bool:
    """Write what was profiled to a new file; returns whether it is there, and whole. On a full disk
    it is not, of which torch only logs; a file that was made meanwhile is left alone."""
    with suppress(OSError), tempfile.TemporaryDirectory(dir=path.parent) as directory:
        made = Path(directory, path.name)
        profiler.export_chrome_trace(str(made))
        if made.exists() and not path.exists():
            made.rename(path)
            return True
    return False


def idle_microseconds(kernels: list[tuple[float, float]]) -> float:
    """Time between the first kernel's start and the last one's end in which none runs; kernels of
    several streams overlap."""
    idle, reached = 0.0, None
    for start, end in sorted(kernels):
        if reached is not None and start > reached:
            idle += start - reached
        reached = end if reached is None else max(reached, end)
    return idle


def _document(
    request: BenchRequest,
    data: PreparedData,
    trainer: Trainer,
    model: ShardedModel,
    rates: DeviceRates,
    measured: MeasuredSteps,
) -> BenchDocument:
    setup, ranks = model.resolved.setup, trainer.ranks
    on_gpu = ranks.device.type == "cuda"
    device = torch.cuda.get_device_name(ranks.device) if on_gpu else "cpu"
    accelerator = find_accelerator(device)
    seconds = statistics.median(measured.seconds)
    tokens = setup.tokens_per_step_per_gpu
    work = part_work(setup)
    is_lost = measured.trace is None and request.trace is not None
    content: dict[str, Any] = {
        "version": VERSION,
        "name": request.config.name,
        "device": device,
        "accelerator": accelerator.name if accelerator else None,
        "ranks": ranks.world_size,
        "steps": request.steps,
        "warmup": request.warmup,
        "parameters": model.num_parameters,
        "tokens_per_step_per_rank": tokens,
        "step_seconds": seconds,
        "slowest_step_seconds": max(measured.seconds),
        "tokens_per_second_per_rank": tokens / seconds,
        "speeds": _speeds(setup, seconds, None if accelerator is None else accelerator.peak_tflops),
        "memory": _memory(setup, ranks),
        "rates": {
            "product_tflops": rates.flops_per_second / 1e12,
            "copy_gb_per_s": rates.bytes_per_second / 1e9,
            "fp8_product_tflops": (
                None if rates.fp8_flops_per_second is None else rates.fp8_flops_per_second / 1e12
            ),
        },
        "parts": [
            {
                "part": part,
                "seconds": statistics.median(step[part] for step in measured.parts),
                "roofline_seconds": work[part].seconds(*rates) if part in work else None,
                "flops": work[part].flops if part in work else None,
                "moved_bytes": work[part].moved_bytes if part in work else None,
            }
            for part in PARTS
        ],
        "idle_seconds": measured.idle_seconds,
        "settings": model.resolved.settings(),
        "trace": None if measured.trace is None else str(measured.trace),
        "notes": [
            *([] if on_gpu else [ON_A_CPU]),
            *model.notes,
            *([f"--trace: {request.trace} could not be written"] if is_lost else []),
        ],
    }
    return BenchDocument.model_validate(content)


def _speeds(
    setup: Setup, seconds: float, peaks: Mapping[str, float] | None
) -> list[dict[str, Any]]:
    peak = (peaks or {}).get(setup.precision)
    found = []
    for formula in RULERS if setup.spec.blocks else RULERS[:1]:
        flops = setup.tokens_per_step_per_gpu * flops_per_token(
            setup.spec,
            formula,
            setup.sequence_length,
            adapter_parameters=setup.adapter_parameters,
        )
        tflops = flops / seconds / 1e12
        found.append(
            {
                "formula": formula_label(formula, adapters=setup.adapters is not None),
                "tflops_per_rank": tflops,
                "mfu": tflops / peak if peak else None,
            }
        )
    return found


def _memory(setup: Setup, ranks: Ranks) -> dict[str, Any]:
    """The most that any rank has taken, beside the estimate."""
    on_gpu = ranks.device.type == "cuda"
    # Kibibytes on Linux (getrusage(2)).
    peak = (
        torch.cuda.max_memory_allocated(ranks.device)
        if on_gpu
        else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    )
    estimate: MemoryEstimate | None = None
    with suppress(UserError):
        estimate = memory_estimate(setup)
    return {
        "peak_gib": max(gather(peak)) / GIB,
        "measured_as": (
            "allocated on the GPU" if on_gpu else "resident, Python and torch themselves included"
        ),
        "predicted_low_gib": None if estimate is None else estimate.total.low.value,
        "predicted_high_gib": None if estimate is None else estimate.total.high.value,
        "available_gib": least_memory_bytes(ranks) / GIB,
    }
