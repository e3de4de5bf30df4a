"""Planners of what each rank writes, and a copy of it that training cannot change.

State is a flat dictionary: `flatten` turns nested ones into dotted keys. DTensors are planned from
their own mesh and placements, while the bytes come from `StagingBuffers`: one kept CPU tensor per
key (pinned when the state is on a GPU) into which each save copies. On a CPU the copy is a memcpy
that has ended when `stage` returns. On a GPU the copies are queued on the current stream, ahead of
whatever the training queues next, so the host does not wait for them; `StagedState.wait` does, in
the saving thread. Cost: host memory as large as the rank's state, kept between saves.

Plans repeat from save to save. `RepeatedSavePlanner` sends a plan only when it changed; the
coordinator then neither gathers nor checks plans again (at thousands of ranks that is most of a
save's time). Same idea as DefaultSavePlanner's `enable_plan_caching`, whose cache however belongs
to the class: here it lives and dies with the planner, so that after a failed save a new planner
starts from nothing on every rank.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, WriteItem
from torch.distributed.tensor import DTensor

from drillyard.training.checkpoint.archive_check import check_archive_stream


def flatten(state: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dictionaries as one, keys joined by dots. Lists and objects are values. ValueError
    when keys collide."""
    flat: dict[str, Any] = {}
    for key, value in state.items():
        name = f"{prefix}{key}"
        items = (
            flatten(value, f"{name}.") if isinstance(value, Mapping) and value else {name: value}
        )
        if duplicate := flat.keys() & items.keys():
            raise ValueError(f"two entries of the state are named {sorted(duplicate)[0]!r}")
        flat.update(items)
    return flat


def unflatten_into(state: dict[str, Any], flat: Mapping[str, Any], prefix: str = "") -> None:
    """Put the values of `flat` back where `flatten` took them from."""
    for key, value in state.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            unflatten_into(value, flat, f"{name}.")
        else:
            state[key] = flat[name]


def local_tensor(value: torch.Tensor) -> torch.Tensor:
    """Part of a tensor on this rank: a DTensor's local shard, or the tensor itself. Never part of a
    graph."""
    with torch.no_grad():
        return (value.to_local() if isinstance(value, DTensor) else value).detach()


class StagedState:
    """One save's data by key: copies, or the state itself while training waits."""

    def __init__(self, values: dict[str, Any], device: torch.device | None) -> None:
        """`device`: the GPU on whose current stream the values are being computed or copied."""
        self.values = values
        self._event: torch.cuda.Event | None = None
        if device is not None:
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(device))

    def wait(self) -> None:
        """Block until what was queued on the device has ended."""
        if self._event is not None:
            self._event.synchronize()


class StagingBuffers:
    """Kept CPU buffers, one per tensor of the state."""

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def stage(self, flat: Mapping[str, Any], *, copies: bool) -> StagedState:
        """The state, copied or itself. Copies overwrite those of the save before, which must have
        ended."""
        values: dict[str, Any] = {}
        device: torch.device | None = None
        with torch.no_grad():
            for key, value in flat.items():
                if isinstance(value, torch.Tensor):
                    local = local_tensor(value)
                    values[key] = (
                        self._buffer(key, local).copy_(local, non_blocking=True)
                        if copies
                        else local
                    )
                    device = local.device if local.is_cuda else device
                else:
                    values[key] = copy.deepcopy(value) if copies else value
        return StagedState(values, device)

    def _buffer(self, key: str, local: torch.Tensor) -> torch.Tensor:
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape != local.shape or buffer.dtype != local.dtype:
            buffer = torch.empty(
                local.shape, dtype=local.dtype, device="cpu", pin_memory=local.is_cuda
            )
            self._buffers[key] = buffer
        return buffer


class RepeatedSavePlanner(DefaultSavePlanner):
    """Plans from the state's DTensors, takes data from `StagedState`, and plans again only what has
    changed."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.staged: StagedState | None = None
        self._local_plan: SavePlan | None = None
        self._final_plan: SavePlan | None = None
        self._all_plans: list[SavePlan] | None = None
        self._global_metadata: Metadata | None = None

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        if self._final_plan is not None and plan == self._local_plan:
            return SavePlan([], usable=False)
        self._local_plan = plan
        return plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        if self._all_plans is not None and self._global_metadata is not None:
            if not any(plan.usable for plan in all_plans):
                return [SavePlan([], usable=False) for _ in all_plans], self._global_metadata
            all_plans = [
                new if new.usable else old
                for new, old in zip(all_plans, self._all_plans, strict=True)
            ]
        plans, metadata = super().create_global_plan(all_plans)
        self._all_plans, self._global_metadata = all_plans, metadata
        return plans, metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        if new_plan.usable:
            self._final_plan = super().finish_plan(new_plan)
        assert self._final_plan is not None
        return self._final_plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        assert self.staged is not None
        return self.staged.values[index.fqn]

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        """As DCP does it. Raises ValueError for a value that no load would take, such as an object
        of a class."""
        written = super().transform_object(write_item, object)
        if isinstance(written, io.BytesIO):
            check_archive_stream(written, written.getbuffer().nbytes)
        return written


class PlainLoadPlanner(DefaultLoadPlanner):
    """Fills tensors in place and replaces plain values. DefaultLoadPlanner unpickles values with
    any class in them."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> LoadPlan:
        """Raises ValueError where a tensor of the state is a plain value in the checkpoint: it
        would not be filled."""
        assert self.metadata is not None
        for key, value in self.state_dict.items():
            stored = self.metadata.state_dict_metadata.get(key)
            if isinstance(value, torch.Tensor) and isinstance(stored, BytesStorageMetadata):
                raise ValueError(f"{key} is no tensor in the checkpoint")
        return super().create_local_plan()

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = torch.load(
            value, map_location="cpu", weights_only=True
        )
