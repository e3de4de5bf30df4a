"""Changes that make a run fit: the smallest step on each of the levers, and its cost.

Three levers change no number of the training (up to rounding): recomputing more, smaller
micro-batches with as many more of them, and cutting the model over more of the same ranks. Each is
moved alone, by growing steps, until the estimated peak (the high end of its range) is within the
memory; where alone does not suffice, together with full recomputation, then with micro-batches of
one sequence besides. The other levers take more GPUs or train something else (shorter sequences):
they are moved alone where one of the first three would do as well, and from the end of those
otherwise.

Cost: a dozen or two of estimates. Limits: what this trainer does not have (adapters, tensor and
context parallelism, moments or weights on the host) is not proposed.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import yaml

from drillyard.config.kernel_rules import resolve_loss_chunk
from drillyard.estimation.memory import memory_estimate
from drillyard.estimation.resolved_setup import checkpointing_modes
from drillyard.estimation.setup import Checkpointing, Setup
from drillyard.formatting import three_digits

MOST_GPUS: Final = 16_384
SHORTEST_SEQUENCE: Final = 64
RECOMPUTED: Final[Mapping[Checkpointing, float]] = {
    "none": 0.0,
    "memory-budget": 0.0,
    "selective": 1 / 6,
    "full": 1 / 3,
}
"""Recomputed FLOPs over those of a step without: the forward is a third of forward and backward,
and selective keeps every second matrix product of it (`parallel/parallelize.py`)."""

Lever = Callable[[Setup], Iterator[Setup]]
StepSeconds = Callable[[Setup], float]


@dataclass(frozen=True, slots=True)
class Alternative:
    """Settings that make a run fit, by their dotted keys in the run config, with the setup and its
    estimated peak.

    `num_gpus` is another number of GPUs, None where it stays. `keeps_training`: what is computed
    stays the same up to rounding; `costs` says what is given in return.
    """

    settings: Mapping[str, Any]
    num_gpus: int | None
    setup: Setup
    memory_gib: float
    costs: str
    keeps_training: bool

    def in_words(self) -> str:
        """`training.micro_batch_size: 4, training.gradient_accumulation: 2 (up to 61.2 GiB)`."""
        gpus = [] if self.num_gpus is None else [f"{self.num_gpus} {_gpus(self.setup)}"]
        changes = [
            yaml.safe_dump(
                {key: value}, default_flow_style=True, sort_keys=False, width=math.inf
            ).strip()[1:-1]
            for key, value in self.settings.items()
        ]
        return f"{', '.join(gpus + changes)} (up to {three_digits(self.memory_gib)} GiB)"


def find_alternatives(
    setup: Setup, memory_gib: float, *, step_seconds: StepSeconds | None = None
) -> list[Alternative]:
    """The smallest change on each lever with which `setup` fits in `memory_gib` per rank; empty
    where none does.

    Those that keep the training come first, by what they cost: `step_seconds` where it is given,
    else recomputed FLOPs. A setup that fits as it is needs no change: empty. Raises UserError where
    the memory cannot be estimated at all.
    """

    def fits(candidate: Setup) -> bool:
        return estimated_high_gib(candidate) <= memory_gib

    def first_fit(lever: Lever, *starts: Setup) -> Setup | None:
        for start in starts:
            steps = list(lever(start))
            # Each step of a lever needs less than the one before it, so few of them have to be
            # estimated.
            if (first := bisect_left(steps, True, key=fits)) < len(steps):
                return steps[first]
        return None

    if fits(setup):
        return []
    full = replace(setup, activation_checkpointing="full")
    smallest = with_micro_batch(full, 1)
    recomputing = first_fit(_more_recomputation, setup)
    # What recomputing alone would do needs no second lever.
    smaller = first_fit(_smaller_micro_batches, setup, *([] if recomputing else [full]))
    wider = first_fit(_wider_sharding, setup, *([] if recomputing or smaller else [full, smallest]))
    found = [recomputing, smaller, wider]
    starts = [setup] if any(found) else [full, smallest, *list(_wider_sharding(smallest))[-1:]]
    found += [first_fit(lever, *starts) for lever in (_more_gpus, _shorter_sequences)]
    changes = [_change(setup, to, estimated_high_gib(to)) for to in found if to is not None]
    return sorted(
        changes, key=lambda change: (not change.keeps_training, _slowness(change, step_seconds))
    )


def estimated_high_gib(setup: Setup) -> float:
    """The peak of memory per rank in GiB, at the high end of its range. UserError where it cannot
    be estimated."""
    return memory_estimate(setup).total.high.value


def with_micro_batch(setup: Setup, size: int) -> Setup:
    """`setup` with micro-batches of `size`, a divisor of the sequences per rank and step, and as
    many more of them."""
    sequences = setup.micro_batch_size * setup.gradient_accumulation
    return _rechunked(
        replace(setup, micro_batch_size=size, gradient_accumulation=sequences // size), setup
    )


def _smaller_micro_batches(setup: Setup) -> Iterator[Setup]:
    sequences = setup.micro_batch_size * setup.gradient_accumulation
    for size in range(setup.micro_batch_size - 1, 0, -1):
        if sequences % size == 0:
            yield with_micro_batch(setup, size)


def _wider_sharding(setup: Setup) -> Iterator[Setup]:
    for replicate in range(setup.replicate - 1, 0, -1):
        if setup.world_size % replicate == 0:
            yield replace(setup, shard=setup.world_size // replicate, replicate=replicate)


def _more_recomputation(setup: Setup) -> Iterator[Setup]:
    modes = checkpointing_modes(compiled=setup.compiled)
    for mode in modes[modes.index(setup.activation_checkpointing) + 1 :]:
        yield replace(setup, activation_checkpointing=mode)


def _more_gpus(setup: Setup) -> Iterator[Setup]:
    """Twice as many ranks to cut the model over, and again; the global batch stays while each has a
    sequence of it."""
    while setup.world_size * 2 <= MOST_GPUS:
        sequences = setup.micro_batch_size * setup.gradient_accumulation
        setup = replace(setup, shard=setup.shard * 2)
        if sequences % 2 == 0:
            size = math.gcd(sequences // 2, setup.micro_batch_size)
            halved = replace(
                setup, micro_batch_size=size, gradient_accumulation=sequences // 2 // size
            )
            setup = _rechunked(halved, setup)
        yield setup


def _shorter_sequences(setup: Setup) -> Iterator[Setup]:
    """3/4, 1/2, 3/8, 1/4, ... of the length, in whole multiples of the shortest."""
    for halvings in range(16):
        for quarters in (3, 2):
            length = setup.sequence_length * quarters // 4 >> halvings
            if length >= SHORTEST_SEQUENCE:
                yield _rechunked(
                    replace(setup, sequence_length=length // SHORTEST_SEQUENCE * SHORTEST_SEQUENCE),
                    setup,
                )


def _rechunked(to: Setup, before: Setup) -> Setup:
    """`to`, which has other sizes than `before`: the chunk of the loss follows where it was not
    chosen by hand."""
    if before.loss_chunk_tokens != resolve_loss_chunk(before.tokens_per_micro_batch, None):
        return to
    return replace(to, loss_chunk_tokens=resolve_loss_chunk(to.tokens_per_micro_batch, None))


def _change(before: Setup, to: Setup, memory_gib: float) -> Alternative:
    fields = {
        "training.activation_checkpointing": "activation_checkpointing",
        "training.micro_batch_size": "micro_batch_size",
        "training.gradient_accumulation": "gradient_accumulation",
        "data.sequence_length": "sequence_length",
        "parallelism.replicate": "replicate",
    }
    settings = {
        key: getattr(to, name)
        for key, name in fields.items()
        if getattr(to, name) != getattr(before, name)
    }
    if to.replicate != before.replicate:
        settings["parallelism.shard"] = to.shard
    same_batch = _sequences_per_step(to) == _sequences_per_step(before)
    keeps = same_batch and to.sequence_length == before.sequence_length
    num_gpus = to.world_size if to.world_size != before.world_size else None
    return Alternative(
        settings,
        num_gpus,
        to,
        memory_gib,
        "; ".join(_costs(before, to)),
        keeps and num_gpus is None,
    )


def _sequences_per_step(setup: Setup) -> int:
    return setup.world_size * setup.micro_batch_size * setup.gradient_accumulation


def _costs(before: Setup, to: Setup) -> Iterator[str]:
    """List the costs of the changes, in words."""
    if (
        more := RECOMPUTED[to.activation_checkpointing]
        - RECOMPUTED[before.activation_checkpointing]
    ):
        yield f"about {100 * more:.0f} % more FLOPs"
    mode = to.activation_checkpointing
    if mode == "memory-budget" and mode != before.activation_checkpointing:
        yield "norms and gates computed again"
    if to.gradient_accumulation > before.gradient_accumulation:
        yield "smaller matrix products, and weights gathered more often"
    if to.replicate < before.replicate:
        yield "weights gathered over more ranks"
    if to.world_size > before.world_size:
        yield f"{to.world_size / before.world_size:g} times the {_gpus(to)}"
        if _sequences_per_step(to) != _sequences_per_step(before):
            yield (
                f"a global batch of {_sequences_per_step(to)} sequences instead of"
                f" {_sequences_per_step(before)}"
            )
    if to.sequence_length < before.sequence_length:
        yield "longer documents are cut, and steps have fewer tokens"


def _gpus(setup: Setup) -> str:
    return "GPUs" if setup.device_type == "cuda" else "ranks"


def _slowness(change: Alternative, step_seconds: StepSeconds | None) -> float:
    """Key to order alternatives by: GPU-seconds of a token, or in their place the FLOPs of one,
    relative."""
    setup = change.setup
    if step_seconds is not None:
        return step_seconds(setup) / setup.tokens_per_step_per_gpu
    return RECOMPUTED[setup.activation_checkpointing]
