"""Contradictions between settings of a run config, all found before anything starts.

Each check is a generator over one part of the config that yields what is wrong with it; none reads data or devices, and
of files only a model's config.json that is here (`model_files.py`), so they cost nothing and run anywhere. What only
the data or the model can tell (a missing column, a sequence longer than the model's positions) is told by those rooms.

The batch: a step trains `micro_batch_size` x data-parallel ranks x `gradient_accumulation` sequences, where the
data-parallel ranks are `shard` x `replicate` (tensor and context ranks see the same sequences).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from drillyard.config.model_files import local_model_config, model_problems, position_problems
from drillyard.config.problems import Path, Problem, closest_name, raise_all
from drillyard.config.run import RunConfig, ScheduleConfig, SourceConfig, TrainTokenizer
from drillyard.errors import ConfigError, UserError

BUILTIN = "builtin:"
BUILTIN_FORMATS = {"builtin:text-to-sql": "text-to-sql", "builtin:python-stdlib": "text"}

# What tells a file or a directory from the id of a Hugging Face data set, without looking at the disk.
FILE_ENDINGS = (".json", ".jsonl", ".parquet", ".csv", ".txt", ".gz", ".zst")
DIRECTORY_BEGINNINGS = ("/", "./", "../", "~")

# What a format reads from a row. `columns` may rename these and nothing else.
ROLES = {
    "text": ("text",),
    "prompt-completion": ("prompt", "completion"),
    "chat": ("messages", "tools"),
    "text-to-sql": ("schema", "question", "sql"),
}


def check_run(config: RunConfig, *, num_ranks: int | None = None, has_gpu: bool | None = None) -> list[Problem]:
    """Every contradiction in `config`; with `num_ranks` also those between it and the number of ranks (processes), with
    `has_gpu` also those between it and the host that trains."""
    return [
        *_model(config),
        *model_problems(config.model),
        *_sources(config),
        *_format(config),
        *_length(config),
        *_schedule(config),
        *_device(config, has_gpu),
        *_parallelism(config),
        *_ranks(config, num_ranks),
        *_evaluation(config),
        *_checkpoint(config),
        *_timeouts(config),
    ]


def require_valid(config: RunConfig, num_ranks: int | None = None, *, has_gpu: bool | None = None) -> None:
    """Raise one UserError that tells every contradiction, at the lines of the file the config was loaded from."""
    raise_all(check_run(config, num_ranks=num_ranks, has_gpu=has_gpu), config._origin.places)


def num_data_ranks(config: RunConfig, num_ranks: int) -> int:
    """Ranks that see different sequences: all but those of tensor and context parallelism."""
    return num_ranks // (config.parallelism.tensor * config.parallelism.context)


def resolve_accumulation(config: RunConfig, num_data_ranks: int) -> int:
    """Micro-batches per step on each rank. UserError when the global batch does not divide into them."""
    training = config.training
    total, accumulation = training.global_batch_size, training.gradient_accumulation
    if total is None:
        return accumulation or 1
    at_once = training.micro_batch_size * num_data_ranks
    terms = f"micro_batch_size {training.micro_batch_size} x {num_data_ranks} data-parallel ranks"
    if total % at_once:
        lower = total // at_once * at_once
        near = f"{lower} or {lower + at_once}" if lower else f"{at_once}"
        smaller = ""
        if total % num_data_ranks == 0 and accumulation is None:
            of_rank = total // num_data_ranks
            divisor = next(size for size in range(training.micro_batch_size, 0, -1) if of_rank % size == 0)
            smaller = f", or micro_batch_size to {divisor}"
        raise ConfigError(
            f"training.global_batch_size: {total} is not a multiple of {terms} = {at_once}; set it to {near}{smaller}"
        )
    if accumulation is not None and accumulation * at_once != total:
        raise ConfigError(
            f"training.gradient_accumulation: {terms} x gradient_accumulation {accumulation} = "
            f"{accumulation * at_once}, "
            f"but global_batch_size is {total}; give one of the two, or gradient_accumulation: {total // at_once}"
        )
    return total // at_once


def resolve_global_batch(config: RunConfig, num_data_ranks: int) -> int:
    """Sequences per step over all ranks. UserError as of `resolved_accumulation`."""
    return config.training.micro_batch_size * num_data_ranks * resolve_accumulation(config, num_data_ranks)


def smallest_global_batch(config: RunConfig) -> int:
    """Sequences per step on the fewest ranks that the config allows; UserError as of `resolved_accumulation`."""
    if config.training.global_batch_size is not None:
        return config.training.global_batch_size
    sizes = config.parallelism
    return resolve_global_batch(config, (1 if sizes.shard == "auto" else sizes.shard) * sizes.replicate)


def normalized_sources(source: str | SourceConfig | list[str | SourceConfig]) -> list[SourceConfig]:
    """A source setting in its one full form."""
    each = source if isinstance(source, list) else [source]
    # Validation would resolve a reference that is still text, and make plain text of one that is resolved.
    return [SourceConfig.model_construct(path=item) if isinstance(item, str) else item for item in each]


def has_held_out(config: RunConfig) -> bool:
    """Whether there will be held-out data: asked for, or brought by every built-in source."""
    held_out = config.data.held_out
    built_in = any(source.path.startswith(BUILTIN) for source in normalized_sources(config.data.source))
    return held_out.source is not None or held_out.fraction > 0 or built_in


def _model(config: RunConfig) -> Iterator[Problem]:
    model = config.model
    if model.id is None and model.config is None:
        yield Problem(
            ("model",), "name a model: `id: meta-llama/Llama-3.2-1B`, or an inline `config: {architecture: llama, ...}`"
        )
    if model.id is not None and model.config is not None:
        yield Problem(("model", "config"), "a model is given by `id` or by an inline `config`, not by both; remove one")
    if model.config is not None and model.id is None and model.init == "pretrained":
        yield Problem(
            ("model", "init"), "an inline config has no pretrained weights; write init: random, or give model.id"
        )
    if model.config is not None and not isinstance(model.config.get("architecture"), str):
        yield Problem(
            ("model", "config", "architecture"), "missing: a transformers model_type such as llama, qwen3 or gpt2"
        )
    if model.lora is not None and model.init == "random":
        yield Problem(
            ("model", "lora"), "adapters on random weights train nothing useful; remove lora, or write init: pretrained"
        )
    elif model.lora is not None:
        yield Problem(("model", "lora"), "not available in this version: all weights are trained; remove lora")
    if model.config is not None and model.id is None and config.data.tokenizer is None:
        yield Problem(
            ("data", "tokenizer"),
            "missing: an inline model config brings none; give a path, an id or {train: bpe, vocab_size: 4096}",
        )
    tokenizer = config.data.tokenizer
    vocabulary = (model.config or {}).get("vocab_size")
    if isinstance(tokenizer, TrainTokenizer) and isinstance(vocabulary, int) and vocabulary < tokenizer.vocab_size:
        yield Problem(
            ("model", "config", "vocab_size"),
            f"{vocabulary} is less than the tokenizer's {tokenizer.vocab_size}; leave it out to follow the tokenizer",
        )
    if isinstance(tokenizer, TrainTokenizer) and model.init == "pretrained" and model.id is not None:
        yield Problem(
            ("data", "tokenizer"), "pretrained weights know only their own tokenizer; remove it, or write init: random"
        )


def _sources(config: RunConfig) -> Iterator[Problem]:
    held_out = config.data.held_out
    yield from _source_list(config, ("data", "source"), normalized_sources(config.data.source))
    if held_out.source is not None:
        yield from _source_list(config, ("data", "held_out", "source"), normalized_sources(held_out.source))
        if held_out.fraction > 0 or held_out.split_by is not None:
            yield Problem(
                ("data", "held_out"),
                "held-out documents come from `source` or from `fraction`, not from both; remove one",
            )
    elif held_out.split_by is not None and held_out.fraction == 0:
        yield Problem(("data", "held_out", "fraction"), "missing: split_by needs the fraction to hold out, such as 0.1")


def _source_list(config: RunConfig, path: Path, sources: list[SourceConfig]) -> Iterator[Problem]:
    if not sources:
        yield Problem(path, "is an empty list; name at least one source")
    names: dict[str, int] = {}
    listed = len(sources) > 1
    for index, source in enumerate(sources):
        at = (*path, index) if listed else path
        name = source.name or source.path.rstrip("/").rpartition("/")[2]
        if name in names:
            yield Problem(
                at,
                f"has the name '{name}' of entry {names[name]}; give each a `name`, by which metrics tell them apart",
            )
        names.setdefault(name, index)
        if source.path.startswith(BUILTIN):
            if source.path not in BUILTIN_FORMATS:
                yield Problem(at, f"there is no '{source.path}'; built in are {' and '.join(BUILTIN_FORMATS)}")
            elif BUILTIN_FORMATS[source.path] != config.data.format:
                fitting = BUILTIN_FORMATS[source.path]
                yield Problem(
                    ("data", "format"), f"found '{config.data.format}'; {source.path} needs format: {fitting}"
                )
        elif source.options and (source.path.endswith(FILE_ENDINGS) or source.path.startswith(DIRECTORY_BEGINNINGS)):
            yield Problem(
                (*at, "options"),
                f"only built-in sources and Hugging Face data sets have options; '{source.path}' is neither",
            )


def _format(config: RunConfig) -> Iterator[Problem]:
    data = config.data
    roles = ROLES[data.format]
    for role in data.columns:
        if role not in roles:
            yield Problem(
                ("data", "columns", role), f"format {data.format} reads no such column; it reads {', '.join(roles)}"
            )
    if data.format == "text" and data.loss_on == "completion":
        yield Problem(
            ("data", "loss_on"), "format text has no completions; write loss_on: all, or choose another format"
        )
    if data.format != "chat" and data.loss_on == "last":
        yield Problem(("data", "loss_on"), f"last is for format chat, and this is {data.format}; remove it")


def _length(config: RunConfig) -> Iterator[Problem]:
    data = config.data
    model = config.model
    positions = (model.config or {}).get("max_position_embeddings")
    if isinstance(positions, int) and data.sequence_length > positions:
        yield Problem(
            ("data", "sequence_length"),
            f"{data.sequence_length} is over the model's max_position_embeddings {positions}",
        )
    if model.id is not None and model.config is None and model.init == "pretrained":
        yield from position_problems(data.sequence_length, local_model_config(model.id), model.id)


def _schedule(config: RunConfig) -> Iterator[Problem]:
    training, schedule = config.training, config.training.schedule
    if training.steps is None and training.epochs is None:
        yield Problem(("training", "steps"), "missing: say how long to train by `steps` or by `epochs`")
    if training.steps is not None and training.epochs is not None:
        yield Problem(
            ("training", "epochs"),
            "training ends after `steps` or after `epochs`, not after both; remove one (in a command: "
            "--set training.steps=null)",
        )
    stable_decay = schedule.name == "warmup-stable-decay"
    if schedule.decay_steps is not None and not stable_decay:
        yield Problem(
            ("training", "schedule", "decay_steps"),
            f"only warmup-stable-decay uses it; the schedule is {schedule.name}",
        )
    if schedule.name == "constant" and schedule.final_fraction not in (0.0, 1.0):
        yield Problem(("training", "schedule", "final_fraction"), "a constant schedule has no decay; remove it")
    if training.steps is not None:
        yield from schedule_problems(schedule, training.steps)


def schedule_problems(schedule: ScheduleConfig, total_steps: int) -> Iterator[Problem]:
    """What keeps a schedule from fitting into `total_steps`; of `training.epochs` only the data tell how many."""
    warmup = schedule.warmup_steps
    if warmup >= total_steps and warmup > 0:
        yield Problem(
            ("training", "schedule", "warmup_steps"),
            f"{warmup} warmup steps of {total_steps} steps: the peak is never trained at; lower it",
        )
    elif schedule.name == "warmup-stable-decay" and warmup + (decay := resolve_decay_steps(schedule, total_steps)) > (
        total_steps
    ):
        default = " (the default, a fifth of all steps)" if schedule.decay_steps is None else ""
        yield Problem(
            ("training", "schedule", "decay_steps"),
            f"{warmup} warmup + {decay} decay steps{default} are more than {total_steps} steps: "
            f"set decay_steps to {total_steps - warmup} or less, or lower warmup_steps",
        )


def resolve_decay_steps(schedule: ScheduleConfig, total_steps: int) -> int:
    """Steps of the final decay of warmup-stable-decay."""
    return schedule.decay_steps or max(1, total_steps // 5)


def steps_for_epochs(epochs: float, num_sequences: float, global_batch_size: int) -> int:
    """Optimizer steps of `epochs` passes over `num_sequences`: each epoch ends with a step of what is left of it.

    A part of an epoch is rounded up to whole steps.
    """
    whole, part = divmod(epochs, 1)
    # Rounded before the ceiling: 0.3 of 10 sequences are 3, and 0.3 * 10 is a little more.
    left = math.ceil(round(part * num_sequences / global_batch_size, 6))
    return int(whole) * math.ceil(num_sequences / global_batch_size) + left or 1


def _device(config: RunConfig, has_gpu: bool | None) -> Iterator[Problem]:
    attention, training = config.model.attention, config.training
    on_cpu = training.device == "cpu" or (training.device == "auto" and has_gpu is False)
    if attention in ("varlen", "flex") and on_cpu:
        why = (
            "" if training.device == "cpu" else ", and no GPU is seen here (where there is one: training.device: cuda)"
        )
        yield Problem(
            ("model", "attention"),
            f"{attention} attention cannot train on a CPU{why}; allowed there: auto, sdpa, eager",
        )
    if attention == "varlen" and training.precision != "bf16":
        yield Problem(
            ("model", "attention"), f"varlen attention computes in bf16 only, and precision is {training.precision}"
        )


def _parallelism(config: RunConfig) -> Iterator[Problem]:
    for name in ("tensor", "context"):
        if getattr(config.parallelism, name) > 1:
            yield Problem(
                ("parallelism", name),
                f"{name} parallelism is not available in this version; write {name}: 1 and let `shard` span the ranks",
            )


def _ranks(config: RunConfig, num_ranks: int | None) -> Iterator[Problem]:
    sizes = config.parallelism
    fixed = sizes.replicate * sizes.tensor * sizes.context
    product = f"replicate {sizes.replicate} x tensor {sizes.tensor} x context {sizes.context}"
    if num_ranks is None:
        if isinstance(sizes.shard, int):
            yield from _batch(config, sizes.shard * sizes.replicate)
    elif sizes.shard == "auto" and num_ranks % fixed:
        yield Problem(("parallelism",), f"{num_ranks} ranks do not divide by {product} = {fixed}")
    elif sizes.shard != "auto" and sizes.shard * fixed != num_ranks:
        yield Problem(
            ("parallelism", "shard"),
            f"shard {sizes.shard} x {product} = {sizes.shard * fixed}, but there are {num_ranks} ranks; "
            f"write shard: auto, or start {sizes.shard * fixed} ranks",
        )
    else:
        yield from _batch(config, num_data_ranks(config, num_ranks))


def _batch(config: RunConfig, data_ranks: int) -> Iterator[Problem]:
    try:
        resolve_accumulation(config, data_ranks)
    except UserError as error:
        key, _, message = str(error).partition(": ")
        yield Problem(tuple(key.split(".")), message)


def _evaluation(config: RunConfig) -> Iterator[Problem]:
    evaluation = config.evaluation
    if not evaluation.metrics:
        yield Problem(("evaluation", "metrics"), "is an empty list; name at least one metric: loss, sql-execution")
    if "sql-execution" in evaluation.metrics and config.data.format != "text-to-sql":
        yield Problem(
            ("evaluation", "metrics"), f"sql-execution needs data.format: text-to-sql; it is {config.data.format}"
        )
    asked = evaluation.every_steps is not None or evaluation.at_start or "sql-execution" in evaluation.metrics
    if asked and not has_held_out(config):
        key = "every_steps" if evaluation.every_steps is not None else "at_start" if evaluation.at_start else "metrics"
        yield Problem(
            ("evaluation", key), "there is no held-out data; set data.held_out.fraction (such as 0.05) or .source"
        )


def _checkpoint(config: RunConfig) -> Iterator[Problem]:
    resume = config.checkpoint.resume
    allowed = "allowed: auto, never, or the path of a checkpoint"
    if not resume.strip():
        yield Problem(("checkpoint", "resume"), f"is empty; {allowed}")
        return
    meant = closest_name(resume, ("auto", "never"))
    if meant is not None and meant != resume:
        yield Problem(("checkpoint", "resume"), f"found '{resume}'; {allowed}; did you mean '{meant}'?")


def _timeouts(config: RunConfig) -> Iterator[Problem]:
    """collective < watchdog < launcher: a net that closes after the one behind it has is none."""
    timeouts = config.timeouts
    limits = {
        "collective_seconds": timeouts.collective,
        "watchdog_seconds": timeouts.watchdog_seconds or None,
        "launcher_grace_seconds": timeouts.launcher_grace_seconds,
    }
    given = [limit for limit in limits.values() if limit is not None]
    if any(shorter >= longer for shorter, longer in itertools.pairwise(given)):
        told = (f"{name} {'off' if limit is None else f'{limit:g}'}" for name, limit in limits.items())
        message = f"{' < '.join(told)} must hold; raise the later ones or lower the earlier"
        yield Problem(("timeouts",), message)
