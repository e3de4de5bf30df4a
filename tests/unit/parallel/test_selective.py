"""Selective checkpointing keeps what is dear to compute: attention, every kernel of it, and every
second product."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy

from drillyard.models import attention
from drillyard.parallel.parallelize import _save_expensive


def decided(operators: list[Any], *, is_recompute: bool = False) -> list[CheckpointPolicy]:
    policy = _save_expensive()
    return [policy(SimpleNamespace(is_recompute=is_recompute), operator) for operator in operators]


@pytest.mark.parametrize(
    "name", ["aten::_scaled_dot_product_flash_attention_for_cpu", "torch_attn::_varlen_attn"]
)
def test_outputs_of_attention_are_kept_whatever_its_kernel(name: str) -> None:
    namespace, _, operator = name.partition("::")
    # The policy looks kernels up by name: the module that registers that of packed documents must
    # come with ours.
    assert attention.varlen is importlib.import_module("torch.nn.attention.varlen")
    found = getattr(getattr(torch.ops, namespace), operator).default
    assert decided([found]) == [CheckpointPolicy.MUST_SAVE]


def test_every_second_matrix_product_is_kept_the_same_ones_in_backward() -> None:
    keep, again = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE
    products = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default] * 2
    assert decided(products) == decided(products, is_recompute=True) == [keep, again, keep, again]
    assert decided([torch.ops.aten.add.Tensor]) == [again]
