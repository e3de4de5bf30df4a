"""AdamW in one pass: the kernel of GPUs, where triton interprets it on the CPU, against fp64;
and that it compiles."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

KERNEL = """
import sys, torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from drillyard.training import adamw_kernel

if sys.argv[1] == "compiled":
    fixed = {"has_copy": True, "part": 1024}
    for gradient in ("bf16", "fp32"):
        signature = {
            "weights": "*fp32", "gradients": f"*{gradient}", "first_moments": "*fp32",
            "second_moments": "*fp32", "copies": "*bf16", "scalars": "*fp32", "count": "i64",
        }
        signature |= dict.fromkeys(("beta1", "beta2", "epsilon", "weight_decay"), "fp32")
        signature |= dict.fromkeys(fixed, "constexpr")
        source = ASTSource(fn=adamw_kernel.part_kernel, signature=signature, constexprs=fixed)
        for capability in (80, 90, 100):
            assert compile(source, target=GPUTarget("cuda", capability, 32)).asm["cubin"]
    sys.exit()

adamw_kernel._PART = 64
torch.manual_seed(1)
shapes, decays = [(5,), (64,), (7, 33), (3, 2, 129), (0, 4)], (0.1, 0.0)
settings = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8}
ours, theirs = [], []
for shape in shapes:
    value = torch.randn(shape)
    ours.append(value.clone())
    theirs.append(value.double())
groups = [(slice(0, 2), decays[0]), (slice(2, None), decays[1])]
found = adamw_kernel.OnePassAdamW(
    [{"params": ours[part], "weight_decay": decay} for part, decay in groups], **settings
)
expected = torch.optim.AdamW(
    [{"params": theirs[part], "weight_decay": decay} for part, decay in groups], **settings
)
for each in ours:
    found.state[each] = {
        "step": torch.zeros(()), "exp_avg": torch.zeros_like(each),
        "exp_avg_sq": torch.zeros_like(each),
    }
copied = ours[2]
found.copies = {copied: torch.zeros_like(copied, dtype=torch.bfloat16)}
for number in range(6):
    found.param_groups[0]["lr"] = expected.param_groups[0]["lr"] = 3e-3 / (number + 1)
    skipped = number == 2
    found.found_inf = torch.tensor(float(skipped))
    found.factor = torch.tensor(0.25) if number % 2 else None
    for mine, other in zip(ours, theirs):
        mine.grad_dtype = None
        # The strides of a gradient may be others than the weight's.
        gradient = torch.randn(mine.shape[::-1]).permute(*reversed(range(mine.ndim)))
        mine.grad = gradient.bfloat16() if number % 3 == 0 else gradient
        other.grad = mine.grad.double() * (0.25 if number % 2 else 1)
        if skipped:
            mine.grad = torch.full_like(mine, float("nan"))
    before = [each.clone() for each in ours]
    versions = [each._version for each in ours]
    found.step()
    if skipped:
        assert all(map(torch.equal, before, ours))
        continue
    expected.step()
    for mine, other, version in zip(ours, theirs, versions):
        torch.testing.assert_close(mine.double(), other, rtol=2e-6, atol=2e-7)
        assert mine._version > version or not mine.numel()
        for moment in ("exp_avg", "exp_avg_sq"):
            a, b = found.state[mine][moment].double(), expected.state[other][moment]
            torch.testing.assert_close(a, b, rtol=2e-6, atol=1e-7)
    torch.testing.assert_close(found.copies[copied].float(), copied, rtol=2**-7, atol=0)
# Some versions of the interpreter cut where a GPU rounds. The check at the start must see that.
rounds = torch.equal(found.copies[copied], copied.bfloat16())
assert adamw_kernel.agrees_with_torch(torch.device("cpu")) == rounds
assert {float(state["step"]) for state in found.state.values()} == {5.0}
"""


@pytest.mark.parametrize("how", ["interpreted", "compiled"])
def test_the_kernel_against_fp64(how: str) -> None:
    """At odd sizes, with narrow and transposed gradients, skipped steps, and copies in bf16; and
    that it compiles."""
    environment = os.environ | ({"TRITON_INTERPRET": "1"} if how == "interpreted" else {})
    command = [sys.executable, "-c", KERNEL, how]
    subprocess.run(command, env=environment, check=True, timeout=300)
