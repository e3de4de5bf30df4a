"""The learning rate as a pure function of the step: resuming needs nothing but the step number."""

from __future__ import annotations

import math

from drillyard.config.checks import resolve_decay_steps
from drillyard.config.run import ScheduleConfig


def learning_rate(step: int, *, peak: float, total_steps: int, schedule: ScheduleConfig) -> float:
    """Learning rate of optimizer step `step` (0-based) of `total_steps`.

    Warmup rises linearly and reaches the peak in its last step; the shapes then fall to `final_fraction` of the peak,
    which the last step would reach if there were one more (as in PyTorch's and transformers' schedules).
    """
    warmup = schedule.warmup_steps
    if step < warmup:
        return peak * (step + 1) / warmup
    floor = schedule.final_fraction
    if schedule.name == "constant":
        return peak
    if schedule.name == "warmup-stable-decay":
        decay = resolve_decay_steps(schedule, total_steps)
        progress = max(0.0, (step - (total_steps - decay)) / decay)
        return peak * (1.0 - (1.0 - floor) * min(1.0, progress))
    progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    if schedule.name == "linear":
        return peak * (1.0 - (1.0 - floor) * progress)
    return peak * (floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * progress)))
