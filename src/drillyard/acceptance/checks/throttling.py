"""Reasons for which each GPU runs below its clocks, and how far it is from its thermal limit."""

from __future__ import annotations

from collections.abc import Iterator

from drillyard.acceptance.check import Check, Expected, Level
from drillyard.acceptance.evidence import AcceptanceEvidence
from drillyard.acceptance.gpu_evidence import GpuFinding, NodeGpus, judge_gpus, unreadable
from drillyard.acceptance.parsers.nvidia_smi import Gpu
from drillyard.acceptance.results import CheckResult, Status

_COOLING = "check fans, airflow and heat sink of the node"
_REASONS = {
    "throttle.hw_thermal_slowdown": ("it is too hot (hardware)", _COOLING),
    "throttle.hw_power_brake_slowdown": (
        "its power supply asks for less",
        "check the power supply",
    ),
    "throttle.hw_slowdown": ("of heat or power (hardware)", "check cooling and the power supply"),
    "throttle.sw_thermal_slowdown": ("it is too hot (driver)", _COOLING),
    "throttle.sync_boost": (
        "it is tied to a slower GPU",
        "end sync boost (nvidia-smi boost-slider)",
    ),
}
"""Not faults: idle, the power cap under full load, set clocks. Azure/azurehpc-health-checks."""


def judge(evidence: AcceptanceEvidence, expected: Expected) -> Iterator[CheckResult]:
    """One result per GPU that is slowed, else one per node."""
    keys = ("throttle.hw_slowdown", "throttle.sw_thermal_slowdown")
    return judge_gpus(CHECK, evidence, expected, _judge_gpu, "no slowdown is active", keys)


def _judge_gpu(gpu: Gpu, node: NodeGpus) -> GpuFinding:
    if not any(gpu.has_value(key) for key in _REASONS):
        return GpuFinding(Status.skipped, "the driver shows no reasons")
    for key, (why, action) in _REASONS.items():
        active = gpu.flag(key)
        if active is None and gpu.has_value(key):
            return unreadable(gpu, key)
        if active:
            more = {"metric": key.partition(".")[2], "action": action}
            return GpuFinding(Status.fail, f"is slowed down: {why}", "active", more)
    margin = _margin(gpu)
    if margin is not None and margin <= 0:
        more = {"metric": "temperature margin", "unit": "C", "action": _COOLING}
        return GpuFinding(Status.fail, "has reached the temperature that slows it", margin, more)
    return GpuFinding(Status.passed, "")


def _margin(gpu: Gpu) -> float | None:
    """Degrees below the slowdown: since Hopper the driver gives them, before it the limit."""
    if (margin := gpu.number("temperature.margin")) is not None:
        return margin
    now, limit = gpu.number("temperature"), gpu.number("temperature.slowdown")
    return None if now is None or limit is None else limit - now


CHECK = Check(
    name="throttling",
    title="Slowdown and temperature",
    level=Level.quick,
    probes=("accelerators",),
    seconds=1,
    measures="active reasons for lower clocks, and degrees below the slowdown temperature",
    how="nvidia-smi -q: clocks event reasons, temperature",
    evidence="the reasons of every GPU",
    references="no hardware, thermal or power-brake slowdown; more than 0 degrees of margin",
    meaning="the GPU is slower than the others, and all wait for it",
    action=_COOLING,
    judge=judge,
)
