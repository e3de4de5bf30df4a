"""AdamW with moments in 8 bits: near AdamW's path, skipped steps, rows at a time, bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from drillyard.training import eight_bit_adamw
from drillyard.training.eight_bit_adamw import EightBitAdamW, is_packed

CONSTANTS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8}


def parameters() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in ((24, 512), (512,))]


def packed_optimizer(tensors: list[torch.Tensor]) -> EightBitAdamW:
    groups = [
        {"params": tensors[:1], "weight_decay": 0.1},
        {"params": tensors[1:], "weight_decay": 0.0},
    ]
    found = EightBitAdamW(groups, **CONSTANTS)
    for tensor in tensors:
        found.state[tensor] = found.new_state(tensor, tensor.shape)
    return found


def run(optimizer: Any, tensors: list[torch.Tensor], steps: int) -> None:
    """Steps towards fixed targets, with some noise."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for tensor in tensors:
            noise = torch.randn(tensor.shape, generator=generator)
            tensor.grad = tensor - 0.5 + 0.1 * noise
        optimizer.step()


def test_weights_end_near_those_of_adamw() -> None:
    ours, theirs, start = parameters(), parameters(), parameters()
    run(packed_optimizer(ours), ours, 100)
    groups = [
        {"params": theirs[:1], "weight_decay": 0.1},
        {"params": theirs[1:], "weight_decay": 0.0},
    ]
    run(torch.optim.AdamW(groups, **CONSTANTS), theirs, 100)
    moved = (theirs[0] - start[0]).norm()
    assert 0 < (ours[0] - theirs[0]).norm() < 0.05 * moved
    torch.testing.assert_close(ours[1], theirs[1], rtol=1e-5, atol=1e-6)


def test_a_step_that_is_not_finite_changes_nothing() -> None:
    tensors = parameters()
    optimizer = packed_optimizer(tensors)
    run(optimizer, tensors, 3)
    before = [
        value.clone() for tensor in tensors for value in (tensor, *optimizer.state[tensor].values())
    ]
    for tensor in tensors:
        tensor.grad = torch.full_like(tensor, torch.nan)
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    after = [value for tensor in tensors for value in (tensor, *optimizer.state[tensor].values())]
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))


def test_rows_at_a_time_give_the_bits_of_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, parts = parameters(), parameters()
    run(packed_optimizer(whole), whole, 5)
    monkeypatch.setattr(eight_bit_adamw, "MOST_NUMBERS", 5 * 512)
    run(packed_optimizer(parts), parts, 5)
    assert all(torch.equal(one, other) for one, other in zip(whole, parts, strict=True))


def test_moments_take_two_bytes_a_parameter() -> None:
    tensors = parameters()
    optimizer = packed_optimizer(tensors)
    packed, plain = (
        sum(value.nbytes for name, value in optimizer.state[tensor].items() if name != "step")
        for tensor in tensors
    )
    assert packed == 2 * (1 + 4 / 256) * tensors[0].numel()
    assert plain == 8 * tensors[1].numel()
    assert [is_packed(shape) for shape in ((16, 256), (15, 256), (64, 100), (8192,), (2, 8, 512))] \
        == [True, False, False, False, True]  # fmt: skip
