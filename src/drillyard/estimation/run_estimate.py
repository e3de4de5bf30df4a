"""The estimate of a run: will it fit, how fast, how long, how much, how often will it fail.

An unknown figure is None and listed in `missing` with the reason and the flag that gives it; the
rest is still given. Every number is a quantity with formula and sources.

Cost: a few milliseconds. Limits: those of its parts; start, evaluation and data preparation are
left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from drillyard.config.kernel_rules import FP8_MULTIPLE, NF4_BLOCK, fp8_refusal, resolve_fp8_scaling
from drillyard.config.model_files import ARCHITECTURES, position_problems, unsupported_architecture
from drillyard.config.problems import Problem, dotted, raise_all
from drillyard.config.run import RunConfig
from drillyard.config.run_checks import check_run
from drillyard.errors import UserError
from drillyard.estimation.alternatives import Alternative, find_alternatives
from drillyard.estimation.cost import RunCost, hourly_price, missing_price_reason, run_cost
from drillyard.estimation.memory import MemoryEstimate, Verdict, memory_estimate, verdict_on
from drillyard.estimation.quantity import Quantity, quantity
from drillyard.estimation.request import EstimateRequest
from drillyard.estimation.resolved_setup import ResolvedSetup, resolve_setup
from drillyard.estimation.run_time import MissingInput, RunTime, planned_steps, run_time
from drillyard.estimation.setup import Setup, can_be_fp8
from drillyard.estimation.step_time import StepTime, step_time
from drillyard.formatting import rounded_duration
from drillyard.hardware import Quota, quota_needed
from drillyard.modelspec import adapter_parameters

MUCH_PADDING = 0.25
"""The share of padding in the shards from which there is a warning."""


@dataclass(frozen=True, slots=True)
class RunEstimate:
    """All answers about a run. `available_gib` is what the driver of one GPU reports."""

    request: EstimateRequest
    resolved: ResolvedSetup
    memory: MemoryEstimate | None
    available_gib: Quantity | None
    step_time: StepTime | None
    run_time: RunTime | None
    cost: RunCost | None
    quotas: tuple[Quota, ...]
    missing: tuple[MissingInput, ...]
    refusals: tuple[str, ...]
    """Reason why `drillyard train` would refuse the run, though it can be estimated."""
    warnings: tuple[str, ...]

    @property
    def setup(self) -> Setup:
        return self.resolved.setup

    @property
    def verdict(self) -> Verdict | Literal["unknown"]:
        """Whether it fits; unknown where the memory needed or available is."""
        if self.memory is None or self.available_gib is None:
            return "unknown"
        return verdict_on(self.memory.total, self.available_gib.value)

    @property
    def alternatives(self) -> list[Alternative]:
        """The nearest settings that fit, the fastest first; empty where it fits, or nothing is
        known."""
        if self.available_gib is None or self.verdict in ("fits", "unknown"):
            return []

        def seconds(setup: Setup) -> float:
            return _step_time(self.request, setup).seconds.low.value

        timed = None if self.step_time is None else seconds
        return find_alternatives(self.setup, self.available_gib.value, step_seconds=timed)


def estimate_run(request: EstimateRequest) -> RunEstimate:
    """Answer `request`. UserError where the run contradicts itself or the target, at the lines of
    the config."""
    target = request.target
    refused = _check(request)
    memory_gib = target.accelerator.memory_gib
    resolved = resolve_setup(
        request.config,
        request.model.spec,
        num_gpus=target.num_gpus,
        gpus_per_node=target.gpus_per_node,
        memory_gib=memory_gib,
        device_type=request.device_type,
        model_config=request.model.config,
    )
    available = None
    missing: list[MissingInput] = []
    if memory_gib is None:
        why = f"the memory of {target.accelerator.name} is not known"
        missing.append(MissingInput("whether it fits", why, "--hardware FILE with its memory_gib"))
    else:
        fact = target.accelerator.fact("memory_gib")
        available = quantity("memory of a GPU", memory_gib, "GiB", "as its driver says", fact)
    memory, timed, run, cost = resolved.memory, None, None, None
    try:
        memory = memory or memory_estimate(resolved.setup)
    except UserError as error:
        missing.append(_missing_by("memory", error))
    try:
        timed = _step_time(request, resolved.setup)
    except UserError as error:
        missing.append(_missing_by("step time, and all that follows from it", error))
    else:
        run = _run_time(request, resolved.setup, timed, missing)
        cost = _cost(request, resolved.setup, timed, run, missing)
    return RunEstimate(
        request=request,
        resolved=resolved,
        memory=memory,
        available_gib=available,
        step_time=timed,
        run_time=run,
        cost=cost,
        quotas=() if target.cluster is None else tuple(quota_needed(target.cluster, request.facts)),
        missing=tuple(missing),
        refusals=tuple(f"{dotted(problem.path)}: {problem.message}" for problem in refused),
        warnings=tuple(dict.fromkeys(_warnings(request, memory, timed, run))),
    )


def _check(request: EstimateRequest) -> list[Problem]:
    """List what the trainer would refuse though it can be estimated; UserError for
    contradictions."""
    config, target = request.config, request.target
    problems = check_run(config, num_ranks=target.num_gpus, has_gpu=request.device_type == "cuda")
    contradictions = [
        problem for problem in problems if problem.path[0] in ("training", "parallelism")
    ]
    device = config.training.device
    if device not in ("auto", request.device_type):
        message = (
            f"found '{device}', but the run is estimated on {target.accelerator.name}; write auto"
        )
        contradictions.append(Problem(("training", "device"), message))
    contradictions += _unknown_adapter_targets(request)
    contradictions += _layers_that_nf4_cannot_hold(request)
    contradictions += _no_layer_for_fp8(request)
    raise_all(contradictions, config._origin.places)
    return list(
        dict.fromkeys(
            [
                *(one for one in problems if one not in contradictions),
                *_gpu_without_fp8(request),
                *_given_config(request),
            ]
        )
    )


def _unknown_adapter_targets(request: EstimateRequest) -> Iterator[Problem]:
    lora = request.config.model.lora
    if lora is None:
        return
    path = ("model", "lora", "target_modules")
    try:
        adapter_parameters(request.model.spec, lora.rank, lora.target_modules)
    except UserError as error:
        yield Problem(path, str(error).replace("\n", "; "))


def _layers_that_nf4_cannot_hold(request: EstimateRequest) -> Iterator[Problem]:
    spec, path = request.model.spec, ("model", "quantization")
    if request.config.model.quantization is None:
        return
    if spec.model_type == "gpt2":
        yield Problem(path, "gpt2 has no linear layer that can be kept in nf4; leave it out")
    tensors = [tensor for block in spec.blocks for tensor in block.tensors if tensor.linear]
    odd = next((tensor for tensor in tensors if tensor.shape[-1] % NF4_BLOCK), None)
    if odd is not None:
        message = (
            f"{odd.name} has {odd.shape[-1]} inputs, and nf4 needs a multiple of {NF4_BLOCK}; leave"
            " it out"
        )
        yield Problem(path, message)


def _no_layer_for_fp8(request: EstimateRequest) -> Iterator[Problem]:
    spec = request.model.spec
    if request.config.training.precision != "fp8" or not spec.blocks:
        return
    if not any(can_be_fp8(spec, tensor) for block in spec.blocks for tensor in block.tensors):
        message = (
            "no layer of this model can compute in fp8: it takes an nn.Linear whose sizes are"
            f" multiples of {FP8_MULTIPLE}; write bf16"
        )
        yield Problem(("training", "precision"), message)


def _gpu_without_fp8(request: EstimateRequest) -> Iterator[Problem]:
    training, gpu = request.config.training, request.target.accelerator
    if training.precision != "fp8" or gpu.compute_capability is None:
        return
    major, _, minor = gpu.compute_capability.partition(".")
    capability = (int(major), int(minor))
    refusal = fp8_refusal(gpu.title, capability, resolve_fp8_scaling(training))
    if refusal is not None:
        yield Problem(("training", "precision"), refusal.replace("\n", "; "))


def _given_config(request: EstimateRequest) -> Iterator[Problem]:
    """List what the trainer would refuse of a config.json that --config gives."""
    content, config = request.model.config, request.config
    if content is None or config.model.config is not None:
        return
    model_type = content.get("model_type")
    if isinstance(model_type, str) and model_type not in ARCHITECTURES:
        name = config.model.id or request.model.source
        yield Problem(("model", "id"), f"{name}: {unsupported_architecture(model_type)}")
    if config.model.init == "pretrained":
        yield from position_problems(
            config.data.sequence_length, content, config.model.id or request.model.source
        )


def _step_time(request: EstimateRequest, setup: Setup) -> StepTime:
    target = request.target
    return step_time(
        setup,
        None if target.made_up else target.machine,
        target.accelerator,
        bandwidths=request.facts.bandwidths,
        without_source=request.without_source,
        calibration=request.calibration,
    )


def _run_time(
    request: EstimateRequest, setup: Setup, timed: StepTime, missing: list[MissingInput]
) -> RunTime | None:
    steps = planned_steps(request.config, setup, request.data_tokens)
    if request.tokens is not None:
        steps = max(1, math.ceil(request.tokens / setup.tokens_per_step))
    if steps is None:
        why = (
            "training.epochs says how long to train, and how many tokens the data have is not known"
        )
        missing.append(
            MissingInput("the length of the run, its cost and its failures", why, "--data-tokens")
        )
        return None
    run = run_time(request.config, setup, request.target, timed.seconds, steps, request.failures)
    missing.extend(run.missing)
    if (
        run.failures
        and request.target.consumption == "spot"
        and request.failures.preemptions_per_node_day is None
    ):
        why = "the nodes are spot, and how often they are taken away is not known"
        missing.append(MissingInput("preemptions", why, "--preemptions-per-node-day"))
    return run


def _cost(
    request: EstimateRequest,
    setup: Setup,
    timed: StepTime,
    run: RunTime | None,
    missing: list[MissingInput],
) -> RunCost | None:
    price = hourly_price(request.target, request.facts, request.price)
    if price is None:
        give = "--price-per-gpu-hour, --price-per-node-hour, or a price in --hardware FILE"
        missing.append(MissingInput("cost", missing_price_reason(request.target), give))
        return None
    return run_cost(
        price, timed.seconds, setup.tokens_per_step, None if run is None else run.longest
    )


def _missing_by(what: str, error: UserError) -> MissingInput:
    """An error's first line as the reason, its second as what to give."""
    why, _, give = str(error).partition("\n")
    return MissingInput(what, why, give)


# Warnings: what was assumed, and settings whose time is in no figure. A setting of the config that
# takes time or money must be in a figure or here, or it would be ignored in silence.


def _warnings(
    request: EstimateRequest,
    memory: MemoryEstimate | None,
    timed: StepTime | None,
    run: RunTime | None,
) -> Iterator[str]:
    """Warnings attached to the estimate, the gravest first; some may be repeated."""
    yield from request.model.spec.notes
    if memory is not None:
        yield from memory.notes
        # Shards are mostly padding where experts are cut over more ranks than there are experts.
        share = memory.state_bytes["padding"] / memory.state_bytes["parameters"]
        if share > MUCH_PADDING:
            yield (
                f"{share:.0%} of each GPU's shard is padding: FSDP2 cuts a tensor along its first"
                " dimension (of experts: their number), and sharding over more ranks than it has"
                " rows saves no memory; the time to send padding is not counted"
            )
    if timed is not None:
        yield from timed.notes
    if run is not None:
        yield from run.warnings
        yield from _on_storage(request)
        yield from _on_time_limit(request, run)
    yield from _not_counted(request.config)


def _on_storage(request: EstimateRequest) -> Iterator[str]:
    """Checkpoints that go to other storage than the one whose bandwidth is taken."""
    target, storage = request.target, request.target.machine.storage
    if request.failures.storage_gb_per_s or storage is None:
        return
    directory = None if target.cluster is None else target.cluster.storage.directory
    if directory is not None:
        yield (
            f"the bandwidth of storage.directory {directory} is not known, and that of"
            f" {storage.kind} is taken; give --storage-gb-per-s"
        )
    elif storage.kind == "ebs" and target.num_nodes > 1:
        yield (
            f"storage is taken as {target.num_nodes} x {storage.per_node_gb_per_s:g} GB/s, each"
            " node's own volumes; a shared file system (FSx for Lustre, EFS) scales with its size"
            " instead: give --storage-gb-per-s"
        )


def _on_time_limit(request: EstimateRequest, run: RunTime) -> Iterator[str]:
    """A job's time limit that is shorter than the run."""
    cluster = request.target.cluster
    limit = None if cluster is None else cluster.section.limit_seconds
    longest = run.longest.high.value
    if cluster is not None and limit is not None and limit < longest:
        yield (
            f"{cluster.platform}.time_limit: a job ends after {rounded_duration(limit)}, and the"
            f" run may take {rounded_duration(longest)}: it then goes on in another job from its"
            " last checkpoint, whose wait and start are not counted"
        )


def _not_counted(config: RunConfig) -> Iterator[str]:
    """Settings that take time which is in no figure."""
    if (every_steps := config.evaluation.every_steps) is not None:
        yield (
            f"evaluation.every_steps: the time of evaluating every {every_steps} steps is not"
            " counted"
        )
    if not config.data.packing:
        yield (
            "data.packing: false: padding counts as tokens here, and how much of it there is is not"
            " known"
        )
    if config.training.deterministic:
        yield (
            "training.deterministic: measured runs are not, and what it costs in speed is not"
            " counted"
        )
