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
from drillyard.config.model_checks import ARCHITECTURES, position_problems, unsupported
from drillyard.config.problems import Problem, dotted, raise_all
from drillyard.errors import UserError
from drillyard.estimate.cost import SECONDS_PER_HOUR, Cost, cost_of, hourly_price, why_no_price
from drillyard.estimate.fitting import Change, nearest_that_fit
from drillyard.estimate.memory import MemoryEstimate, memory_estimate
from drillyard.estimate.place import Place
from drillyard.estimate.question import Question
from drillyard.estimate.remarks import remarks
from drillyard.estimate.resolve import Resolved, setup_of
from drillyard.estimate.run_time import Missing, RunTime, run_time, steps_of
from drillyard.estimate.setup import Setup
from drillyard.estimate.step_time import StepTime, step_time
from drillyard.estimate.terms import Range, term
from drillyard.estimate.verdict import Verdict, verdict_on
from drillyard.hardware import Fact, Quota, quota_needed
from drillyard.modelspec.adapters import adapter_parameters


@dataclass(frozen=True, slots=True)
class Speed:
    """A step's time and what follows from it, where there is an answer; `detail` has bounds, runs and notes."""

    seconds: Range
    tokens_per_second_per_gpu: Range
    tflops_per_gpu: Range
    mfu: Range | None
    detail: StepTime


@dataclass(frozen=True, slots=True)
class Prediction:
    """The answer. `available_gib` is what the driver of one GPU reports."""

    question: Question
    resolved: Resolved
    memory: MemoryEstimate | None
    available_gib: Fact[float] | None
    speed: Speed | None
    run: RunTime | None
    cost: Cost | None
    quotas: tuple[Quota, ...]
    missing: tuple[Missing, ...]
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
            term("GPU-hours", end.value * gpus / SECONDS_PER_HOUR, "h", "wall time x GPUs", end)
            for end in (times.low, times.high)
        )
        return Range(low, high, times.is_bound)

    def alternatives(self) -> list[Change]:
        """The nearest settings that fit, the fastest first; empty where it fits, or nothing is known."""
        if self.available_gib is None or self.verdict in ("fits", "unknown"):
            return []
        question = self.question

        def seconds(setup: Setup) -> float:
            times = _step_time(question, setup).seconds
            assert times is not None, "the run itself has one, on the same accelerator"
            return times.low.value

        timed = None if self.speed is None else seconds
        return nearest_that_fit(self.setup, self.available_gib.value, step_seconds=timed)


def predict(question: Question) -> Prediction:
    """The answer to `question`. UserError where the run contradicts itself or the place, at the lines of the config."""
    config, place, spec = question.config, question.place, question.model.spec
    refused = _check(question)
    memory_gib = place.accelerator.memory_gib
    resolved = setup_of(
        config,
        spec,
        num_gpus=place.num_gpus,
        gpus_per_node=place.gpus_per_node,
        memory_gib=memory_gib,
        device_type=question.device_type,
        model_config=question.model.config,
    )
    missing: list[Missing] = []
    memory = _memory(resolved, place, missing)
    timed = _speed(question, resolved.setup, missing)
    run = None if timed is None else _run(question, resolved.setup, timed, missing)
    cost = None if timed is None else _cost(question, resolved.setup, timed, run, missing)
    return Prediction(
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
        warnings=tuple(dict.fromkeys(remarks(question, memory, () if timed is None else timed.detail.notes, run))),
    )


def _check(question: Question) -> list[Problem]:
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


def _unknown_targets(question: Question) -> Iterator[Problem]:
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


def _of_own_config(question: Question) -> Iterator[Problem]:
    """What the trainer would refuse of a config.json that was given beside the run config (--config)."""
    content, config = question.model.config, question.config
    if content is None or config.model.config is not None:
        return
    model_type = content.get("model_type")
    if isinstance(model_type, str) and model_type not in ARCHITECTURES:
        name = config.model.id or question.model.source
        yield Problem(("model", "id"), f"{name}: {unsupported(model_type)}")
    if config.model.init == "pretrained":
        yield from position_problems(config.data.sequence_length, content, config.model.id or question.model.source)


def _memory(resolved: Resolved, place: Place, missing: list[Missing]) -> MemoryEstimate | None:
    if place.accelerator.memory_gib is None:
        why = f"the memory of {place.accelerator.name} is not known"
        missing.append(Missing("whether it fits", why, "--hardware FILE with its memory_gib"))
    if resolved.memory is not None:
        return resolved.memory
    try:
        return memory_estimate(resolved.setup)
    except UserError as error:
        missing.append(Missing("memory", *_reason(error)))
        return None


def _speed(question: Question, setup: Setup, missing: list[Missing]) -> Speed | None:
    what = "step time, and all that follows from it"
    try:
        timed = _step_time(question, setup)
    except UserError as error:
        missing.append(Missing(what, *_reason(error)))
        return None
    if timed.seconds is None or timed.tokens_per_second_per_gpu is None or timed.tflops_per_gpu is None:
        give = "--hardware FILE with what is known of it"
        if setup.precision != "bf16":
            give = f"--set training.precision=bf16 where that is meant, or {give}"
        missing.append(Missing(what, "; ".join(timed.notes), give))
        return None
    return Speed(timed.seconds, timed.tokens_per_second_per_gpu, timed.tflops_per_gpu, timed.mfu, timed)


def _step_time(question: Question, setup: Setup) -> StepTime:
    place = question.place
    return step_time(
        setup,
        None if place.made_up else place.machine,
        place.accelerator,
        bandwidths=question.facts.bandwidths,
        without_source=question.without_source,
        calibration=question.calibration,
    )


def _run(question: Question, setup: Setup, timed: Speed, missing: list[Missing]) -> RunTime | None:
    steps = steps_of(question.config, setup, question.data_tokens)
    if question.tokens is not None:
        steps = max(1, math.ceil(question.tokens / setup.tokens_per_step))
    if steps is None:
        why = "training.epochs says how long to train, and how many tokens the data have is not known"
        missing.append(Missing("the length of the run, its cost and its failures", why, "--data-tokens"))
        return None
    run = run_time(question.config, setup, question.place, timed.seconds, steps, question.failures)
    missing.extend(run.missing)
    if run.outlooks and question.place.consumption == "spot" and question.failures.preemptions_per_node_day is None:
        missing.append(
            Missing(
                "preemptions",
                "the nodes are spot, and how often they are taken away is not known",
                "--preemptions-per-node-day",
            )
        )
    return run


def _cost(question: Question, setup: Setup, timed: Speed, run: RunTime | None, missing: list[Missing]) -> Cost | None:
    price = hourly_price(question.place, question.facts, question.price)
    if price is None:
        give = "--price-per-gpu-hour, --price-per-node-hour, or a price in --hardware FILE"
        missing.append(Missing("cost", why_no_price(question.place), give))
        return None
    return cost_of(price, timed.seconds, setup.tokens_per_step, None if run is None else run.longest)


def _reason(error: UserError) -> tuple[str, str]:
    """An error's first line as the reason, its second as what to give."""
    why, _, give = str(error).partition("\n")
    return why, give
