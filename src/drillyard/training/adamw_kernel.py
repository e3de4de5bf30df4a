"""AdamW in one pass on a GPU: clipping, update, and the copy of the weights in compute precision.

Bytes moved per fp32 parameter: 28 (weight, gradient and moments read; weight and moments written),
and 2 where a copy in bf16 is written too. Torch's operators move 36 (the clipped gradient is
written and read again), and 6 for the copy. The arithmetic is that of torch's fused AdamW
(Loshchilov and Hutter, arXiv 1711.05101) in fp32; its rounding may differ in the last bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, Final

import torch
import triton
import triton.language as tl

_PART: Final = 1024
"""Numbers that a program updates."""


def _update_part(
    weights: tl.tensor,
    gradients: tl.tensor,
    first_moments: tl.tensor,
    second_moments: tl.tensor,
    copies: tl.tensor,
    scalars: tl.tensor,
    count: int,
    beta1: float,
    beta2: float,
    epsilon: float,
    weight_decay: float,
    has_copy: tl.constexpr,
    part: tl.constexpr,
) -> None:
    factor = tl.load(scalars)
    learning_rate = tl.load(scalars + 1)
    correction1 = tl.load(scalars + 2)
    root_of_correction2 = tl.load(scalars + 3)
    is_skipped = tl.load(scalars + 4)
    place = tl.program_id(0).to(tl.int64) * part + tl.arange(0, part)
    chosen = place < tl.where(is_skipped == 0.0, count, 0)
    gradient = tl.load(gradients + place, mask=chosen).to(tl.float32) * factor
    weight = tl.load(weights + place, mask=chosen)
    first = tl.load(first_moments + place, mask=chosen)
    second = tl.load(second_moments + place, mask=chosen)
    first = beta1 * first + (1.0 - beta1) * gradient
    second = beta2 * second + (1.0 - beta2) * gradient * gradient
    weight -= learning_rate * weight_decay * weight
    spread = tl.div_rn(tl.sqrt_rn(second), root_of_correction2) + epsilon
    weight -= tl.div_rn(learning_rate, correction1) * tl.div_rn(first, spread)
    tl.store(weights + place, weight, mask=chosen)
    tl.store(first_moments + place, first, mask=chosen)
    tl.store(second_moments + place, second, mask=chosen)
    if has_copy:
        tl.store(copies + place, weight.to(copies.dtype.element_ty), mask=chosen)


part_kernel: Any = triton.jit(_update_part)


class OnePassAdamW:
    """As much of `torch.optim.AdamW` as ShardedAdamW uses, for contiguous fp32 parameters on a GPU.

    `factor`: of all gradients, and `found_inf`: 1 skips a step; both on the device. `copies`: by
    parameter, its copy in compute precision, which a step writes too.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        self.param_groups = [{**group, "lr": lr, "betas": betas, "eps": eps} for group in groups]
        self.state: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        self.found_inf: torch.Tensor | None = None
        self.factor: torch.Tensor | None = None
        self.copies: Mapping[torch.Tensor, torch.Tensor] = {}

    @torch.no_grad()
    def step(self) -> None:
        """Update the parameters, their moments and copies."""
        first = next(iter(self.state.values()))["step"]
        taken = torch.ones_like(first) if self.found_inf is None else 1 - self.found_inf
        # All parameters have done as many steps.
        steps = [state["step"] for state in self.state.values()]
        torch._foreach_add_(steps, [taken] * len(steps))
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            number = first.double()
            scalars = torch.stack(
                [
                    torch.ones_like(number) if self.factor is None else self.factor.double(),
                    torch.full_like(number, group["lr"]),
                    1 - beta1**number,
                    (1 - beta2**number).sqrt(),
                    1 - taken.double(),
                ]
            ).float()
            for parameter in group["params"]:
                state = self.state[parameter]
                assert parameter.grad is not None
                _update(
                    parameter,
                    parameter.grad,
                    (state["exp_avg"], state["exp_avg_sq"]),
                    self.copies.get(parameter),
                    scalars,
                    (beta1, beta2, group["eps"], group["weight_decay"]),
                )


def _update(
    weight: torch.Tensor,
    gradient: torch.Tensor,
    moments: tuple[torch.Tensor, torch.Tensor],
    copy: torch.Tensor | None,
    scalars: torch.Tensor,
    constants: tuple[float, float, float, float],
) -> None:
    """`scalars` and `constants` are the kernel's, in its order."""
    if not weight.numel():
        return
    part_kernel[(triton.cdiv(weight.numel(), _PART),)](
        weight,
        gradient.contiguous(),
        *moments,
        weight if copy is None else copy,
        scalars,
        weight.numel(),
        *constants,
        has_copy=copy is not None,
        part=_PART,
    )
    torch.autograd.graph.increment_version([weight, *moments, *([] if copy is None else [copy])])


@cache
def agrees_with_torch(device: torch.device) -> bool:
    """Whether three steps of the kernel on this device are those of `torch.optim.AdamW`: a new
    triton or GPU must not train wrongly without a word."""
    generator = torch.Generator(device).manual_seed(0)
    settings: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8}
    weight = torch.randn(3, 1000, device=device, generator=generator)
    expected, found = weight.clone(), weight.clone()
    theirs = torch.optim.AdamW([expected], weight_decay=0.1, **settings)
    ours = OnePassAdamW([{"params": [found], "weight_decay": 0.1}], **settings)
    ours.state[found] = {
        "step": torch.zeros((), device=device),
        "exp_avg": torch.zeros_like(found),
        "exp_avg_sq": torch.zeros_like(found),
    }
    copy = torch.empty_like(found, dtype=torch.bfloat16)
    ours.copies = {found: copy}
    ours.factor = torch.full((), 0.5, device=device)
    for _ in range(3):
        found.grad = torch.randn(weight.shape, device=device, generator=generator)
        expected.grad = found.grad * 0.5
        theirs.step()
        ours.step()
    return bool(
        torch.allclose(found, expected, rtol=1e-5, atol=1e-6)
        and torch.equal(copy, found.bfloat16())
    )
