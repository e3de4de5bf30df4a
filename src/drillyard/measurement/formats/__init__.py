"""Log formats: how step lines look, and what else a log says about a run. This file lists them by name."""

from __future__ import annotations

from functools import cache
from typing import Final

from drillyard.measurement.formats.dllogger import DLLogger
from drillyard.measurement.formats.drillyard import Drillyard, PerfLogger
from drillyard.measurement.formats.hf_trainer import HfTrainer
from drillyard.measurement.formats.hf_trainer_state import HfTrainerState
from drillyard.measurement.formats.log_format import LogFormat
from drillyard.measurement.formats.maxtext import MaxText
from drillyard.measurement.formats.megatron import Megatron
from drillyard.measurement.formats.nemo import NeMo1, NeMo2
from drillyard.measurement.formats.tensorboard import TensorBoardEvents
from drillyard.measurement.formats.torchtitan import TorchTitan
from drillyard.measurement.formats.torchtune import TorchTune
from drillyard.plugins import load_plugins

GROUP: Final = "drillyard.log_formats"
BUILT_IN: Final[tuple[type[LogFormat], ...]] = (
    Drillyard,
    DLLogger,
    Megatron,
    TorchTitan,
    TorchTune,
    MaxText,
    PerfLogger,
    NeMo2,
    HfTrainerState,
    TensorBoardEvents,
    HfTrainer,
    NeMo1,
)


@cache
def log_formats() -> dict[str, type[LogFormat]]:
    """All formats by name, in order of preference. A plug-in that cannot be used is left out with a line on stderr."""
    formats = {kind.name: kind for kind in BUILT_IN}
    for name, kind in load_plugins(GROUP, "drillyard.measurement.formats.log_format:LogFormat", tuple(formats)).items():
        formats[name] = kind if kind.name == name else type(kind.__name__, (kind,), {"name": name})
    return dict(sorted(formats.items(), key=lambda item: item[1].preference))


def format_title(name: str | None, unknown: str) -> str:
    """The title of a format; `unknown` for None."""
    return unknown if name is None else log_formats()[name].title
