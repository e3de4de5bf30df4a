"""How a function of the trainer is replaced from outside, and loudly where it has ceased to exist."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any


def find_attribute(module: str, name: str) -> tuple[Any, str, Any]:
    """The owner, the last part of the name and the value of `name` (or `Class.name`) of a module.

    Raises AttributeError where it is not there any more.
    """
    owner: Any = importlib.import_module(module)
    *parents, last = name.split(".")
    try:
        for parent in parents:
            owner = getattr(owner, parent)
        return owner, last, getattr(owner, last)
    except AttributeError:
        raise AttributeError(f"fault injection replaces {module}.{name}, which is not there any more") from None


def patch_function(module: str, name: str, make: Callable[[Any], Any]) -> None:
    """Put `make(the function)` in place of a function of a module."""
    owner, last, original = find_attribute(module, name)
    setattr(owner, last, make(original))


def step_of(checkpoint: Path) -> int:
    """The step in the name of a checkpoint's directory."""
    return int(checkpoint.name.rpartition("-")[2])
