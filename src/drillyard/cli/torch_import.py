"""Import of torch and what is built on it: most of the start of a command or rank that computes."""

from __future__ import annotations

import atexit
import gc
import importlib


def import_without_collection(module: str) -> None:
    """Import `module` without garbage collection, which takes a sixth of the time for torch and
    transformers.

    What was imported stays, so later collections leave it out: a full one took a third of a second
    for it.
    """
    gc.disable()
    try:
        importlib.import_module(module)
        gc.freeze()
        # At its end the interpreter collects them after all, or libraries report what they find
        # still in use.
        atexit.register(gc.unfreeze)
    finally:
        gc.enable()
