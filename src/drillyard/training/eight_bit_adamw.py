"""AdamW whose moments rest in 8 bits: a code per number, and a magnitude in fp32 for each block of
256 (Dettmers and others, arXiv 2110.02861; codes and map are torchao's).

2.03 bytes a parameter instead of 8. Each step unpacks, updates and packs some rows at a time, in
many small kernels: it saves memory, not time. Blocks lie within a row, so a shard has whole blocks
whatever the number of ranks, and a checkpoint can be cut again. Norms, biases and whatever has rows
that blocks do not divide keep fp32 moments.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, Final

import torch

from drillyard.errors import MissingExtraError

BLOCK: Final = 256
SMALLEST: Final = 4096
"""Smaller tensors keep fp32 moments, as in bitsandbytes and torchao."""
MOST_NUMBERS: Final = 2**24
"""Numbers that are unpacked at once: 64 MiB in fp32, for each of half a dozen temporaries."""
MOMENTS: Final = ("exp_avg", "exp_avg_sq")


def is_packed(shape: Sequence[int]) -> bool:
    """Whether a parameter of this (whole) shape has moments in 8 bits."""
    return len(shape) >= 2 and prod(shape) >= SMALLEST and prod(shape[1:]) % BLOCK == 0


class EightBitAdamW:
    """As much of `torch.optim.AdamW` as ShardedAdamW uses, which clips too. `factor`: of all
    gradients, and `found_inf`: 1 skips a step; both on the device."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        try:
            from torchao.optim import quant_utils
        except ModuleNotFoundError:
            raise MissingExtraError(
                "training.optimizer.name: adamw-8bit needs torchao, which is not installed: pip"
                " install 'drillyard[torchao]'"
            ) from None
        self._pack, self._scaled = quant_utils.quantize_8bit_with_qmap, quant_utils.scale_tensor
        self._unpack = quant_utils.dequant_with_qmap
        self.param_groups = [{**group, "lr": lr, "betas": betas, "eps": eps} for group in groups]
        self.state: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        self.found_inf: torch.Tensor | None = None
        self.factor: torch.Tensor | None = None
        device = groups[0]["params"][0].device if groups[0]["params"] else None
        self._maps = {
            "exp_avg": torch.tensor(quant_utils.create_dynamic_map(signed=True), device=device),
            "exp_avg_sq": torch.tensor(quant_utils.create_dynamic_map(signed=False), device=device),
        }

    def new_state(self, local: torch.Tensor, shape: Sequence[int]) -> dict[str, torch.Tensor]:
        """Moments of zero for a shard of a parameter of `shape`."""
        state = {"step": torch.zeros((), dtype=torch.float32, device=local.device)}
        for moment in MOMENTS:
            if is_packed(shape):
                state[moment] = torch.zeros_like(local, dtype=torch.uint8)
                blocks = (len(local), prod(shape[1:]) // BLOCK)
                state[f"{moment}_scale"] = torch.zeros(blocks, device=local.device)
            else:
                state[moment] = torch.zeros_like(local)
        return state

    @torch.no_grad()
    def step(self) -> None:
        """Update the parameters and their moments, unless `found_inf` is 1."""
        skipped = None if self.found_inf is None else self.found_inf.bool()
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                step = state["step"] + 1
                state["step"].copy_(
                    step if skipped is None else torch.where(skipped, step - 1, step)
                )
                of_rows = max(1, parameter.numel() // max(1, len(parameter)))
                at_once = max(1, MOST_NUMBERS // of_rows)
                for first in range(0, len(parameter), at_once):
                    chosen = slice(first, first + at_once)
                    self._update(parameter, state, chosen, group, step, skipped)

    def _update(
        self,
        parameter: torch.Tensor,
        state: dict[str, torch.Tensor],
        rows: slice,
        group: dict[str, Any],
        step: torch.Tensor,
        skipped: torch.Tensor | None,
    ) -> None:
        assert parameter.grad is not None
        weights, gradient = parameter[rows], parameter.grad[rows].to(parameter.dtype)
        if self.factor is not None:
            gradient = gradient * self.factor
        beta1, beta2 = group["betas"]
        first = self._read(state, "exp_avg", rows).lerp_(gradient, 1 - beta1)
        second = self._read(state, "exp_avg_sq", rows)
        second = second.lerp_(gradient.square(), 1 - beta2)
        root = second.sqrt().div_((1 - beta2**step).sqrt()).add_(group["eps"])
        updated = weights * (1 - group["lr"] * group["weight_decay"])
        updated -= group["lr"] * (first / (1 - beta1**step)) / root

        def write(target: torch.Tensor, values: torch.Tensor) -> None:
            target.copy_(values if skipped is None else torch.where(skipped, target, values))

        write(weights, updated)
        for moment, values in (("exp_avg", first), ("exp_avg_sq", second)):
            if f"{moment}_scale" not in state:
                write(state[moment][rows], values)
                continue
            # A gradient that is not finite would make codes of any value: these are not written.
            scaled, scale = self._scaled(values.contiguous(), BLOCK)
            write(state[moment][rows], self._pack(scaled, self._maps[moment]))
            target = state[f"{moment}_scale"][rows]
            write(target, scale.view_as(target))

    def _read(self, state: dict[str, torch.Tensor], moment: str, rows: slice) -> torch.Tensor:
        if f"{moment}_scale" not in state:
            return state[moment][rows].clone()
        scale = state[f"{moment}_scale"][rows].reshape(-1)
        found: torch.Tensor = self._unpack(state[moment][rows], self._maps[moment], scale)
        return found
