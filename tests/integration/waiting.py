"""Waiting for what other processes do."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from tests.integration.tiny_run import TIMEOUT_SECONDS


def until(
    condition: Callable[[], Any], what: str = "it never came", *, seconds: float = TIMEOUT_SECONDS
) -> Any:
    """What `condition` returns once it is true. TimeoutError with `what` after `seconds`, which by
    default only what hangs takes.

    A pause takes three times as long as the look before it, within 0.02 and 1 s: most looks are
    processes, on the cores that what they wait for needs.
    """
    end = time.monotonic() + seconds
    while True:
        began = time.monotonic()
        if found := condition():
            return found
        if time.monotonic() > end:
            raise TimeoutError(f"{what} (in {seconds:g} s)")
        time.sleep(min(1.0, max(0.02, 3 * (time.monotonic() - began))))
