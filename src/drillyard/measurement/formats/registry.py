"""All formats, in the order in which they are preferred where the same run was logged in several."""

from __future__ import annotations

from typing import Final

from drillyard.measurement.formats import hf_trainer_state, tensorboard
from drillyard.measurement.formats.dllogger import DLLogger
from drillyard.measurement.formats.drillyard import Drillyard
from drillyard.measurement.formats.hf_trainer import HfTrainer
from drillyard.measurement.formats.maxtext import MaxText
from drillyard.measurement.formats.megatron import Megatron
from drillyard.measurement.formats.nemo1 import NeMo1
from drillyard.measurement.formats.nemo2 import NeMo2
from drillyard.measurement.formats.perflogger import PerfLogger
from drillyard.measurement.formats.text_format import TextFormat
from drillyard.measurement.formats.torchtitan import TorchTitan
from drillyard.measurement.formats.torchtune import TorchTune

TEXT_FORMATS: Final[tuple[type[TextFormat], ...]] = (
    Drillyard,
    DLLogger,
    Megatron,
    TorchTitan,
    TorchTune,
    MaxText,
    PerfLogger,
    NeMo2,
    HfTrainer,
    NeMo1,
)

PREFERENCE: Final = (
    "drillyard",
    "dllogger",
    "megatron",
    "torchtitan",
    "torchtune",
    "maxtext",
    "perflogger",
    "nemo2",
    hf_trainer_state.NAME,
    tensorboard.NAME,
    "hf_trainer",
    "nemo1",
)
"""Full precision and times of their own first, progress bars last."""

WINDOWED: Final = frozenset({"megatron", "torchtitan", "hf_trainer", hf_trainer_state.NAME})
"""Formats whose lines are means over the steps since the line before."""

CLOCK_OF_START: Final = frozenset({"dllogger", "hf_trainer"})
"""Formats whose `elapsed_seconds` begin anew with each start of the ranks, and only then (NeMo 1: with each epoch)."""
