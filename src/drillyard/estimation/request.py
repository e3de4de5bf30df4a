"""What an estimate is asked: the run, its model and where it is to be, in one value that `predict` answers.

It is made of a command's options by `asking`; variations of it (`--sweep`) are `replace`d fields.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from drillyard.config import RunConfig
from drillyard.estimation.cost import PriceOptions
from drillyard.estimation.measured_runs import MeasuredRun
from drillyard.estimation.model_source import ModelSource
from drillyard.estimation.run_time import FailureOptions
from drillyard.estimation.target import Target
from drillyard.hardware import Catalog

DeviceType = Literal["cuda", "cpu"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimateRequest:
    """What is asked: a run, its model, where it is to be, and what the user knows better than the catalog.

    `without_source` leaves out measured rows of one source, to predict a published run without itself. `calibration` is
    a run of the user's own, taken instead of the measured rows. `data_tokens`: tokens of one epoch. `tokens`: a length
    of the run that stands for the config's.
    """

    config: RunConfig
    model: ModelSource
    place: Target
    facts: Catalog
    price: PriceOptions = field(default_factory=PriceOptions)
    failures: FailureOptions = field(default_factory=FailureOptions)
    data_tokens: float | None = None
    tokens: float | None = None
    without_source: str | None = None
    calibration: MeasuredRun | None = None

    @property
    def device_type(self) -> DeviceType:
        return "cpu" if self.place.accelerator.name == "cpu" else "cuda"
