"""Which errors are an end of memory, and what is tried next."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.unit.training.test_bench import setup_of

from drillyard.estimation.alternatives import estimated_high_gib
from drillyard.training.out_of_memory import is_out_of_memory, next_setup, part_out_of_memory


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        MemoryError(),
    ],
)
def test_memory_ends_in_several_errors(error: Exception) -> None:
    assert is_out_of_memory(error)
    assert part_out_of_memory(error) is None, "it does not come from a step"


@pytest.mark.parametrize("error", [RuntimeError("shape mismatch"), ValueError("out of memory")])
def test_other_errors_are_none(error: Exception) -> None:
    assert not is_out_of_memory(error)


def test_recomputation_comes_before_a_smaller_micro_batch() -> None:
    setup = replace(setup_of(), micro_batch_size=8, activation_checkpointing="none")
    found = next_setup(setup, open_mode=True, open_size=True)
    assert found is not None
    assert found.activation_checkpointing != "none" and found.micro_batch_size == 8
    assert estimated_high_gib(found) <= 0.9 * estimated_high_gib(setup)
    full = replace(setup, activation_checkpointing="full")
    smaller = next_setup(full, open_mode=True, open_size=True)
    assert smaller is not None
    assert smaller.micro_batch_size * smaller.gradient_accumulation == 8
    assert smaller.micro_batch_size < 8 and smaller.activation_checkpointing == "full"


def test_only_what_is_open_is_changed() -> None:
    setup = replace(setup_of(), micro_batch_size=8, activation_checkpointing="none")
    assert next_setup(setup, open_mode=False, open_size=False) is None
    smaller = next_setup(setup, open_mode=False, open_size=True)
    assert smaller is not None and smaller.activation_checkpointing == "none"
    full = replace(setup, activation_checkpointing="full")
    assert next_setup(full, open_mode=True, open_size=False) is None


def test_the_second_time_it_is_what_needs_least() -> None:
    setup = replace(setup_of(), micro_batch_size=8, activation_checkpointing="none")
    least = next_setup(setup, open_mode=True, open_size=True, least=True)
    assert least is not None
    assert (least.activation_checkpointing, least.micro_batch_size) == ("full", 1)
    assert least.gradient_accumulation == 8
