"""Find contradictions between settings of a run config before anything starts.

Each check yields the problems of one part of the config. No check reads data or devices; the only
file read is a local model's config.json (`model_files.py`). Problems that depend on the data (a
missing column) are found where it is read.

The batch: a step trains `micro_batch_size` x data-parallel ranks x `gradient_accumulation`
sequences, where the data-parallel ranks are `shard` x `replicate` (tensor and context ranks see the
same sequences).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from drillyard.config.data_checks import format_problems, has_held_out, source_problems
from drillyard.config.kernel_rules import FP8_MULTIPLE, HALF
from drillyard.config.model_files import local_model_config, model_problems, position_problems
from drillyard.config.problems import Problem, closest_name, problem, raise_all, refused_address
from drillyard.config.run import RunConfig, ScheduleConfig
from drillyard.config.run_data import TrainTokenizer
from drillyard.errors import ConfigError, UserError

METRIC_FORMATS = {"sql-execution": "text-to-sql", "function-call": "function-calling"}
"""The metrics that generate answers, with the format of the rows that they ask."""

NOT_AVAILABLE = {
    "parallelism.tensor": "write tensor: 1 and let `shard` span the ranks",
    "parallelism.context": "write context: 1 and let `shard` span the ranks",
}
"""Settings that train accepts in their default alone, and what to do instead."""


def check_run(
    config: RunConfig, *, num_ranks: int | None = None, has_gpu: bool | None = None
) -> list[Problem]:
    """Every contradiction in `config`, and those with the number of ranks or the training host
    where they are given."""
    return [
        *_model(config),
        *model_problems(config.model),
        *_adapters(config),
        *source_problems(config),
        *format_problems(config),
        *_length(config),
        *_schedule(config),
        *_device(config, has_gpu),
        *_fp8(config),
        *_not_available(config),
        *_ranks(config, num_ranks),
        *_evaluation(config),
        *_checkpoint(config),
        *_timeouts(config),
    ]


def require_valid(
    config: RunConfig, num_ranks: int | None = None, *, has_gpu: bool | None = None
) -> None:
    """Raise one UserError with every contradiction, each with its line of the config file."""
    raise_all(check_run(config, num_ranks=num_ranks, has_gpu=has_gpu), config._origin.places)


def num_data_ranks(config: RunConfig, num_ranks: int) -> int:
    """Ranks that see different sequences: all but those of tensor and context parallelism."""
    return num_ranks // (config.parallelism.tensor * config.parallelism.context)


def least_micro_batch(config: RunConfig) -> int:
    """Sequences per rank in one forward; of `auto`, which needs a global batch, the fewest."""
    size = config.training.micro_batch_size
    return 1 if size == "auto" else size


def resolve_accumulation(config: RunConfig, num_data_ranks: int) -> int:
    """Micro-batches per step on each rank. UserError when the global batch does not divide into
    them."""
    training = config.training
    total, accumulation = training.global_batch_size, training.gradient_accumulation
    if total is None:
        return accumulation or 1
    micro_batch = least_micro_batch(config)
    at_once = micro_batch * num_data_ranks
    product = f"micro_batch_size {micro_batch} x {num_data_ranks} data-parallel ranks"
    if total % at_once:
        lower = total // at_once * at_once
        near = f"{lower} or {lower + at_once}" if lower else f"{at_once}"
        smaller = ""
        if total % num_data_ranks == 0 and accumulation is None:
            of_rank = total // num_data_ranks
            divisor = next(size for size in range(micro_batch, 0, -1) if of_rank % size == 0)
            smaller = f", or micro_batch_size to {divisor}"
        raise ConfigError(
            f"training.global_batch_size: {total} is not a multiple of {product} = {at_once}; set"
            f" it to {near}{smaller}"
        )
    if accumulation is not None and accumulation * at_once != total:
        raise ConfigError(
            f"training.gradient_accumulation: {product} x gradient_accumulation {accumulation} ="
            f" {accumulation * at_once}, but global_batch_size is {total}; give one of the two, or"
            f" gradient_accumulation: {total // at_once}"
        )
    return total // at_once


def resolve_global_batch(config: RunConfig, num_data_ranks: int) -> int:
    """Sequences per step over all ranks. UserError as for `resolve_accumulation`."""
    return least_micro_batch(config) * num_data_ranks * resolve_accumulation(config, num_data_ranks)


def smallest_global_batch(config: RunConfig) -> int:
    """Sequences per step on the fewest ranks that the config allows; UserError as for
    `resolve_accumulation`."""
    if config.training.global_batch_size is not None:
        return config.training.global_batch_size
    sizes = config.parallelism
    return resolve_global_batch(
        config, (1 if sizes.shard == "auto" else sizes.shard) * sizes.replicate
    )


def _model(config: RunConfig) -> Iterator[Problem]:
    model, tokenizer = config.model, config.data.tokenizer
    inline = model.config is not None and model.id is None
    for key, name in (("model.id", model.id), ("data.tokenizer", tokenizer)):
        if refused := refused_address(name):
            yield problem(key, refused)
    if model.id is None and model.config is None:
        yield problem(
            "model",
            "name a model: `id: Qwen/Qwen3-0.6B`, or an inline `config: {architecture: llama,"
            " ...}`",
        )
    if model.id is not None and model.config is not None:
        yield problem(
            "model.config",
            "a model is given by `id` or by an inline `config`, not by both; remove one",
        )
    if inline and model.init == "pretrained":
        yield problem(
            "model.init",
            "an inline config has no pretrained weights; write init: random, or give model.id",
        )
    if model.config is not None and not isinstance(model.config.get("architecture"), str):
        yield problem(
            "model.config.architecture",
            "missing: a transformers model_type such as llama, qwen3 or gpt2",
        )
    if inline and tokenizer is None:
        message = (
            "missing: an inline model config has none; give a path, an id or {train: bpe,"
            " vocab_size: 4096}"
        )
        yield problem("data.tokenizer", message)
    if isinstance(tokenizer, TrainTokenizer):
        vocabulary, smallest = (model.config or {}).get("vocab_size"), tokenizer.vocab_size
        if isinstance(vocabulary, int) and vocabulary < smallest:
            message = (
                f"{vocabulary} is less than the tokenizer's {smallest}; remove it to use the"
                " tokenizer's size"
            )
            yield problem("model.config.vocab_size", message)
        if model.init == "pretrained" and model.id is not None:
            message = (
                "pretrained weights work with their own tokenizer only; remove it, or write init:"
                " random"
            )
            yield problem("data.tokenizer", message)


def _adapters(config: RunConfig) -> Iterator[Problem]:
    lora = config.model.lora
    if lora is None:
        if config.model.quantization is not None:
            message = (
                "quantized weights cannot be trained; add model.lora to train adapters on them, or"
                " remove it"
            )
            yield problem("model.quantization", message)
        return
    if config.model.init == "random":
        message = (
            "adapters are trained on pretrained weights; write init: pretrained and model.id, or"
            " remove lora"
        )
        yield problem("model.lora", message)
    if not lora.target_modules:
        message = (
            "is an empty list; name linear layers of the model, such as q_proj, or write all-linear"
        )
        yield problem("model.lora.target_modules", message)
    if lora.adapter is not None and (refused := refused_address(lora.adapter)):
        yield problem("model.lora.adapter", refused)


def _length(config: RunConfig) -> Iterator[Problem]:
    training = config.training
    if training.micro_batch_size == "auto" and (
        training.global_batch_size is None or training.gradient_accumulation is not None
    ):
        yield problem(
            "training.micro_batch_size",
            "`auto` needs training.global_batch_size, and no gradient_accumulation: sequences per"
            " step must not depend on what fits",
        )
    length, model = config.data.sequence_length, config.model
    positions = (model.config or {}).get("max_position_embeddings")
    if isinstance(positions, int) and length > positions:
        yield problem(
            "data.sequence_length",
            f"{length} is over the model's max_position_embeddings {positions}",
        )
    if model.id is not None and model.config is None and model.init == "pretrained":
        yield from position_problems(length, local_model_config(model.id), model.id)


def _schedule(config: RunConfig) -> Iterator[Problem]:
    training, schedule = config.training, config.training.schedule
    if training.steps is None and training.epochs is None:
        yield problem("training.steps", "missing: give the length by `steps` or by `epochs`")
    if training.steps is not None and training.epochs is not None:
        message = (
            "give `steps` or `epochs`, not both; remove one (in a command: --set"
            " training.steps=null)"
        )
        yield problem("training.epochs", message)
    if schedule.decay_steps is not None and schedule.name != "warmup-stable-decay":
        message = f"only warmup-stable-decay uses it; the schedule is {schedule.name}"
        yield problem("training.schedule.decay_steps", message)
    if schedule.name == "constant" and schedule.final_fraction not in (0.0, 1.0):
        yield problem(
            "training.schedule.final_fraction", "a constant schedule has no decay; remove it"
        )
    if training.steps is not None:
        yield from schedule_problems(schedule, training.steps)


def schedule_problems(schedule: ScheduleConfig, total_steps: int) -> Iterator[Problem]:
    """Check that a schedule fits into `total_steps`; with `training.epochs` they are known once the
    data is read."""
    warmup, decay = schedule.warmup_steps, resolve_decay_steps(schedule, total_steps)
    if warmup >= total_steps and warmup > 0:
        message = f"{warmup} warmup steps of {total_steps} steps never reach the peak; lower it"
        yield problem("training.schedule.warmup_steps", message)
    elif schedule.name == "warmup-stable-decay" and warmup + decay > total_steps:
        default = " (the default, a fifth of all steps)" if schedule.decay_steps is None else ""
        yield problem(
            "training.schedule.decay_steps",
            f"{warmup} warmup + {decay} decay steps{default} are more than {total_steps} steps: "
            f"set decay_steps to {total_steps - warmup} or less, or lower warmup_steps",
        )


def resolve_decay_steps(schedule: ScheduleConfig, total_steps: int) -> int:
    """Steps of the final decay of warmup-stable-decay."""
    return schedule.decay_steps or max(1, total_steps // 5)


def steps_for_epochs(epochs: float, num_sequences: float, global_batch_size: int) -> int:
    """Optimizer steps of `epochs` passes over `num_sequences`: each epoch ends with a step of what
    is left of it.

    A part of an epoch is rounded up to whole steps.
    """
    whole, part = divmod(epochs, 1)
    # Rounded before the ceiling: 0.3 of 10 sequences are 3, and 0.3 * 10 is a little more.
    left = math.ceil(round(part * num_sequences / global_batch_size, 6))
    return int(whole) * math.ceil(num_sequences / global_batch_size) + left or 1


def _device(config: RunConfig, has_gpu: bool | None) -> Iterator[Problem]:
    attention, device, precision = (
        config.model.attention,
        config.training.device,
        config.training.precision,
    )
    if attention in ("varlen", "flex") and (
        device == "cpu" or (device == "auto" and has_gpu is False)
    ):
        why = (
            ""
            if device == "cpu"
            else ", and there is no GPU here (where there is one: training.device: cuda)"
        )
        message = (
            f"{attention} attention cannot train on a CPU{why}; allowed there: auto, sdpa, eager"
        )
        yield problem("model.attention", message)
    if attention == "varlen" and precision not in HALF:
        yield problem(
            "model.attention",
            f"varlen attention computes in bf16 only, and precision is {precision}",
        )


def _fp8(config: RunConfig) -> Iterator[Problem]:
    training = config.training
    if training.precision != "fp8":
        if training.fp8_scaling is not None:
            yield problem(
                "training.fp8_scaling",
                f"has no effect under precision {training.precision}; write precision: fp8, or"
                " remove it",
            )
        return
    length = config.data.sequence_length
    if length % FP8_MULTIPLE:
        lower = length // FP8_MULTIPLE * FP8_MULTIPLE
        near = " or ".join(str(each) for each in (lower, lower + FP8_MULTIPLE) if each)
        yield problem(
            "data.sequence_length", f"fp8 products need a multiple of {FP8_MULTIPLE}; write {near}"
        )
    if config.model.quantization is not None:
        yield problem(
            "model.quantization",
            "its weights are multiplied in bf16 and not in fp8; write precision: bf16, or remove"
            " it",
        )


def _not_available(config: RunConfig) -> Iterator[Problem]:
    for key, advice in NOT_AVAILABLE.items():
        section, _, name = key.partition(".")
        values = getattr(config, section)
        if getattr(values, name) != type(values).model_fields[name].default:
            yield problem(key, f"not available in this version; {advice}")


def _ranks(config: RunConfig, num_ranks: int | None) -> Iterator[Problem]:
    sizes = config.parallelism
    fixed = sizes.replicate * sizes.tensor * sizes.context
    if num_ranks is None:
        if isinstance(sizes.shard, int):
            yield from _batch(config, sizes.shard * sizes.replicate)
    elif sizes.shard == "auto" and num_ranks % fixed:
        named = {name: getattr(sizes, name) for name in ("replicate", "tensor", "context")}
        divisor = " x ".join(f"{name} {size}" for name, size in named.items() if size > 1)
        yield problem("parallelism", f"{num_ranks} ranks do not divide by {divisor}")
    elif sizes.shard != "auto" and sizes.shard * fixed != num_ranks:
        message = (
            f"shard {sizes.shard} x replicate {fixed} = {sizes.shard * fixed}, but there are"
            f" {num_ranks} ranks; "
        )
        yield problem(
            "parallelism.shard", f"{message}write shard: auto, or start {sizes.shard * fixed} ranks"
        )
    else:
        yield from _batch(config, num_data_ranks(config, num_ranks))


def _batch(config: RunConfig, data_ranks: int) -> Iterator[Problem]:
    training = config.training
    if training.micro_batch_size == "auto" and training.gradient_accumulation is not None:
        return  # refused by `_length`, with other advice
    try:
        size = resolve_global_batch(config, data_ranks)
    except UserError as error:
        key, _, message = str(error).partition(": ")
        yield problem(key, message)
        return
    samples = config.data.megatron.samples if config.data.megatron is not None else None
    if samples is None:
        return
    if config.training.steps is None:
        yield problem(
            "data.megatron.samples",
            "Megatron-LM's order has no epochs; give training.steps, or write null",
        )
    elif samples < (needed := config.training.steps * size):
        yield problem(
            "data.megatron.samples",
            f"{samples} are less than {config.training.steps} steps x {size} "
            f"sequences = {needed}, and another number is another order; write at least {needed}",
        )


def _evaluation(config: RunConfig) -> Iterator[Problem]:
    evaluation, data_format = config.evaluation, config.data.format
    if not evaluation.metrics:
        yield problem(
            "evaluation.metrics",
            f"is an empty list; name at least one metric: {', '.join(['loss', *METRIC_FORMATS])}",
        )
    for metric, needed in METRIC_FORMATS.items():
        if metric in evaluation.metrics and data_format != needed:
            yield problem(
                "evaluation.metrics", f"{metric} needs data.format: {needed}; it is {data_format}"
            )
    needs_held_out = {
        "every_steps": evaluation.every_steps is not None,
        "at_start": evaluation.at_start,
        "metrics": any(metric in METRIC_FORMATS for metric in evaluation.metrics),
    }
    key = next((key for key, needs in needs_held_out.items() if needs), None)
    if key is not None and not has_held_out(config):
        message = "there is no held-out data; set data.held_out.fraction (such as 0.05) or .source"
        yield problem(f"evaluation.{key}", message)


def _checkpoint(config: RunConfig) -> Iterator[Problem]:
    resume = config.checkpoint.resume
    allowed = "allowed: auto, never, or the path of a checkpoint"
    meant = closest_name(resume, ("auto", "never"))
    if not resume.strip():
        yield problem("checkpoint.resume", f"is empty; {allowed}")
    elif refused := refused_address(resume):
        yield problem("checkpoint.resume", refused)
    elif meant is not None and meant != resume:
        yield problem("checkpoint.resume", f"found '{resume}'; {allowed}; did you mean '{meant}'?")


def _timeouts(config: RunConfig) -> Iterator[Problem]:
    """collective < watchdog < launcher, so that the innermost limit, which names the cause, is
    reached first."""
    timeouts = config.timeouts
    limits = {
        "collective_seconds": timeouts.collective,
        "watchdog_seconds": timeouts.watchdog_seconds or None,
        "launcher_grace_seconds": timeouts.launcher_grace_seconds,
    }
    given = [limit for limit in limits.values() if limit is not None]
    if any(shorter >= longer for shorter, longer in itertools.pairwise(given)):
        values = (
            f"{name} {'off' if limit is None else f'{limit:g}'}" for name, limit in limits.items()
        )
        yield problem(
            "timeouts", f"{' < '.join(values)} must hold; raise the later ones or lower the earlier"
        )
