"""Log formats: how step lines look, and what else a log says about a run. This file lists them by
name.

A plug-in whose attributes have a wrong type, or that fails on a line that is its anchor alone, is
left out when it is loaded. One whose code fails later, while a log is read, ends the command with a
UserError that names it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, Final

from drillyard.errors import UserError
from drillyard.measurement.formats.dllogger import DLLogger
from drillyard.measurement.formats.drillyard import Drillyard, PerfLogger
from drillyard.measurement.formats.hf_trainer import HfTrainer
from drillyard.measurement.formats.hf_trainer_state import HfTrainerState
from drillyard.measurement.formats.line_rules import RuleSearch
from drillyard.measurement.formats.log_format import (
    DocumentFormat,
    LogFormat,
    ParsedDocument,
    StepPattern,
    TextFormat,
)
from drillyard.measurement.formats.maxtext import MaxText
from drillyard.measurement.formats.megatron import Megatron
from drillyard.measurement.formats.nanogpt import LitGpt, NanoGpt
from drillyard.measurement.formats.nemo import NeMo1, NeMo2
from drillyard.measurement.formats.olmo_core import OlmoCore
from drillyard.measurement.formats.tensorboard import TensorBoardEvents
from drillyard.measurement.formats.torchtitan import TorchTitan
from drillyard.measurement.formats.torchtune import TorchTune, TorchTuneBars
from drillyard.measurement.formats.trainer_jsonl import LlamaFactory, MsSwift
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
    NanoGpt,
    LitGpt,
    OlmoCore,
    NeMo2,
    HfTrainerState,
    LlamaFactory,
    MsSwift,
    TensorBoardEvents,
    HfTrainer,
    NeMo1,
    TorchTuneBars,
)


@cache
def log_formats() -> dict[str, type[LogFormat]]:
    """All formats by name, in order of preference. A plug-in that cannot be used is left out with a
    line on stderr."""
    formats = {kind.name: kind for kind in BUILT_IN}
    base = "drillyard.measurement.formats.log_format:LogFormat"
    for name, kind in load_plugins(GROUP, base, tuple(formats), _why_unusable).items():
        formats[name] = type(kind.__name__, (kind,), {"name": name, **_guarded(name, kind)})
    return dict(sorted(formats.items(), key=lambda item: item[1].preference))


def format_title(name: str | None, unknown: str) -> str:
    """The title of a format; `unknown` for None."""
    return unknown if name is None else log_formats()[name].title


def _why_unusable(name: str, kind: Any) -> str | None:
    """Describe what is wrong with the format of a plug-in, or None. Errors of its code are
    raised."""
    types = {"title": str, "preference": int, "windowed": bool, "clock_restarts": bool}
    if issubclass(kind, TextFormat):
        types |= {"anchor": bytes, "longest": int, "rules": Sequence}
    elif not issubclass(kind, DocumentFormat):
        return "it extends neither TextFormat nor DocumentFormat"
    for attribute, wanted in types.items():
        if not isinstance(value := getattr(kind, attribute), wanted):
            return f"{attribute} is {value!r}; needed is {wanted.__name__}"
    reader = kind()
    if isinstance(reader, TextFormat):
        RuleSearch(kind.rules)
        _require(reader.facts, dict)
        _require(reader.step_pattern(kind.anchor), StepPattern | None)
    else:
        kind.matches(b"")
    return None


def _require(value: Any, wanted: Any) -> None:
    if not isinstance(value, wanted):
        raise TypeError(f"found {value!r}; needed is {getattr(wanted, '__name__', wanted)}")


def _checked_decode(decode: Callable[..., Columns]) -> Callable[..., Columns]:
    def checked(groups: Sequence[Values], place: MatchedLines) -> Columns:
        columns, known, shape = decode(groups, place), COLUMN_DEFAULTS | RUNNING, (place.count,)
        if wrong := [
            name for name in ("step", *columns) if name not in known or columns[name].shape != shape
        ]:
            raise TypeError(
                f"these columns are not known, or no arrays of shape {shape}: {', '.join(wrong)}"
            )
        return columns

    return checked


def _guarded(name: str, kind: type[LogFormat]) -> dict[str, Any]:
    """Replacements for the attributes of a plug-in, so that an exception of its code is a UserError
    that names it."""

    def guard(
        call: Callable[..., Any], *passed: type[Exception], returns: Any = object
    ) -> Callable[..., Any]:
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
                    f"{plugin_title(GROUP, name)} cannot read this log: {type(error).__name__}:"
                    f" {error}\nuninstall that distribution, or name the log's format: --framework"
                    " NAME"
                ) from error

        return guarded

    if issubclass(kind, DocumentFormat):
        return {
            "matches": staticmethod(guard(kind.matches)),
            "read": guard(kind.read, returns=ParsedDocument),
        }
    assert issubclass(kind, TextFormat)
    return {
        # A value that is no number is a damaged line: ValueError.
        "rules": tuple(replace(rule, action=guard(rule.action, ValueError)) for rule in kind.rules),
        "step_pattern": guard(kind.step_pattern, returns=StepPattern | None),
        "end_block": guard(kind.end_block),
        "finish_lane": guard(kind.finish_lane),
    }
