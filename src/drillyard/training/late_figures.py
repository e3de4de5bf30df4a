"""Figures of a logged step on their way from the device to the host.

Reading a number from a GPU waits until the GPU has computed it, and then the GPU waits until the
host has queued more work. So figures are copied to pinned memory behind the step that they
belong to, and read one logged step later, when they have long arrived. How long a step took is
measured by events on the GPU itself, as the host runs ahead of it. A CPU has computed what it was
asked for when the call returns: there figures are read at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import torch

Figures = TypeVar("Figures")


def device_event(device: torch.device) -> torch.cuda.Event | None:
    """The moment at which a GPU has done what was queued so far; None on a CPU."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


class PendingFigures(Generic[Figures]):
    """Numbers that are being copied from the device, and what is made of them on the host.

    `make` takes the numbers as a list, and the GPU's seconds since `began` (None on a CPU).
    """

    def __init__(
        self,
        values: torch.Tensor,
        began: torch.cuda.Event | None,
        make: Callable[[list[float], float | None], Figures],
    ) -> None:
        self._values = values
        if values.is_cuda:
            self._values = torch.empty_like(values, device="cpu", pin_memory=True)
            self._values.copy_(values, non_blocking=True)
        self._began = began
        self._ended = device_event(values.device)
        self._make = make

    def have_arrived(self) -> bool:
        """Whether `read` would not wait."""
        return self._ended is None or bool(self._ended.query())  # type: ignore[no-untyped-call]

    def read(self) -> Figures:
        """What was made of the numbers; waits for the device if they have not arrived."""
        seconds = None
        if self._ended is not None:
            self._ended.synchronize()
            if self._began is not None:
                seconds = self._began.elapsed_time(self._ended) / 1000
        return self._make(self._values.tolist(), seconds)
