"""A step that runs out of memory: in which part, what was predicted, and which settings need less.

The part follows from the error's own stack, so a step does nothing for it. What the C++ engine of
autograd allocates has no frame but that of `backward`; FSDP2's hooks have theirs wherever they run.
"""

from __future__ import annotations

import textwrap
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Final

import torch

from drillyard.errors import UserError
from drillyard.estimation.alternatives import (
    estimated_high_gib,
    find_alternatives,
    with_micro_batch,
)
from drillyard.estimation.memory import memory_estimate
from drillyard.estimation.resolved_setup import checkpointing_modes
from drillyard.estimation.setup import Setup
from drillyard.estimation.step_roofline import Part
from drillyard.formatting import three_digits
from drillyard.parallel.ranks import Ranks
from drillyard.training.model_setup import GIB, ShardedModel, memory_bytes_per_rank

MODULES_OF_PARTS: Final[tuple[tuple[str, Part], ...]] = (
    ("torch.distributed.fsdp.", "gather and reduce"),
    ("drillyard.parallel.whole_weights", "gather and reduce"),
    ("drillyard.training.optimizer", "optimizer"),
    ("torch._tensor", "backward"),
    ("transformers", "forward"),
    ("drillyard.models.loss", "loss"),
    ("drillyard.data", "data"),
)
"""The part of a step that a module on the stack tells, the surest first: a block that is recomputed
is in backward, and the loss's module calls the model."""
STEP_MODULE: Final = "drillyard.training.trainer"
NO_MEMORY: Final = ("out of memory", "can't allocate memory", "ALLOC_FAILED")
"""In messages of RuntimeError: of CUDA and NCCL, of the CPU's allocator, of cuBLAS."""
CLEARLY_LESS: Final = 0.9
"""Of what was predicted: settings that may fit where those have not."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory of the device or the host could not be allocated."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in NO_MEMORY)


def part_out_of_memory(error: BaseException) -> Part | None:
    """The part of a training step in which memory ran out; None for another error, and for one that
    does not come from `Trainer.train_step`."""
    if not is_out_of_memory(error):
        return None
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    names = [str(frame.f_globals.get("__name__", "")) for frame in frames]
    steps = [
        number
        for number, (frame, name) in enumerate(zip(frames, names, strict=True))
        if name == STEP_MODULE and frame.f_code.co_name == "train_step"
    ]
    if not steps:
        return None
    inside = names[steps[0] + 1 :]
    for prefix, part in MODULES_OF_PARTS:
        if any(name.startswith(prefix) for name in inside):
            return part
    return "data"


class RanOutOfMemory(RuntimeError):
    """Memory ran out in a step; another start may get further."""


@contextmanager
def explained_out_of_memory(model: ShardedModel, ranks: Ranks) -> Iterator[None]:
    """Turn the end of memory in a step into a UserError."""
    try:
        yield
    except Exception as error:
        if (part := part_out_of_memory(error)) is None:
            raise
        raise UserError(out_of_memory(model.resolved.setup, part, ranks, error)) from error


def out_of_memory(setup: Setup, part: Part, ranks: Ranks, error: BaseException) -> str:
    """Which part of a step of `setup` ran out of memory, what was predicted, and the nearest
    setting that needs less."""
    text = f"memory ran out on rank {ranks.rank} in the part `{part}` of a step"
    if str(error):
        text += f"\n{textwrap.shorten(str(error), 160)}"
    available = memory_bytes_per_rank(ranks) / GIB
    try:
        predicted = memory_estimate(setup).total
        # Where the estimate says that it fits, less than it says is needed.
        limit = min(available, CLEARLY_LESS * predicted.low.value)
        changes = find_alternatives(setup, limit)
    except UserError as unknown:
        return f"{text}\nits memory cannot be estimated: {str(unknown).splitlines()[0]}"
    text += (
        f"\npredicted: {three_digits(predicted.low.value)} to"
        f" {three_digits(predicted.high.value)} GiB of {three_digits(available)} GiB that a rank"
        " may have"
    )
    if not changes:
        return f"{text}\nno change of its settings is known to fit"
    nearest = changes[0]
    return f"{text}\nwhat would fit: {nearest.in_words()}, at the price of {nearest.costs}"


def next_setup(
    setup: Setup, *, open_mode: bool, open_size: bool, least: bool = False
) -> Setup | None:
    """What to try after `setup` ran out of memory, of the settings that are open: the recomputation
    first, then the micro-batch. None where they have nothing left.

    The first that is estimated to need CLEARLY_LESS; with `least`, or where none is, the one that
    needs least.
    """
    modes = checkpointing_modes(compiled=setup.compiled)
    later = modes[modes.index(setup.activation_checkpointing) + 1 :] if open_mode else ()
    found = [replace(setup, activation_checkpointing=mode) for mode in later]
    if open_size:
        start = found[-1] if found else setup
        sequences = setup.micro_batch_size * setup.gradient_accumulation
        sizes = range(setup.micro_batch_size - 1, 0, -1)
        found += [with_micro_batch(start, size) for size in sizes if sequences % size == 0]
    if not found or least:
        return found[-1] if found else None
    try:
        limit = CLEARLY_LESS * estimated_high_gib(setup)
        return next((one for one in found if estimated_high_gib(one) <= limit), found[-1])
    except UserError:
        return found[0]
