"""Predictions, simulations and sweeps as plain values for JSON, in the form that `document.py` describes."""

from __future__ import annotations

from typing import Any

from drillyard.estimation.alternatives import Alternative
from drillyard.estimation.confidence import SampleStatistics
from drillyard.estimation.failure_estimate import GOODPUT_NAME
from drillyard.estimation.quantity import Quantity, Range, quantity
from drillyard.estimation.run_estimate import RunEstimate
from drillyard.estimation.run_time import FailureEstimateRange
from drillyard.estimation.simulated_run import SimulatedRun
from drillyard.estimation.sweep import SweepEstimate, SweepResult, geometric_mean
from drillyard.modelspec import adapter_parameters

VERSION = 1


def prediction_json(prediction: RunEstimate, simulated: SimulatedRun | None = None) -> dict[str, Any]:
    """A prediction, in full."""
    question, setup = prediction.question, prediction.setup
    return {
        "version": VERSION,
        "kind": "estimate",
        "run": question.config.name,
        "verdict": prediction.verdict,
        "train_refuses": list(prediction.refusals),
        "model": _model(prediction),
        "place": _place(prediction),
        "setup": {
            "precision": setup.precision,
            "sequence_length": setup.sequence_length,
            "micro_batch_size": setup.micro_batch_size,
            "gradient_accumulation": setup.gradient_accumulation,
            "activation_checkpointing": setup.activation_checkpointing,
            "shard": setup.shard,
            "replicate": setup.replicate,
            "attention": setup.kernel,
            "compiled": setup.compiled,
            "loss_chunk_tokens": setup.loss_chunk_tokens,
            "tokens_per_step": setup.tokens_per_step,
        },
        "decisions": [
            {"setting": one.key, "value": one.value, "reason": one.reason} for one in prediction.resolved.decisions
        ],
        "memory": _memory(prediction),
        "step_time": _step_time(prediction),
        "run_time": _run(prediction),
        "cost": _cost(prediction),
        "quotas": [
            {
                "metric": quota.metric,
                "region": quota.region,
                "amount": quota.amount,
                "unit": quota.unit,
                "reason": quota.reason,
                "dimensions": dict(quota.dimensions),
                "source": quota.source.text,
            }
            for quota in prediction.quotas
        ],
        "simulation": None if simulated is None else _simulated(simulated),
        "missing": [{"what": one.what, "why": one.why, "give": one.give} for one in prediction.missing],
        "warnings": list(prediction.warnings),
    }


def sweep_json(swept: SweepResult, run: str) -> dict[str, Any]:
    """A sweep, all of its points in the order of its axes."""
    return {
        "version": VERSION,
        "kind": "sweep",
        "run": run,
        "axes": {axis.key: list(axis.values) for axis in swept.axes},
        "tokens": swept.tokens,
        "cost_unit": swept.cost_unit,
        "with_failures": swept.with_failures,
        "points": [_point(point) for point in swept.points],
    }


def _model(prediction: RunEstimate) -> dict[str, Any]:
    spec, adapters = prediction.setup.spec, prediction.setup.adapters
    return {
        "source": prediction.question.model.source,
        "model_type": spec.model_type,
        "parameters": spec.total_parameters,
        "active_parameters": spec.active_parameters,
        "adapter_parameters": (None if adapters is None else adapter_parameters(spec, adapters.rank, adapters.targets)),
    }


def _place(prediction: RunEstimate) -> dict[str, Any]:
    place = prediction.question.place
    return {
        "machine": None if place.made_up else place.machine.name,
        "accelerator": place.accelerator.name,
        "nodes": place.num_nodes,
        "gpus": place.num_gpus,
        "gpus_per_node": place.gpus_per_node,
        "consumption": place.consumption,
        "region": place.region,
    }


def _memory(prediction: RunEstimate) -> dict[str, Any] | None:
    memory, available = prediction.memory, prediction.available_gib
    if memory is None:
        return None
    known = (
        None
        if available is None
        else quantity("memory of a GPU", available.value, "GiB", "as its driver says", available)
    )
    return {
        "total_gib": _range(memory.total),
        "available_gib": None if known is None else known.as_json(),
        "peak_at": memory.peak_at,
        "parts_gib": [_range(part) for part in memory.parts],
        "alternatives": [_change(change) for change in prediction.alternatives()],
    }


def _change(change: Alternative) -> dict[str, Any]:
    return {
        "settings": dict(change.settings),
        "gpus": change.num_gpus,
        "memory_gib": change.memory_gib,
        "costs": change.costs,
        "keeps_training": change.keeps_training,
    }


def _step_time(prediction: RunEstimate) -> dict[str, Any] | None:
    timed = prediction.speed
    if timed is None:
        return None
    detail = timed.detail
    bounds = (detail.compute, detail.memory, detail.activations, detail.communication)
    return {
        "formula": detail.formula,
        "basis": detail.basis,
        "seconds": _range(timed.seconds),
        "tokens_per_second_per_gpu": _range(timed.tokens_per_second_per_gpu),
        "tflops_per_gpu": _range(timed.tflops_per_gpu),
        "mfu": None if timed.mfu is None else _range(timed.mfu),
        "bounds": [bound.as_json() for bound in bounds if bound is not None],
        "measured_rows": [{**used.row.as_json(), "efficiency": used.efficiency} for used in detail.rows],
    }


def _run(prediction: RunEstimate) -> dict[str, Any] | None:
    run, hours = prediction.run, prediction.gpu_hours
    if run is None or hours is None:
        return None
    return {
        "steps": run.steps,
        "tokens": run.tokens,
        "seconds_without_failures": _range(run.failure_free),
        "wall_seconds": None if run.wall is None else _range(run.wall),
        "gpu_hours": _range(hours),
        "saves": run.saves,
        "failures": [_outlook(outlook) for outlook in run.outlooks],
    }


def _outlook(outlook: FailureEstimateRange) -> dict[str, Any]:
    def both(name: str) -> dict[str, Any]:
        low, high = sorted((outlook.fast.term(name), outlook.slow.term(name)), key=lambda one: one.value)
        return _range(Range(low, high))

    best = outlook.best or outlook.fast
    return {
        "rate": outlook.rate.name,
        "failures_per_1000_node_days": outlook.rate.rate.value,
        "interruptions": both("expected interruptions"),
        "checkpoint_interval_steps": both("interval in steps"),
        "best_interval_steps": float(best.schedule.interval_steps),
        "goodput": both(GOODPUT_NAME),
        "wall_seconds": both("expected wall time"),
        "left_out": list(outlook.fast.left_out),
        "terms": [one.as_json() for one in outlook.fast.terms],
    }


def _cost(prediction: RunEstimate) -> dict[str, Any] | None:
    cost = prediction.cost
    if cost is None:
        return None
    return {
        "bought": cost.price.bought,
        "usd_per_gpu_hour": cost.price.of_gpu.as_json(),
        "usd_per_node_hour": cost.price.of_node.as_json(),
        "usd_per_hour": cost.price.of_all.as_json(),
        "usd_per_step": _range(cost.of_step),
        "usd_per_million_tokens": _range(cost.of_million_tokens),
        "usd_per_run": None if cost.of_run is None else _range(cost.of_run),
    }


def _simulated(simulated: SimulatedRun) -> dict[str, Any]:
    simulation = simulated.simulation
    return {
        "rate": simulated.rate,
        "seed": simulation.seed,
        "replicas": len(simulation.outcomes),
        "no_failure_share": simulation.scenario.no_failure_share,
        "goodput": _spread(simulation.goodput),
        "wall_seconds": _spread(simulation.wall_seconds),
        "interruptions_per_day": _spread(simulation.failures_per_day),
        "unverified": simulated.unverified,
        "intervals": [
            {
                "interval_steps": choice.interval_steps,
                "expected_goodput": choice.goodput,
                "goodput": _spread(choice.simulation.goodput),
                "as_good_as_the_best": choice.as_good,
            }
            for choice in simulated.intervals
        ],
        "spares": [
            {
                "spares": choice.spares,
                "node_hours": choice.node_hours,
                "usd": choice.usd,
                "goodput": _spread(choice.simulation.goodput),
                "replicas_that_wait": choice.simulation.waits,
                "as_good_as_the_best": choice.as_good,
            }
            for choice in simulated.spares
        ],
    }


def _point(point: SweepEstimate) -> dict[str, Any]:
    one = point.prediction
    timed = None if one is None else one.speed
    mfu = None if timed is None else timed.mfu
    return {
        "values": dict(point.values),
        "refusal": point.refusal,
        "train_refuses": [] if one is None else list(one.refusals),
        "verdict": None if one is None else one.verdict,
        "on_front": point.on_front,
        "is_bound": point.is_bound,
        "hours": point.hours,
        "cost": point.cost,
        "gpus": None if one is None else one.question.place.num_gpus,
        "activation_checkpointing": None if one is None else one.setup.activation_checkpointing,
        "memory_gib": None if one is None or one.memory is None else one.memory.total.high.value,
        "step_seconds_low": None if timed is None else timed.seconds.low.value,
        "step_seconds_high": None if timed is None else timed.seconds.high.value,
        "unverified": point.unverified,
        "tokens_per_second_per_gpu": None if timed is None else geometric_mean(timed.tokens_per_second_per_gpu),
        "mfu": None if mfu is None else geometric_mean(mfu),
    }


def _range(one: Quantity | Range) -> dict[str, Any]:
    both = one if isinstance(one, Range) else Range(one, one)
    return {"low": both.low.as_json(), "high": both.high.as_json(), "is_bound": both.is_bound}


def _spread(spread: SampleStatistics) -> dict[str, Any]:
    return {
        "mean": spread.mean,
        "low": spread.low,
        "high": spread.high,
        "percentile_5": spread.percentile_5,
        "percentile_95": spread.percentile_95,
    }
