"""Import of torch and what is built on it: most of the start of a command or rank that computes."""

from __future__ import annotations

import atexit
import gc
import importlib
import logging
import sys
from typing import Any, cast


def import_without_collection(module: str) -> None:
    """Import `module` without garbage collection, which takes a sixth of the time for torch and
    transformers.

    What was imported stays, so later collections leave it out: a full one took a third of a second
    for it. transformers imports torchao where it finds it, a tenth of the time, for models that are
    stored in torchao's formats, which are not trained; what trains with torchao imports it itself.
    """
    gc.disable()
    is_hidden = sys.modules.setdefault("torchao", cast(Any, None)) is None
    try:
        importlib.import_module(module)
        gc.freeze()
        # At its end the interpreter collects them after all, or libraries report what they find
        # still in use.
        atexit.register(gc.unfreeze)
    finally:
        gc.enable()
        if is_hidden:
            sys.modules.pop("torchao", None)


def hide_warnings_of_imports() -> None:
    """Hide what a user cannot change: torch 2.15 warns of how torchao 0.18 registers its
    enumerations."""
    logging.getLogger("torch.utils._pytree").addFilter(_is_for_the_user)


def _is_for_the_user(record: logging.LogRecord) -> bool:
    return "register_constant() on Enum subclasses" not in record.getMessage()
