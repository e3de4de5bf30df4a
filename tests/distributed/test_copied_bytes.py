"""Bytes that a step copies for the layout of weights and gradients, on 1, 2 and 8 ranks, counted by
a dispatch mode over the trainer's own step and compared with a formula per parameter."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from tests.distributed.memory_case import Case, assemble, fake_ranks, setup_of
from tests.distributed.test_memory_tracker import ON_ALL, llama
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as groups
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from drillyard.estimation.memory.fsdp import REWRITTEN_IN
from drillyard.estimation.setup import installed_torch
from drillyard.estimation.step_work import count_work, optimizer_bytes
from drillyard.parallel.whole_weights import WholeWeights
from drillyard.training import optimizer
from drillyard.training.trainer import StepWindow, Trainer

MODEL = llama(num_attention_heads=8, num_key_value_heads=8, hidden_size=256, vocab_size=1024)
KNOWN_TO_MOVE_NOTHING = (
    "device",
    "resize_",
    "_record_function_enter_new",
    "_record_function_exit",
)
IS_OLDER = installed_torch() < REWRITTEN_IN


class CopiedBytes(TorchDispatchMode):
    """Bytes read and written by operators, by the part of the step in which they run."""

    def __init__(self, trainer: Trainer) -> None:
        super().__init__()
        self.part = ""
        self.bytes = dict.fromkeys(("gather", "reduce", "write", "widen"), 0)
        self.read_by_norm = 0
        self.shapes = {parameter.shape for parameter in trainer.root.parameters()}

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = operator(*args, **kwargs)
        if self.part:
            self.bytes[self.part] += moved(operator, args, kwargs, result)
        elif operator is torch.ops.aten._to_copy.default and args[0].shape in self.shapes:
            self.bytes["widen"] += size_of(args[0]) + size_of(result)
        elif operator is torch.ops.aten._foreach_norm.Scalar:
            self.read_by_norm += size_of(args[0])
        return result

    @contextlib.contextmanager
    def during(self, part: str) -> Iterator[None]:
        before, self.part = self.part, part
        yield
        self.part = before


def size_of(*values: Any) -> int:
    return sum(t.numel() * t.itemsize for t in tree_leaves(values) if isinstance(t, torch.Tensor))


def moved(operator: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Bytes that an operator of FSDP2 or a copy reads and writes."""
    name = operator.name().partition("::")[2].partition(".")[0]
    match name:
        case "all_gather_copy_in" | "split_with_sizes_copy":
            return 2 * size_of(args[0])
        case "chunk_cat" | "chunk_cat_mixed_dtype" | "_chunk_cat":
            return size_of(args[0]) + size_of(kwargs["out"] if "out" in kwargs else args[-1])
        case "_allgather_base_" | "_reduce_scatter_base_" | "copy_" | "_foreach_copy_":
            return size_of(args[0], args[1])
        case "_to_copy" | "div" | "mul":
            return size_of(args[0], result)
        case "div_" | "mul_":
            return 2 * size_of(args[0])
        case "_foreach_norm" | "stack" | "clamp" | "reciprocal" | "allreduce_":
            return size_of(args[0])
    assert operator.is_view or "empty" in name or name in KNOWN_TO_MOVE_NOTHING, operator
    return 0


def counted(case: Case) -> tuple[dict[str, int], Trainer]:
    """Bytes of the second step, but those that the norm reads."""
    count, trainer = count_bytes(case)
    return count.bytes, trainer


def count_bytes(case: Case) -> tuple[CopiedBytes, Trainer]:
    with (
        fake_ranks(case.shard, case.replicate) as ranks,
        FakeTensorMode(allow_non_fake_inputs=True),
    ):
        trainer = assemble(case, ranks)
        trainer.train_step(0, StepWindow(0.0))
        count = CopiedBytes(trainer)

        def within(part: str, function: Any) -> Any:
            def counts(*args: Any, **kwargs: Any) -> Any:
                with count.during(part):
                    return function(*args, **kwargs)

            return counts

        with contextlib.ExitStack() as patches:
            for owner, name, part in (
                (groups.FSDPParamGroup, "unshard", "gather"),
                (groups.FSDPParamGroup, "wait_for_unshard", "gather"),
                (groups, "foreach_reduce", "reduce"),
                (WholeWeights, "use", "write"),
            ):
                patches.enter_context(
                    mock.patch.object(owner, name, within(part, getattr(owner, name)))
                )
            with count:
                trainer.train_step(1, StepWindow(0.0))
        return count, trainer


class CollectiveBytes(TorchDispatchMode):
    """Bytes of what ranks hold together, in each of a step's gathers and reductions."""

    def __init__(self) -> None:
        super().__init__()
        self.gathered: list[int] = []
        self.reduced: list[int] = []

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        match operator.name():
            case "c10d::_allgather_base_":
                self.gathered.append(size_of(args[0]))
            case "c10d::_reduce_scatter_base_":
                self.reduced.append(size_of(args[1]))
        return operator(*args, **(kwargs or {}))


def collectives(case: Case) -> tuple[CollectiveBytes, Trainer]:
    with (
        fake_ranks(case.shard, case.replicate) as ranks,
        FakeTensorMode(allow_non_fake_inputs=True),
    ):
        trainer = assemble(case, ranks)
        trainer.train_step(0, StepWindow(0.0))
        with CollectiveBytes() as found:
            trainer.train_step(1, StepWindow(0.0))
        return found, trainer


def elements(trainer: Trainer, *, trained: bool | None = None) -> int:
    return sum(
        parameter.numel()
        for parameter in trainer.root.parameters()
        if trained in (None, parameter.requires_grad)
    )


def of_root(trainer: Trainer) -> int:
    """Elements that are gathered once a step: those outside of blocks."""
    return sum(p.numel() for n, p in trainer.root.named_parameters() if ".layers." not in n)


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_one_rank_that_holds_its_weights_gathers_and_reduces_nothing(
    precision: str, accumulation: int
) -> None:
    case = Case(
        MODEL, shard=1, keeps_unsharded=True, precision=precision, accumulation=accumulation
    )
    found, trainer = counted(case)
    head = trainer.root.causal_lm.lm_head.weight.numel()
    cast = 6 if precision == "bf16" else 0
    assert found["gather"] == found["reduce"] == 0
    assert found["write"] == cast * elements(trainer)
    # The head's gradient is summed in the loss by the products themselves. With one micro-batch
    # torch's AdamW has the others widened for its update.
    assert found["widen"] == cast * accumulation * (elements(trainer) - head)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_the_optimizer_of_gpus_clips_updates_and_copies_in_one_pass(
    precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """36 bytes a parameter (clip 8, update 28) and 6 for a copy become 28 and 2. Under bf16 the
    update and the norm read 2 bytes less each, and nothing is widened; the head's gradient is a sum
    in fp32."""
    pytest.importorskip("triton", reason="comes with builds of torch for GPUs")
    from drillyard.training import adamw_kernel

    updated: list[int] = []

    def update(
        weight: Any, gradient: Any, moments: Any, copy: Any, scalars: Any, constants: Any
    ) -> None:
        read = size_of(weight, gradient, *moments)
        updated.append(read + size_of(weight, *moments, *([] if copy is None else [copy])))

    monkeypatch.setattr(optimizer, "_fits_one_pass", lambda *_: True)
    monkeypatch.setattr(adamw_kernel, "_update", update)
    case = Case(MODEL, shard=1, keeps_unsharded=True, precision=precision)
    count, trainer = count_bytes(case)
    assert not any(count.bytes.values())
    every_step = updated[len(updated) // 2 :]
    assert len(every_step) == len(trainer.optimizer.shards)
    head = trainer.root.causal_lm.lm_head.weight.numel()
    narrow = 2 * (elements(trainer) - head) if precision == "bf16" else 0
    copy = 2 if precision == "bf16" else 0
    assert sum(every_step) == (28 + copy) * elements(trainer) - narrow
    assert count.read_by_norm == 4 * elements(trainer) - narrow
    setup = replace(setup_of(case), device_type="cuda")
    of_copies = copy * elements(trainer)
    assert sum(every_step) + count.read_by_norm == of_copies + optimizer_bytes(
        setup, elements(trainer)
    )


def test_frozen_weights_of_one_rank_are_not_copied() -> None:
    found, trainer = counted(Case(MODEL, shard=1, keeps_unsharded=True, lora=ON_ALL))
    trained = elements(trainer, trained=True)
    assert elements(trainer) > 20 * trained
    assert found == {"gather": 0, "reduce": 0, "write": 6 * trained, "widen": 6 * trained}


@pytest.mark.parametrize(("ranks", "keeps"), [(1, False), (2, False), (2, True), (8, False)])
def test_fsdp2_copies_what_its_formula_says(ranks: int, keeps: bool) -> None:
    """Per parameter on N ranks: a gather casts the shard and copies it into the buffer that is
    sent, transfers, and copies what arrived into the weights; a reduction copies gradients into a
    buffer and transfers. Among one rank one copy takes the place of buffers and transfer."""
    found, trainer = counted(Case(MODEL, shard=ranks, keeps_unsharded=keeps))
    gathered = elements(trainer) + (0 if keeps else elements(trainer) - of_root(trainer))
    one_gather = 6 + 4 if ranks == 1 else (6 + 4 + 2) / ranks + 2 + 4
    one_reduction = (2 + 4) + 4 + 4 / ranks
    assert found["gather"] == gathered * one_gather
    # From torch 2.15 on the head's gradient is wide before it is reduced.
    head = 0 if IS_OLDER else 2 * trainer.root.causal_lm.lm_head.weight.numel()
    assert found["reduce"] == elements(trainer) * one_reduction + head
    assert found["write"] == 0


EXPERTS = MODEL | {
    "architecture": "mixtral",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}


def padded(trainer: Trainer, ranks: int, *, trained: bool, of_root: bool = True) -> int:
    """Elements with rows filled up to a multiple of the ranks, as they are gathered."""
    return sum(
        -(-each.shape[0] // ranks) * ranks * each.shape[1:].numel()
        for name, each in trainer.root.named_parameters()
        if each.requires_grad == trained and (of_root or ".layers." in name)
    )


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("model", [MODEL, EXPERTS], ids=["llama", "experts"])
def test_frozen_weights_that_are_whole_cross_no_link(model: dict[str, Any], ranks: int) -> None:
    """Sharded, a micro-batch gathers every weight of a block twice and those of the root once.
    Whole, it gathers the adapters alone: twice, or once a step where they are kept. Gradients are
    the same. In the last of several micro-batches FSDP2 prefetches the adapters of one block once
    more, for a backward that does not come."""
    case = Case(model, shard=ranks, lora=ON_ALL, accumulation=2)
    sharded, trainer = collectives(case)
    adapters = padded(trainer, ranks, trained=True)
    frozen = padded(trainer, ranks, trained=False)
    of_blocks = padded(trainer, ranks, trained=False, of_root=False)
    assert frozen > 10 * adapters
    assert sum(sharded.gathered) == 2 * 2 * (2 * adapters + frozen + of_blocks)
    assert sum(sharded.reduced) == 2 * 4 * adapters
    whole, _ = collectives(replace(case, keeps_frozen_whole=True))
    of_block = adapters // 2
    assert sum(whole.gathered) == 2 * (2 * 2 * adapters + of_block)
    assert whole.reduced == sharded.reduced
    kept, _ = collectives(replace(case, keeps_unsharded=True))
    assert sum(kept.gathered) == 2 * (adapters + of_block)
    assert sum(kept.reduced) == 4 * adapters


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("quantization", [None, "nf4"])
def test_a_step_with_frozen_weights_whole_moves_what_its_formula_says(
    ranks: int, quantization: str | None
) -> None:
    """Adapters as all weights of a run without: 2 gathers of 2 bytes, a reduction of 4."""
    lora = {"rank": 8, "target_modules": "all-linear"}
    case = Case(MODEL, shard=ranks, lora=lora, quantization=quantization)
    whole = replace(case, keeps_frozen_whole=True)
    found, trainer = collectives(whole)
    trained = elements(trainer, trained=True)
    assert sum(found.gathered) == 2 * 2 * trained
    assert sum(found.reduced) == 4 * trained
    copied, _ = counted(whole)
    assert copied["gather"] == 2 * trained * ((6 + 4 + 2) / ranks + 2 + 4)
    assert copied["reduce"] == trained * ((2 + 4) + 4 + 4 / ranks)
    # What the estimate of the time counts.
    for one, gathered in ((whole, found), (case, collectives(case)[0])):
        work = count_work(setup_of(one))
        once = sum(unit.count * work.gathered_bytes(unit) for unit in work.units)
        assert sum(gathered.gathered) == 2 * once - work.gathered_bytes(work.root)
