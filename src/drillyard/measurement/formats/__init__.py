"""Log formats: how step lines look, and what else a log says about a run. This file lists them by name.

A plug-in whose attributes have a wrong type, or that fails on a line that is its anchor alone, is left out when it is
loaded. One whose code fails later, while a log is read, ends the command with a UserError that names it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, Final

import numpy as np

from drillyard.errors import UserError
from drillyard.measurement.formats.dllogger import DLLogger
from drillyard.measurement.formats.drillyard import Drillyard, PerfLogger
from drillyard.measurement.formats.hf_trainer import HfTrainer
from drillyard.measurement.formats.hf_trainer_state import HfTrainerState
from drillyard.measurement.formats.line_rules import LineRule, RuleSearch
from drillyard.measurement.formats.log_format import DocumentFormat, LogFormat, ParsedDocument, StepPattern, TextFormat
from drillyard.measurement.formats.maxtext import MaxText
from drillyard.measurement.formats.megatron import Megatron
from drillyard.measurement.formats.nemo import NeMo1, NeMo2
from drillyard.measurement.formats.tensorboard import TensorBoardEvents
from drillyard.measurement.formats.torchtitan import TorchTitan
from drillyard.measurement.formats.torchtune import TorchTune
from drillyard.measurement.formats.values import Columns, MatchedLines, Values
from drillyard.measurement.lanes import RUNNING
from drillyard.measurement.parsed_log import COLUMN_DEFAULTS
from drillyard.plugins import load_plugins, plugin_title

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
    base = "drillyard.measurement.formats.log_format:LogFormat"
    for name, kind in load_plugins(GROUP, base, tuple(formats), _why_unusable).items():
        formats[name] = type(kind.__name__, (kind,), {"name": name, **_guarded(name, kind)})
    return dict(sorted(formats.items(), key=lambda item: item[1].preference))


def format_title(name: str | None, unknown: str) -> str:
    """The title of a format; `unknown` for None."""
    return unknown if name is None else log_formats()[name].title


_ATTRIBUTES: Final[dict[str, type]] = {"title": str, "preference": int, "windowed": bool, "clock_restarts": bool}
_TEXT_ATTRIBUTES: Final[dict[str, type]] = {"anchor": bytes, "longest": int, "rules": Sequence}


def _why_unusable(name: str, kind: Any) -> str | None:
    """What is wrong with the format of a plug-in, or None. Errors of its code are raised."""
    is_text = issubclass(kind, TextFormat)
    if not (is_text or issubclass(kind, DocumentFormat)):
        return "it extends neither TextFormat nor DocumentFormat"
    for attribute, wanted in {**_ATTRIBUTES, **(_TEXT_ATTRIBUTES if is_text else {})}.items():
        if not isinstance(value := getattr(kind, attribute), wanted):
            return f"{attribute} is {value!r}; needed is {wanted.__name__}"
    if not is_text:
        kind.matches(b"")
        return None
    for rule in kind.rules:
        if not isinstance(rule, LineRule) or not rule.literal or not callable(rule.action):
            return f"rules have {rule!r}, which is no LineRule with a literal and an action"
    RuleSearch(kind.rules)
    reader = kind()
    if not (isinstance(reader.facts, dict) and isinstance(reader.warnings, list)):
        return "facts is no dict, or warnings is no list"
    _require(reader.step_pattern(kind.anchor), StepPattern | None)
    return None


def _require(returned: Any, wanted: Any) -> None:
    if not isinstance(returned, wanted):
        raise TypeError(f"{returned!r} is returned; needed is {getattr(wanted, '__name__', wanted)}")


def _checked_decode(decode: Callable[..., Columns]) -> Callable[..., Columns]:
    def checked(groups: Sequence[Values], place: MatchedLines) -> Columns:
        columns = decode(groups, place)
        for name, column in columns.items():
            if name not in (COLUMN_DEFAULTS | RUNNING):
                raise KeyError(f"there is no column {name}")
            _require(column, np.ndarray)
            if column.shape != (place.count,):
                raise TypeError(f"column {name} has shape {column.shape}; needed is {(place.count,)}")
        if "step" not in columns:
            raise KeyError("there is no column step")
        return columns

    return checked


def _guarded(name: str, kind: type[LogFormat]) -> dict[str, Any]:
    """What replaces the attributes of a plug-in, so that an exception of its code is a UserError that names it."""

    def guard(call: Callable[..., Any], *passed: type[Exception], returns: Any = object) -> Callable[..., Any]:
        passes: tuple[type[Exception], ...] = (UserError, OSError, *passed)

        def guarded(*arguments: Any) -> Any:
            try:
                returned = call(*arguments)
                _require(returned, returns)
                if isinstance(returned, StepPattern):
                    re.compile(returned.pattern)
                    decode = guard(_checked_decode(returned.decode), ValueError, OverflowError)
                    return replace(returned, decode=decode)
                return returned
            except passes:
                raise
            except Exception as error:
                raise UserError(
                    f"{plugin_title(GROUP, name)} cannot read this log: {type(error).__name__}: {error}\n"
                    "uninstall that distribution, or name the log's format: --framework NAME"
                ) from error

        return guarded

    if issubclass(kind, DocumentFormat):
        return {"matches": staticmethod(guard(kind.matches)), "read": guard(kind.read, returns=ParsedDocument)}
    assert issubclass(kind, TextFormat)
    return {
        # A value that is no number is a damaged line: ValueError.
        "rules": tuple(replace(rule, action=guard(rule.action, ValueError)) for rule in kind.rules),
        "step_pattern": guard(kind.step_pattern, returns=StepPattern | None),
        "end_block": guard(kind.end_block),
        "finish_lane": guard(kind.finish_lane),
    }
