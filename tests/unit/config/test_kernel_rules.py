"""What settings become that are left open: the rules that trainer and estimate share."""

from __future__ import annotations

import pytest

from drillyard.config.kernel_rules import (
    fastest_kernel,
    kernel_limitation,
    resolve_compile,
    resolve_loss_chunk,
    resolve_shard,
    unsharded_is_small,
)
from drillyard.config.run import OptimizerConfig, ParallelismConfig, TrainingConfig

GIB = 2**30


def test_the_model_is_cut_over_all_ranks_that_copies_leave() -> None:
    assert resolve_shard(ParallelismConfig(), 16) == 16
    assert resolve_shard(ParallelismConfig(replicate=4), 16) == 4
    assert resolve_shard(ParallelismConfig(shard=2, replicate=8), 16) == 2


def test_chunks_are_a_quarter_of_the_micro_batch_and_bounded() -> None:
    assert resolve_loss_chunk(256, None) == 64
    assert resolve_loss_chunk(1_000_000, None) == 2048
    assert resolve_loss_chunk(256, 100) == 100
    assert resolve_loss_chunk(1, None) == 1


@pytest.mark.parametrize(
    ("asked", "device", "compiled"),
    [("auto", "cuda", True), ("auto", "cpu", False), (True, "cpu", True), (False, "cuda", False)],
)
def test_blocks_are_compiled_on_gpus_unless_the_user_decides(
    asked: object, device: str, compiled: bool
) -> None:
    training = TrainingConfig.model_validate(
        {"optimizer": OptimizerConfig(learning_rate=1.0), "compile": asked}
    )
    assert resolve_compile(training, device) is compiled


@pytest.mark.parametrize(
    ("device", "half", "softcap", "dropout", "kernel"),
    [
        ("cuda", True, None, 0.0, "varlen"),
        ("cuda", False, None, 0.0, "sdpa"),
        ("cuda", True, None, 0.1, "sdpa"),
        ("cuda", True, 50.0, 0.0, "flex"),
        ("cuda", True, 50.0, 0.1, "eager"),
        ("cpu", True, None, 0.1, "sdpa"),
        ("cpu", True, 50.0, 0.0, "eager"),
    ],
)
def test_the_fastest_kernel_that_computes_what_the_model_asks_for(
    device: str, half: bool, softcap: float | None, dropout: float, kernel: str
) -> None:
    assert fastest_kernel(device, half=half, softcap=softcap, dropout=dropout) == kernel
    assert kernel_limitation(kernel, softcap=softcap, dropout=dropout) is None


@pytest.mark.parametrize(
    ("head_dim", "softcap", "kernel"),
    [
        (8, None, "varlen"),
        (256, None, "varlen"),
        (264, None, "sdpa"),
        (20, None, "sdpa"),
        (20, 50.0, "flex"),
        (8, 50.0, "eager"),
    ],
)
def test_kernels_of_other_head_sizes_are_passed_over(
    head_dim: int, softcap: float | None, kernel: str
) -> None:
    assert (
        fastest_kernel("cuda", half=True, softcap=softcap, dropout=0.0, head_dim=head_dim) == kernel
    )


def test_flash_attention_needs_a_gpu_that_it_has_kernels_for() -> None:
    kernels = [
        fastest_kernel("cuda", half=True, softcap=None, dropout=0.0, capability=capability)
        for capability in ((7, 5), (8, 0), (9, 0), (12, 0))
    ]
    assert kernels == ["sdpa", "varlen", "varlen", "varlen"]


def test_whole_weights_are_kept_while_they_are_a_sixteenth_of_the_memory() -> None:
    assert unsharded_is_small(GIB, "bf16", 64 * GIB)
    assert not unsharded_is_small(GIB + 1, "bf16", 64 * GIB)
    assert not unsharded_is_small(GIB, "fp64", 64 * GIB)
