"""States, checkpointers and damage for the tests of checkpoints on several ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from drillyard.training.checkpoint.checkpointer import Checkpointer

# Rows that divide by no number of ranks, fewer rows than ranks (empty shards), a scalar's worth,
# and a wide one.
SHAPES = {"embedding": (17, 6), "norm": (3,), "bias": (1,), "wide": (8, 33)}


class Recorder:
    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []

    def __call__(self, name: str, **fields: Any) -> None:
        self.events.append((name, fields))

    def named(self, name: str) -> list[dict[str, Any]]:
        return [fields for event, fields in self.events if event == name]


def full_value(name: str, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(name.encode()) * 1000 + step)
    return torch.randn(SHAPES[name], generator=generator)


def sharded(full: torch.Tensor, replicate: int) -> DTensor:
    """The rank's part of `full`, as FSDP2 (one axis) or HSDP (two) would hold it, made without
    communication."""
    world = dist.get_world_size()
    if replicate == 1:
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("shard",))
        placements: tuple[Any, ...] = (Shard(0),)
        part = dist.get_rank()
    else:
        mesh = init_device_mesh(
            "cpu", (replicate, world // replicate), mesh_dim_names=("replicate", "shard")
        )
        placements = (Replicate(), Shard(0))
        part = mesh.get_local_rank("shard")
    parts = world // replicate
    chunks = list(full.chunk(parts))
    local = chunks[part].clone() if part < len(chunks) else full.new_empty(0, *full.shape[1:])
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=full.shape, stride=full.stride()
    )


def make_state(step: int, replicate: int, *, random: bool = True) -> dict[str, Any]:
    state: dict[str, Any] = {
        "model": {name: sharded(full_value(name, step), replicate) for name in SHAPES},
        "optimizer": {"step": torch.tensor(float(step)), "groups": [{"lr": 0.1 * step}]},
        "step": step,
    }
    if random:
        state[f"random.{dist.get_rank():05d}"] = (
            torch.arange(5, dtype=torch.uint8) + dist.get_rank()
        )
    return state


def emptied(state: dict[str, Any]) -> dict[str, Any]:
    for value in state["model"].values():
        value.to_local().fill_(-1.0)
    state["optimizer"] = {"step": torch.tensor(-1.0), "groups": None}
    state["step"] = None
    return state


def differences(state: dict[str, Any], step: int, replicate: int) -> list[str]:
    """Names of the entries whose bits are not those of `make_state(step)`."""
    wanted = make_state(step, replicate)
    found = [
        n
        for n in SHAPES
        if not torch.equal(state["model"][n].to_local(), wanted["model"][n].to_local())
    ]
    found += (
        []
        if torch.equal(state["optimizer"]["step"], wanted["optimizer"]["step"])
        else ["optimizer.step"]
    )
    found += (
        []
        if state["optimizer"]["groups"] == wanted["optimizer"]["groups"]
        else ["optimizer.groups"]
    )
    return found + ([] if state["step"] == step else ["step"])


def make_checkpointer(run: Path, events: Recorder, **settings: Any) -> Checkpointer:
    run.mkdir(exist_ok=True)  # a run directory is made before its checkpoints
    defaults: dict[str, Any] = {
        "keep": 3,
        "keep_best": True,
        "asynchronous": True,
        "identity": {"name": "test"},
    }
    return Checkpointer(run / "checkpoints", **{**defaults, **settings}, on_event=events)


def save_layout(run: Path, step: int, replicate: int) -> None:
    """Save `make_state(step)` under a layout."""
    checkpointer = make_checkpointer(run, Recorder())
    checkpointer.save(step, make_state(step, replicate), metadata={})
    checkpointer.close()
