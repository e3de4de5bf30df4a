"""Training steps of a fixed Llama shape: on each device alone, on the devices of each node, and on
all of them, and on each node the work of all.

Every rank has the same weights and the same tokens, so that their gradients must be the same bits,
and the sums of gradients are all that they exchange (data parallel, each layer's as soon as it is
there). A step's time is the same on all ranks: they wait for each other. The local time, until a
rank's own backward pass has ended, is not: a slow rank has the longest, and waits least.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass, field
from typing import Any

if __package__:
    from .ranks import LocalClock, ProbeRank, facts, highest, join_group, rounded, run, say
else:
    from ranks import LocalClock, ProbeRank, facts, highest, join_group, rounded, run, say  # type: ignore

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

CHECKED_STEPS = 2
"""Steps with the same weights before any is timed: their gradients are the same bits on a device
that computes the same twice. On a CPU every later step's gradients are compared, too."""
CHECKED_TOKENS = 1024
"""Of these steps at most: attention's weights are in memory there."""
ROTATION_BASE = 500_000.0


def measure(rank: ProbeRank, asked: dict[str, Any]) -> dict[str, Any]:
    """One phase after the other; the object is printed after each."""
    clock = LocalClock(rank)
    values = {**facts(rank), "waiting_left_out": clock.without_waiting, "shape": asked["shape"]}
    nodes = rank.world // rank.local_world
    if rank.world > 1:
        values["backend"] = join_group(rank)
    groups = [
        dist.new_group(list(range(at, at + rank.local_world)))
        for at in range(0, rank.world, rank.local_world)
        if nodes > 1
    ]
    own = groups[rank.rank // rank.local_world] if groups else None
    trainer = TrainingProbe(rank, clock, asked)
    trainer.check_gradients()
    values["gradients"] = {"sums": trainer.sums}
    values["phases"] = phases = []
    say(values)
    asked_phases: list[tuple[str, int, Any, int]] = [("device", 1, None, 1)]
    if rank.local_world > 1:
        asked_phases.append(("node", rank.local_world, own, 1))
    if nodes > 1:
        asked_phases.append(("all", rank.world, None, 1))
        if nodes <= int(asked["most_nodes"]):
            asked_phases.append(("work of all on a node", rank.local_world, own, nodes))
    for each in asked_phases:
        phases.append(trainer.phase(*each))
        say(values)
    return values


class Layer(nn.Module):
    """Attention with grouped queries and rotary positions, and a gated MLP."""

    def __init__(self, shape: dict[str, int], device: torch.device) -> None:
        super().__init__()
        hidden, heads, groups = shape["hidden"], shape["heads"], shape["kv_heads"]
        self.heads, self.groups, self.width = heads, groups, hidden // heads

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=False, device=device)

        self.first_norm = nn.RMSNorm(hidden, eps=1e-5, device=device)
        self.second_norm = nn.RMSNorm(hidden, eps=1e-5, device=device)
        self.query, self.out = linear(hidden, hidden), linear(hidden, hidden)
        self.key = linear(hidden, groups * self.width)
        self.value = linear(hidden, groups * self.width)
        self.gate, self.up = (linear(hidden, shape["intermediate"]) for _ in range(2))
        self.down = linear(shape["intermediate"], hidden)

    def forward(self, x_BSH: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
        """B sequences, S positions, H hidden."""
        batch, length, _ = x_BSH.shape
        normed = self.first_norm(x_BSH)

        def heads(layer: nn.Linear, number: int) -> torch.Tensor:
            projected: torch.Tensor = layer(normed)
            return projected.view(batch, length, number, self.width).transpose(1, 2)

        query, key = (
            _rotate(heads(layer, number), rotation)
            for layer, number in ((self.query, self.heads), (self.key, self.groups))
        )
        shared = self.heads // self.groups
        key, value = (
            each.repeat_interleave(shared, dim=1) for each in (key, heads(self.value, self.groups))
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x_BSH = x_BSH + self.out(mixed.transpose(1, 2).reshape(batch, length, -1))
        normed = self.second_norm(x_BSH)
        result: torch.Tensor = x_BSH + self.down(F.silu(self.gate(normed)) * self.up(normed))
        return result


class Llama(nn.Module):
    """The decoder; embedding and head are not tied."""

    def __init__(self, shape: dict[str, int], device: torch.device) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape["vocabulary"], shape["hidden"], device=device)
        self.layers = nn.ModuleList(Layer(shape, device) for _ in range(shape["layers"]))
        self.norm = nn.RMSNorm(shape["hidden"], eps=1e-5, device=device)
        self.head = nn.Linear(shape["hidden"], shape["vocabulary"], bias=False, device=device)
        width = shape["hidden"] // shape["heads"]
        rates = ROTATION_BASE ** -(torch.arange(0, width, 2, device=device) / width)
        angles = torch.outer(torch.arange(shape["sequence"], device=device), rates)
        self.rotation = torch.stack((angles.cos(), angles.sin()))

    def forward(self, tokens_BS: torch.Tensor) -> torch.Tensor:
        """The mean loss of predicting each next token."""
        x_BSH = self.embedding(tokens_BS[:, :-1])
        rotation = self.rotation[:, : x_BSH.shape[1]]
        for layer in self.layers:
            x_BSH = layer(x_BSH, rotation)
        logits = self.head(self.norm(x_BSH))
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens_BS[:, 1:].flatten())


def _rotate(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    cosine, sine = rotation.to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)


@dataclass
class Step:
    """Times of one step: marks on the device's own clock, or seconds on a CPU."""

    began: Any
    computed: Any
    ended: Any

    def seconds(self, until: str) -> float:
        """From its beginning until it had `computed` or `ended`; after the device has finished."""
        last = getattr(self, until)
        if isinstance(last, tuple):
            return float(last[until == "ended"] - self.began[until == "ended"])
        return float(self.began.elapsed_time(last)) / 1e3


@dataclass
class Exchange:
    """Gradients that are being summed up over a group."""

    group: Any = None
    on: bool = False
    under_way: list[Any] = field(default_factory=list)
    sums: list[torch.Tensor] | None = None
    """Sums over the bits of each local gradient, where they are wanted."""


class TrainingProbe:
    """A model, its optimizer, and the exchange of its gradients."""

    def __init__(self, rank: ProbeRank, clock: LocalClock, asked: dict[str, Any]) -> None:
        self._rank, self._clock, self._asked = rank, clock, asked
        shape = asked["shape"]
        torch.manual_seed(0)
        self._model = Llama(shape, rank.device)
        with torch.no_grad():
            for parameter in self._model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(std=0.02)
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), lr=1e-5, fused=rank.on_gpu or None
        )
        size = (shape["sequences"], shape["sequence"] + 1)
        generator = torch.Generator().manual_seed(1)
        tokens = torch.randint(0, shape["vocabulary"], size, generator=generator)
        self._tokens = tokens.to(rank.device)
        self._exchange = Exchange()
        self.sums: list[str] = []
        """Sums over the bits of all gradients of a step, as they were before the exchange."""
        for parameter in self._model.parameters():
            parameter.register_post_accumulate_grad_hook(self._send)  # type: ignore[no-untyped-call]

    def check_gradients(self) -> None:
        """Add up the bits of the gradients of some steps from the same weights.

        Only kernels that give the same bits each time are used.
        """
        # What cuBLAS needs for the same bits each time (its page on reproducible results).
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
        for _ in range(CHECKED_STEPS):
            self._exchange.sums = []
            with sdpa_kernel(SDPBackend.MATH):
                self._backward(self._tokens[:1, : CHECKED_TOKENS + 1])
            self._keep_sums()
            self._optimizer.zero_grad()
        torch.use_deterministic_algorithms(False)

    def _keep_sums(self) -> None:
        if self._exchange.sums is not None:
            total = sum(at * each for at, each in enumerate(self._exchange.sums, 1))
            self.sums.append(f"{int(total) & (1 << 64) - 1:016x}")
            self._exchange.sums = None

    def phase(self, name: str, ranks: int, group: Any, accumulated: int) -> dict[str, Any]:
        """Blocks of steps among `ranks` ranks, each of `accumulated` micro-batches."""
        self._exchange.group, self._exchange.on = group, ranks > 1
        began = time.perf_counter()
        for _ in range(2):
            self._step(accumulated)
            self._rank.finish()
            began, taken = time.perf_counter(), time.perf_counter() - began
        if self._rank.world > 1:
            taken = highest(self._rank, taken)
        count = int(float(self._asked["block_seconds"]) / max(taken, 1e-6))
        count = max(2, min(int(self._asked["steps"]), count))
        blocks = []
        for _ in range(int(self._asked["blocks"])):
            if self._rank.world > 1:
                dist.barrier()
            self._rank.finish()
            steps = [self._step(accumulated) for _ in range(count)]
            self._rank.finish()
            blocks.append(
                {
                    "step": rounded([each.seconds("ended") for each in steps]),
                    "local": rounded([each.seconds("computed") for each in steps]),
                }
            )
        shape = self._asked["shape"]
        tokens = shape["sequences"] * shape["sequence"] * accumulated
        return {"name": name, "ranks": ranks, "tokens_per_rank": tokens, "blocks": blocks}

    def _step(self, accumulated: int) -> Step:
        began, exchanges = self._mark(), self._exchange.on
        self._exchange.sums = None if self._rank.on_gpu else []
        for at in range(accumulated):
            self._exchange.on = exchanges and at == accumulated - 1
            self._backward(self._tokens)
        self._exchange.on = exchanges
        computed = self._mark()
        for work in self._exchange.under_way:
            work.wait()
        self._exchange.under_way.clear()
        self._keep_sums()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return Step(began, computed, self._mark())

    def _backward(self, tokens_BS: torch.Tensor) -> None:
        with torch.autocast(
            self._rank.device.type, dtype=torch.bfloat16, enabled=self._rank.on_gpu
        ):
            loss = self._model(tokens_BS)
        loss.backward()

    def _send(self, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        if self._exchange.sums is not None:
            bits = parameter.grad.view(torch.int32)
            self._exchange.sums.append(bits.sum(dtype=torch.int64))
        if self._exchange.on:
            work = dist.all_reduce(parameter.grad, group=self._exchange.group, async_op=True)
            self._exchange.under_way.append(work)

    def _mark(self) -> Any:
        if not self._rank.on_gpu:
            return (self._clock.now(), time.perf_counter())
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


if __name__ == "__main__":
    sys.exit(run(measure))
