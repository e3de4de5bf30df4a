"""Plain values and errors between the ranks of a process group; without a process group there is
one rank.

Leaf module: torch and the error type only, so models, checkpoints and evaluation can all use it.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from drillyard.errors import UserError

T = TypeVar("T")


def own_cpu_group(timeout: timedelta) -> dist.ProcessGroup:
    """A further group of all ranks, between their CPUs, which mixes with no other collectives.
    Collective."""
    group = dist.new_group(backend="gloo", timeout=timeout)
    assert isinstance(group, dist.ProcessGroup)
    return group


def rank_and_size(group: dist.ProcessGroup | None = None) -> tuple[int, int]:
    """This process's rank in `group` (None: the default group), and the number of its ranks."""
    return (dist.get_rank(group), dist.get_world_size(group)) if dist.is_initialized() else (0, 1)


def gather(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """The values of all ranks, in order of rank. Collective; values are pickled."""
    _, size = rank_and_size(group)
    if size == 1:
        return [value]
    values: list[Any] = [None] * size
    dist.all_gather_object(values, value, group=group)
    return values


def from_first_rank(function: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Run `function` on the group's first rank alone; all ranks get its value, or raise its OSError
    or UserError."""
    rank, size = rank_and_size(group)
    if size == 1:
        return function()
    outcome: list[Any] = [None]
    if rank == 0:
        try:
            outcome = [function()]
        except (OSError, UserError) as error:
            outcome = [error]
    dist.broadcast_object_list(
        outcome, src=dist.get_global_rank(group, 0) if group is not None else 0, group=group
    )
    if isinstance(outcome[0], OSError | UserError):
        raise outcome[0]
    value: T = outcome[0]
    return value
