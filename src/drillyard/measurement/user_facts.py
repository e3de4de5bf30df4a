"""What the user says beside the log (every flag of `drillyard metrics` that is a fact), and what is still missing.

A flag goes before the log. Where both say something and differ, the figure follows the flag and a warning names the
line. What neither says is never guessed: the figures that need it are None and `Missing` names the flag to give.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path
from typing import NamedTuple

from drillyard.errors import UserError
from drillyard.modelspec import FORMULAS, Formula


class Missing(NamedTuple):
    """A figure (by its name in the JSON) that cannot be had, why not, and which flags would give it, if any."""

    field: str
    flags: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UserFacts:
    """The flags. Batch sizes are sequences per optimizer step; prices are US dollars; times are UTC microseconds."""

    accelerator: str | None = None
    num_gpus: int | None = None
    gpus_per_node: int | None = None
    params: int | None = None
    active_params: int | None = None
    config: Path | None = None
    batch_size_per_gpu: int | None = None
    global_batch_size: int | None = None
    sequence_length: int | None = None
    precision: str | None = None
    formula: Formula | None = None
    price_per_gpu_hour: float | None = None
    price_per_node_hour: float | None = None
    start_step: int | None = None
    end_step: int | None = None
    job_start_us: int | None = None
    job_end_us: int | None = None

    def __post_init__(self) -> None:
        for name in ("num_gpus", "gpus_per_node", "batch_size_per_gpu", "global_batch_size", "sequence_length"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"--{name.replace('_', '-')} {value}: give a number above 0.")
        for name in ("price_per_gpu_hour", "price_per_node_hour"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise UserError(f"--{name.replace('_', '-')} {value:g}: give dollars above 0.")
        if self.price_per_gpu_hour is not None and self.price_per_node_hour is not None:
            raise UserError("a price is per GPU-hour or per node-hour: give one of them.")
        if self.active_params is not None and self.params is None:
            raise UserError("--active-params says how many of the parameters a token uses: give --params too.")
        if self.params is not None and self.config is not None:
            raise UserError("--params stands for a model whose config is not at hand; give it or --config, not both.")
        if None not in (self.start_step, self.end_step) and (self.start_step or 0) > (self.end_step or 0):
            raise UserError(f"--start-step {self.start_step} is after --end-step {self.end_step}.")


def moment_us(flag: str, text: str | None, zone: tzinfo | None) -> int | None:
    """A time of day such as `2026-01-31T12:00:00Z` as UTC microseconds since 1970; without an offset it is in `zone`
    (UTC if None). UserError for anything else."""
    if text is None:
        return None
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise UserError(f"{flag} {text}: not a time; write it like 2026-01-31T12:00:00Z.") from error
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=zone or UTC)
    return (moment - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)


def to_formula(name: str | None) -> Formula | None:
    """The formula of this name, in any case. UserError for one that is not known."""
    if name is None:
        return None
    found = next((formula for formula in FORMULAS if formula.lower() == name.lower()), None)
    if found is None:
        raise UserError(f"--formula {name}: not known; choose one of {', '.join(FORMULAS)}.")
    return found
