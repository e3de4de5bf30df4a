"""Drillyard: LLM training runs on GPU clusters, from two YAML files to a trained, measured model.

    from drillyard import estimate, submit, measure, report

`__all__` and `drillyard.errors` are the public API, which follows semantic versioning
(CHANGELOG.md). The modules that plug-ins extend (docs/api.md) may change in a minor release; every
other module is private and may change in any. `import drillyard` imports only the version: a name
is loaded when it is first used, torch only by code that computes.
"""

from __future__ import annotations

from drillyard.version import __version__ as __version__

# Not from typing: the command handles Ctrl-C only after this module, which therefore loads nothing.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from drillyard import hardware
    from drillyard.api import estimate, logs, measure, plan, report, status, submit, train
    from drillyard.config.load import load_run_config
    from drillyard.errors import UserError

__all__ = [
    "UserError",
    "estimate",
    "hardware",
    "load_run_config",
    "logs",
    "measure",
    "plan",
    "report",
    "status",
    "submit",
    "train",
]

_MODULES = {"UserError": "drillyard.errors", "load_run_config": "drillyard.config.load"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    if name == "hardware":
        return importlib.import_module("drillyard.hardware")
    return getattr(importlib.import_module(_MODULES.get(name, "drillyard.api")), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
