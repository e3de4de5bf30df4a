"""The ranks of a run: process groups, device, mesh and threads, in one value that is passed around.

A process learns its place from the environment that torchrun and Drillyard's supervisor both set
(RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT); without them it is a run of one rank.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.rendezvous import rendezvous

from drillyard.config.kernel_rules import resolve_shard
from drillyard.config.run import ParallelismConfig, TrainingConfig
from drillyard.errors import UserError
from drillyard.parallel.collectives import gather
from drillyard.parallel.rendezvous import JoinedAttempt, JoinError, join_attempt
from drillyard.supervise.launch_contract import submission

T = TypeVar("T")

COLLECTIVE_TIMEOUT = timedelta(minutes=10)
JOIN_TIMEOUT = timedelta(minutes=10)
"""Longest wait of the first rank to arrive for the last: nodes start minutes apart, whatever a
collective may take."""


@dataclass(frozen=True)
class Ranks:
    """This process's rank, its device and the device mesh.

    Ranks that differ along a data axis of the mesh (`replicate`, `shard`) are different *data
    ranks*: samples, losses and norms are shared out among those. Ranks that differ only along
    another axis read the same samples and hold the same weights. `data_group` joins this rank with
    one rank of every other data rank; None: each rank is a data rank.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    device: torch.device
    mesh: DeviceMesh
    threads: int
    collective_timeout: timedelta = COLLECTIVE_TIMEOUT
    joined: JoinedAttempt | None = None
    data_group: dist.ProcessGroup | None = None

    @property
    def data_rank(self) -> int:
        """This rank's number among the data ranks."""
        return self.rank if self.data_group is None else dist.get_rank(self.data_group)

    @property
    def num_data_ranks(self) -> int:
        return self.world_size if self.data_group is None else dist.get_world_size(self.data_group)

    @property
    def restarts(self) -> int:
        """Number of earlier starts of these ranks, as far as their store or their launcher
        knows."""
        return self.joined.restarts if self.joined else 0

    @property
    def num_replicas(self) -> int:
        return self.mesh.size(0)

    @property
    def fsdp_mesh(self) -> DeviceMesh:
        """The data axes of the mesh; with one copy of the model the `shard` axis alone."""
        if self.num_replicas == 1:
            return self.mesh["shard"]
        return self.mesh if self.mesh.ndim == 2 else self.mesh["replicate", "shard"]

    def sum_over_data_ranks(self, values: torch.Tensor) -> torch.Tensor:
        """Sum `values` over the data ranks, in place, without waiting for the device."""
        if self.num_data_ranks > 1:
            dist.all_reduce(values, group=self.data_group)
        return values

    def gather_from_data_ranks(self, value: T) -> list[T]:
        """The values of all data ranks, in their order."""
        return gather(value, self.data_group)

    @contextlib.contextmanager
    def in_turn(self) -> Iterator[bool]:
        """Run the block on rank 0, then on the first rank of every other node, then on all the
        rest.

        Gives True on the first rank of each node, which makes what is missing: in a shared
        directory the others find what rank 0 made. All then continue. Waiting is on the store, not
        in a collective, so it may take hours. Raises JoinError when another rank has been restarted
        meanwhile.
        """
        store = dist.distributed_c10d._get_default_store()
        prefix = f"drillyard/in-turn/{store.add(f'drillyard/in-turn/{self.rank}', 1)}"
        node = max(self.rank - self.local_rank, 0)
        is_first = 0 in (self.rank, self.local_rank)
        if self.rank != 0:
            self._await(store, f"{prefix}/node-0")
        if not is_first:
            self._await(store, f"{prefix}/node-{node}")
        yield is_first
        if is_first:
            store.set(f"{prefix}/node-{node}", "done")
        # No rank continues to collectives, which have a timeout, before the slowest node is done.
        if store.add(f"{prefix}/done", 1) == self.world_size:
            store.set(f"{prefix}/all", "done")
        self._await(store, f"{prefix}/all")

    def _await(self, store: Any, key: str) -> None:
        """Wait for `key`, polling at growing intervals, as long as this attempt lasts."""
        begun = time.monotonic()
        while not store.check([key]):
            if self.joined is not None and self.joined.is_over():
                raise JoinError(f"rank {self.rank}: another rank of this attempt was restarted")
            time.sleep(min(5.0, 0.01 + (time.monotonic() - begun) / 50))


def choose_device(wanted: str, local_rank: int) -> torch.device:
    """The device of a rank: its own GPU, or the CPU."""
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UserError(
            "training.device is cuda, but torch finds no GPU here; use `device: auto` or run where"
            " there is one"
        )
    if local_rank >= torch.cuda.device_count():
        raise UserError(
            f"rank with local number {local_rank} has no GPU: this host has"
            f" {torch.cuda.device_count()}; lower --nproc-per-node"
        )
    return torch.device("cuda", local_rank)


def start_ranks(
    training: TrainingConfig,
    parallelism: ParallelismConfig,
    collective_timeout: timedelta = COLLECTIVE_TIMEOUT,
    *,
    other_axes: Mapping[str, int] | None = None,
) -> Ranks:
    """Join the other ranks and create the device mesh; every collective fails after
    `collective_timeout`.

    `other_axes`: sizes of mesh axes within a data rank, innermost last; the trainer has none yet.
    Raises UserError when shard x replicate is not the number of data ranks, or there is no such
    device.
    """
    rank = int(os.environ.get("RANK", "0"))
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE") or ranks_of_this_host(world_size))
    device = choose_device(training.device, local_rank)
    threads = training.threads_per_rank or max(1, (os.cpu_count() or 1) // max(1, local_world_size))
    torch.set_num_threads(threads)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    joined = None if dist.is_initialized() else _join(rank, world_size, device, collective_timeout)
    axes = {"replicate": parallelism.replicate, "shard": 0, **(other_axes or {})}
    num_data_ranks = world_size // math.prod((other_axes or {}).values())
    axes["shard"] = shard = resolve_shard(parallelism, num_data_ranks)
    if math.prod(axes.values()) != world_size:
        raise UserError(
            f"parallelism: shard {shard} x replicate {parallelism.replicate} is not the number of"
            f" ranks, {world_size}; set shard: auto, or start another number of ranks"
        )
    mesh = init_device_mesh(device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))
    for axis in axes:
        # The mesh creates its own groups, with torch's default timeout of 10 or 30 minutes.
        set_timeout(mesh.get_group(axis), collective_timeout)
    data_group: dist.ProcessGroup | None = None
    if num_data_ranks != world_size:
        peers = mesh.mesh.reshape(num_data_ranks, -1)
        group, _ = dist.new_subgroups_by_enumeration(peers.T.tolist(), timeout=collective_timeout)
        assert isinstance(group, dist.ProcessGroup)
        data_group = group
    return Ranks(
        rank,
        world_size,
        local_rank,
        local_world_size,
        device,
        mesh,
        threads,
        collective_timeout,
        joined,
        data_group,
    )


def set_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Let collectives of `group` fail after `timeout`."""
    # torch.distributed.set_timeout is younger than the oldest torch that we support.
    setter = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    setter(timeout, group)


def ranks_of_this_host(world_size: int) -> int:
    """Ranks on this host where the launcher does not say it in torch's own words: Slurm's and Open
    MPI's, else all."""
    for variable in ("SLURM_NTASKS_PER_NODE", "OMPI_COMM_WORLD_LOCAL_SIZE"):
        if os.environ.get(variable, "").isdigit():
            return int(os.environ[variable])
    return world_size


def _join(
    rank: int, world_size: int, device: torch.device, timeout: timedelta
) -> JoinedAttempt | None:
    """Find the other ranks and make the default group; the attempt agreed on, None for a process of
    its own."""
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    store: Any
    joined = None
    if "MASTER_ADDR" in os.environ:
        try:
            meeting_place, _, _ = next(rendezvous("env://", rank, world_size, timeout=JOIN_TIMEOUT))
        except dist.DistNetworkError as error:
            if "EADDRINUSE" not in str(error):
                raise
            raise _port_in_use() from None
        restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        # Where each host restarts its own ranks, the others come when their collective of the dead
        # attempt has failed.
        joined = join_attempt(meeting_place, rank, world_size, restarts, JOIN_TIMEOUT + timeout)
        store = joined.store
    else:
        store, rank, world_size = torch._C._distributed_c10d.HashStore(), 0, 1
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    return joined


class PortInUseError(RuntimeError):
    """Another program listens on the port on which the ranks were to meet; another start may get
    another port."""


def _port_in_use() -> Exception:
    """An error to raise: the user's where the user chose the port, else one after which ranks are
    started again."""
    port = os.environ.get("MASTER_PORT")
    text = f"port {port} of this host is in use by another program"
    gets_new_port = os.environ.get("DRILLYARD_SUPERVISED") == "1" and os.environ.get(
        "WORLD_SIZE"
    ) == os.environ.get("LOCAL_WORLD_SIZE")
    if gets_new_port or submission() is not None:
        return PortInUseError(text)
    return UserError(
        f"{text}: name a free one with --master-port (MASTER_PORT under another launcher)"
    )


def stop_ranks() -> None:
    """Leave the process group."""
    if dist.is_initialized():
        dist.destroy_process_group()
