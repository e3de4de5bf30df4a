"""The time of a training step by its parts, taken at the parts' ends and without a second loop.

Hooks around the trainer's own step mark where one part ends and the next begins: on a GPU by events
on the stream that computes, which the host does not wait for, so that a mark is reached when the
device has got there; on a CPU by the clock. Time that the stream waits for a gather or a reduction
is between the marks of FSDP2's own methods, so communication that computing hides is in no part.
The parts of a step add up to it.

Cost: two events per part and block, some tens of microseconds of the host per block. Limits: the
methods of FSDP2 that are marked are not public (those named are in torch 2.11 to 2.15).
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

from drillyard.estimation.step_roofline import PARTS, Part
from drillyard.parallel.ranks import Ranks
from drillyard.training.trainer import Trainer

FSDP_METHODS: Final = ("pre_forward", "post_forward", "pre_backward", "post_backward")


class PartClock:
    """Marks of parts on a device. One part runs at a time; a part may interrupt another."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self.current: Part = "data"
        self._marks: list[tuple[Part, Any]] = []

    def switch(self, part: Part) -> None:
        """End the current part and begin `part`."""
        self.current = part
        self._marks.append((part, self._now()))

    @contextmanager
    def interrupted_by(self, part: Part) -> Iterator[None]:
        """Run the block as `part`, then go on with the part that was current."""
        before = self.current
        self.switch(part)
        yield
        self.switch(before)

    def take(self) -> dict[Part, float]:
        """Seconds of each part from the first mark until now; waits for the device, and drops the
        marks."""
        self._marks.append((self.current, self._now()))
        if self.on_gpu:
            torch.cuda.synchronize()
        found: dict[Part, float] = dict.fromkeys(PARTS, 0.0)
        for (part, begin), (_, end) in zip(self._marks, self._marks[1:], strict=False):
            found[part] += begin.elapsed_time(end) / 1e3 if self.on_gpu else end - begin
        self._marks.clear()
        return found

    def _now(self) -> Any:
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


@contextmanager
def marked_parts(trainer: Trainer) -> Iterator[PartClock]:
    """A clock that the steps of `trainer` mark for as long as the context lasts."""
    clock = PartClock(trainer.ranks.device)
    root = trainer.root
    base = root.causal_lm.base_model
    with ExitStack() as stack:
        hooks = (
            root.register_forward_pre_hook(lambda *_: clock.switch("forward"), prepend=True),
            base.register_forward_hook(lambda *_: clock.switch("loss")),
            root.register_forward_hook(lambda *_: clock.switch("backward")),
        )
        for hook in hooks:
            stack.callback(hook.remove)

        def wrap(owner: Any, name: str, part: Part) -> None:
            stack.enter_context(_wrapped(owner, name, clock, part))

        wrap(Ranks, "sum_over_data_ranks", "waiting")
        wrap(trainer.optimizer, "step", "optimizer")
        wrap(trainer.optimizer, "zero_grad", "optimizer")
        if isinstance(root, FSDPModule):
            for name in FSDP_METHODS:
                wrap(FSDPParamGroup, name, "gather and reduce")
            wrap(FSDPState, "_root_post_backward_final_callback", "gather and reduce")
        elif (weights := vars(root).get("whole_weights")) is not None:
            wrap(weights, "use", "gather and reduce")
            wrap(weights, "give_back", "gather and reduce")
        yield clock


@contextmanager
def _wrapped(owner: Any, name: str, clock: PartClock, part: Part) -> Iterator[None]:
    """Have calls of `owner.name` marked as `part`; `owner` is a class or an object."""
    own = vars(owner).get(name)
    function: Callable[..., Any] = getattr(owner, name)

    @functools.wraps(function)
    def marked(*arguments: Any, **options: Any) -> Any:
        with clock.interrupted_by(part):
            return function(*arguments, **options)

    setattr(owner, name, marked)
    try:
        yield
    finally:
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)
