"""One prediction: will it fit, how fast, how long, how much, how often will it fail.

    prediction = predict(Question(config, model, place, facts))
    prediction.verdict, prediction.step_time.seconds, prediction.cost.of_run

What cannot be known is None and stands in `missing` with the reason and the flag that gives it; nothing is guessed, and
one missing figure takes away only what rests on it. Every number is a term with formula and sources.

Cost: a few milliseconds. Limits: those of its parts; what is beside the steps (start, evaluation, data preparation) is
left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from drillyard.config import check_run
from drillyard.config.model_files import ARCHITECTURES, position_problems, unsupported_architecture
from drillyard.config.problems import Problem, dotted, raise_all
from drillyard.errors import UserError
from drillyard.estimation.alternatives import Alternative, find_alternatives
from drillyard.estimation.cost import SECONDS_PER_HOUR, RunCost, hourly_price, missing_price_reason, run_cost
from drillyard.estimation.memory import MemoryEstimate, memory_estimate
from drillyard.estimation.notes import estimate_notes
from drillyard.estimation.quantity import Range, quantity
from drillyard.estimation.request import EstimateRequest
from drillyard.estimation.resolved_setup import ResolvedSetup, resolve_setup
from drillyard.estimation.run_time import MissingInput, RunTime, planned_steps, run_time
from drillyard.estimation.setup import Setup
from drillyard.estimation.step_time import StepTime, step_time
from drillyard.estimation.target import Target
from drillyard.estimation.verdict import Verdict, verdict_on
from drillyard.hardware import Fact, Quota, quota_needed
from drillyard.modelspec.spec import adapter_parameters


@dataclass(frozen=True, slots=True)
class StepSpeed:
    """A step's time and what follows from it, where there is an answer; `detail` has bounds, runs and notes."""

    seconds: Range
    tokens_per_second_per_gpu: Range
    tflops_per_gpu: Range
    mfu: Range | None
    detail: StepTime


@dataclass(frozen=True, slots=True)
class RunEstimate:
    """The answer. `available_gib` is what the driver of one GPU reports."""

    question: EstimateRequest
    resolved: ResolvedSetup
    memory: MemoryEstimate | None
    available_gib: Fact[float] | None
    speed: StepSpeed | None
    run: RunTime | None
    cost: RunCost | None
    quotas: tuple[Quota, ...]
    missing: tuple[MissingInput, ...]
    refusals: tuple[str, ...]
    """Why `drillyard train` would refuse the run, though it can be estimated."""
    warnings: tuple[str, ...]

    @property
    def setup(self) -> Setup:
        return self.resolved.setup

    @property
    def verdict(self) -> Verdict | Literal["unknown"]:
        """Whether it fits; unknown where what is needed, or what there is, is."""
        if self.memory is None or self.available_gib is None:
            return "unknown"
        return verdict_on(self.memory.total, self.available_gib.value)

    @property
    def gpu_hours(self) -> Range | None:
        """What the run takes of its GPUs, with failures where they are known; None where its length is not."""
        if self.run is None:
            return None
        gpus, times = self.question.place.num_gpus, self.run.longest
        low, high = (
            quantity("GPU-hours", end.value * gpus / SECONDS_PER_HOUR, "h", "wall time x GPUs", end)
            for end in (times.low, times.high)
        )
        return Range(low, high, times.is_bound)

    def alternatives(self) -> list[Alternative]:
        """The nearest settings that fit, the fastest first; empty where it fits, or nothing is known."""
        if self.available_gib is None or self.verdict in ("fits", "unknown"):
            return []
        question = self.question

        def seconds(setup: Setup) -> float:
            times = _step_time(question, setup).seconds
            assert times is not None, "the run itself has one, on the same accelerator"
            return times.low.value

        timed = None if self.speed is None else seconds
        return find_alternatives(self.setup, self.available_gib.value, step_seconds=timed)


def estimate_run(question: EstimateRequest) -> RunEstimate:
    """The answer to `question`. UserError where the run contradicts itself or the place, at the lines of the config."""
    config, place, spec = question.config, question.place, question.model.spec
    refused = _check(question)
    memory_gib = place.accelerator.memory_gib
    resolved = resolve_setup(
        config,
        spec,
        num_gpus=place.num_gpus,
        gpus_per_node=place.gpus_per_node,
        memory_gib=memory_gib,
        device_type=question.device_type,
        model_config=question.model.config,
    )
    missing: list[MissingInput] = []
    memory = _memory(resolved, place, missing)
    timed = _speed(question, resolved.setup, missing)
    run = None if timed is None else _run(question, resolved.setup, timed, missing)
    cost = None if timed is None else _cost(question, resolved.setup, timed, run, missing)
    return RunEstimate(
        question=question,
        resolved=resolved,
        memory=memory,
        available_gib=None if memory_gib is None else place.accelerator.fact("memory_gib"),
        speed=timed,
        run=run,
        cost=cost,
        quotas=() if place.cluster is None else tuple(quota_needed(place.cluster, question.facts)),
        missing=tuple(missing),
        refusals=tuple(f"{dotted(problem.path)}: {problem.message}" for problem in refused),
        warnings=tuple(
            dict.fromkeys(estimate_notes(question, memory, () if timed is None else timed.detail.notes, run))
        ),
    )


def _check(question: EstimateRequest) -> list[Problem]:
    """What the trainer would refuse though it can be estimated; UserError for what contradicts the place or itself."""
    config, place = question.config, question.place
    has_gpu = question.device_type == "cuda"
    problems = check_run(config, num_ranks=place.num_gpus, has_gpu=has_gpu)
    contradictions = [problem for problem in problems if problem.path[0] in ("training", "parallelism")]
    device = config.training.device
    if device not in ("auto", question.device_type):
        message = f"found '{device}', but the run is estimated on {place.accelerator.name}; write auto"
        contradictions.append(Problem(("training", "device"), message))
    contradictions += _unknown_targets(question)
    raise_all(contradictions, config._origin.places)
    return list(dict.fromkeys([*(one for one in problems if one not in contradictions), *_of_own_config(question)]))


def _unknown_targets(question: EstimateRequest) -> Iterator[Problem]:
    """What keeps adapters from being counted: targets that the model does not have."""
    lora = question.config.model.lora
    if lora is None:
        return
    path = ("model", "lora", "target_modules")
    if not lora.target_modules:
        yield Problem(path, "is an empty list; name linear layers of the model, such as q_proj")
    try:
        adapter_parameters(question.model.spec, lora.rank, lora.target_modules)
    except UserError as error:
        yield Problem(path, str(error).replace("\n", "; "))


def _of_own_config(question: EstimateRequest) -> Iterator[Problem]:
    """What the trainer would refuse of a config.json that was given beside the run config (--config)."""
    content, config = question.model.config, question.config
    if content is None or config.model.config is not None:
        return
    model_type = content.get("model_type")
    if isinstance(model_type, str) and model_type not in ARCHITECTURES:
        name = config.model.id or question.model.source
        yield Problem(("model", "id"), f"{name}: {unsupported_architecture(model_type)}")
    if config.model.init == "pretrained":
        yield from position_problems(config.data.sequence_length, content, config.model.id or question.model.source)


def _memory(resolved: ResolvedSetup, place: Target, missing: list[MissingInput]) -> MemoryEstimate | None:
    if place.accelerator.memory_gib is None:
        why = f"the memory of {place.accelerator.name} is not known"
        missing.append(MissingInput("whether it fits", why, "--hardware FILE with its memory_gib"))
    if resolved.memory is not None:
        return resolved.memory
    try:
        return memory_estimate(resolved.setup)
    except UserError as error:
        missing.append(MissingInput("memory", *_reason(error)))
        return None


def _speed(question: EstimateRequest, setup: Setup, missing: list[MissingInput]) -> StepSpeed | None:
    what = "step time, and all that follows from it"
    try:
        timed = _step_time(question, setup)
    except UserError as error:
        missing.append(MissingInput(what, *_reason(error)))
        return None
    if timed.seconds is None or timed.tokens_per_second_per_gpu is None or timed.tflops_per_gpu is None:
        give = "--hardware FILE with what is known of it"
        if setup.precision != "bf16":
            give = f"--set training.precision=bf16 where that is meant, or {give}"
        missing.append(MissingInput(what, "; ".join(timed.notes), give))
        return None
    return StepSpeed(timed.seconds, timed.tokens_per_second_per_gpu, timed.tflops_per_gpu, timed.mfu, timed)


def _step_time(question: EstimateRequest, setup: Setup) -> StepTime:
    place = question.place
    return step_time(
        setup,
        None if place.made_up else place.machine,
        place.accelerator,
        bandwidths=question.facts.bandwidths,
        without_source=question.without_source,
        calibration=question.calibration,
    )


def _run(question: EstimateRequest, setup: Setup, timed: StepSpeed, missing: list[MissingInput]) -> RunTime | None:
    steps = planned_steps(question.config, setup, question.data_tokens)
    if question.tokens is not None:
        steps = max(1, math.ceil(question.tokens / setup.tokens_per_step))
    if steps is None:
        why = "training.epochs says how long to train, and how many tokens the data have is not known"
        missing.append(MissingInput("the length of the run, its cost and its failures", why, "--data-tokens"))
        return None
    run = run_time(question.config, setup, question.place, timed.seconds, steps, question.failures)
    missing.extend(run.missing)
    if run.outlooks and question.place.consumption == "spot" and question.failures.preemptions_per_node_day is None:
        missing.append(
            MissingInput(
                "preemptions",
                "the nodes are spot, and how often they are taken away is not known",
                "--preemptions-per-node-day",
            )
        )
    return run


def _cost(
    question: EstimateRequest, setup: Setup, timed: StepSpeed, run: RunTime | None, missing: list[MissingInput]
) -> RunCost | None:
    price = hourly_price(question.place, question.facts, question.price)
    if price is None:
        give = "--price-per-gpu-hour, --price-per-node-hour, or a price in --hardware FILE"
        missing.append(MissingInput("cost", missing_price_reason(question.place), give))
        return None
    return run_cost(price, timed.seconds, setup.tokens_per_step, None if run is None else run.longest)


def _reason(error: UserError) -> tuple[str, str]:
    """An error's first line as the reason, its second as what to give."""
    why, _, give = str(error).partition("\n")
    return why, give
