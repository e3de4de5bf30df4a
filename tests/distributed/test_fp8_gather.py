"""Weights gathered in fp8: the bits of a gather in bf16, whatever else the run does; files that
know nothing of it; and the bytes that a step gathers, copies and keeps, by formula."""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from tests.distributed.adapter_case import adapter_config, shard_frozen_weights, write_base
from tests.distributed.memory_case import Case, assemble, fake_ranks, measure, setup_of
from tests.distributed.ranks import run_ranks
from tests.distributed.test_copied_bytes import MODEL, collectives, counted
from tests.distributed.training_case import (
    LLAMA,
    build,
    make_config,
    resume_from,
    run_steps,
    start_save,
    write_documents,
)
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor

from drillyard.config.run import RunConfig
from drillyard.estimation import resolved_setup
from drillyard.estimation.memory.autograd import MemoryKind
from drillyard.estimation.memory.fsdp import fsdp_unit
from drillyard.estimation.memory.step_memory import StepMemory
from drillyard.estimation.step_work import count_work
from drillyard.estimation.timeline import unit_copies
from drillyard.evaluation.generate import generate
from drillyard.models.export import export
from drillyard.parallel.ranks import Ranks, start_ranks
from drillyard.training import model_setup
from drillyard.training.model_setup import fill_frozen_weights

STEPS, SAVED = 4, 2
GATHERED_TWICE = {"gathered": "twice"}
VARIANTS: dict[str, dict[str, Any]] = {
    "kept": {},
    "kept, micro-batches": {"training__global_batch_size": 8},
    "recomputed, micro-batches": {
        "training__global_batch_size": 8,
        "training__activation_checkpointing": "full",
    }
    | GATHERED_TWICE,
    "recomputed in part": {"training__activation_checkpointing": "selective"} | GATHERED_TWICE,
    "compiled": {"training__compile": True} | GATHERED_TWICE,
    "moments in 8 bits, biases, mixed": {
        "training__optimizer": {"name": "adamw-8bit", "learning_rate": 4.0e-3},
        "model__config": LLAMA
        | {"architecture": "qwen2", "hidden_size": 64, "intermediate_size": 264},
    },
}


def gather_in_bf16() -> None:
    """In this process, as before there was another way."""
    model_setup.gather_in_fp8 = lambda root: 0


@contextlib.contextmanager
def gathered_twice() -> Iterator[None]:
    """Weights are given back between forward and backward, as of large models."""
    with (
        mock.patch.object(resolved_setup, "unsharded_is_small", lambda *_: False),
        mock.patch.object(resolved_setup, "keep_whole", lambda setup, memory_gib: setup),
    ):
        yield


def steps_of_all(
    directory: str, in_fp8: bool, variants: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    if not in_fp8:
        gather_in_bf16()
    torch.compile = functools.partial(torch.compile, backend="aot_eager")
    common = {"training__precision": "fp8", "training__steps": STEPS}
    found: dict[str, Any] = {}
    ranks = None
    for name, changes in variants.items():
        settings = {key: value for key, value in changes.items() if key != "gathered"}
        if not in_fp8:
            # Traced and not generated, the same operators give the same bits.
            settings.pop("training__compile", None)
        config = make_config(Path(directory), **common | settings)
        ranks = ranks or start_ranks(config.training, config.parallelism)
        with gathered_twice() if "gathered" in changes else contextlib.nullcontext():
            found[name] = steps_of(config, ranks, in_fp8)
    return found


def steps_of(config: RunConfig, ranks: Ranks, in_fp8: bool) -> list[Any]:
    """Losses and norms, and the tokens that are generated in between."""
    trainer, model = build(config, ranks)
    assert model.gathers_fp8 == in_fp8
    rows = run_steps(trainer, 0, SAVED).tolist()
    texts = generate(
        model.root, [[5, 6, 7]], trainer.ranks, end_tokens=[], max_new_tokens=4, batch_size=1
    )
    for each in model.root.parameters():
        assert type(each.data) is DTensor and type(each.to_local().detach()) is torch.Tensor
    return [*rows, texts, *run_steps(trainer, SAVED, STEPS).tolist()]


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("documents")
    write_documents(made)
    return made


def test_losses_are_those_of_a_gather_in_bf16_to_the_bit(documents: Path) -> None:
    found, expected = (
        run_ranks(steps_of_all, 2, str(documents), in_fp8, VARIANTS)[0] for in_fp8 in (True, False)
    )
    assert found == expected


@pytest.mark.parametrize(
    ("ranks", "changes"),
    [
        (3, {"training__global_batch_size": 3}),  # rows do not divide
        (4, {"parallelism__replicate": 2} | GATHERED_TWICE),
    ],
)
def test_any_number_of_ranks_and_copies(
    documents: Path, ranks: int, changes: dict[str, Any]
) -> None:
    found, expected = (
        run_ranks(steps_of_all, ranks, str(documents), in_fp8, {"": changes})[0]
        for in_fp8 in (True, False)
    )
    assert found == expected


def saved_run(directory: str, in_fp8: bool, resumes: str | None) -> list[Any]:
    """Steps with a save after some, or those after that of `resumes`; the weights at the end are
    exported."""
    if not in_fp8:
        gather_in_bf16()
    config = make_config(Path(directory), training__precision="fp8", training__steps=STEPS)
    with gathered_twice():
        trainer, model = build(config, filled=resumes is None)
    rows = []
    if resumes is None:
        rows = run_steps(trainer, 0, SAVED).tolist()
        start_save(trainer, SAVED, f"{directory}/saved-{in_fp8}").close()
    else:
        assert resume_from(trainer, resumes) == SAVED
    rows += run_steps(trainer, SAVED, STEPS).tolist()
    if trainer.ranks.world_size == 2:
        export(model.causal_lm, Path(directory) / f"end-{in_fp8}-{resumes is None}")
    return rows


def test_checkpoints_and_exports_know_nothing_of_it(documents: Path) -> None:
    rows, expected = (
        run_ranks(saved_run, 2, str(documents), in_fp8, None)[0] for in_fp8 in (True, False)
    )
    assert rows == expected
    of_files = [
        digests(documents / f"saved-{in_fp8}" / "step-00000002") for in_fp8 in (True, False)
    ]
    assert of_files[0] == of_files[1] and of_files[0]
    for in_fp8 in (True, False):
        other = str(documents / f"saved-{not in_fp8}")
        assert run_ranks(saved_run, 2, str(documents), in_fp8, other)[0] == rows[SAVED:]
    for ranks in (1, 4):
        found = run_ranks(saved_run, ranks, str(documents), True, str(documents / "saved-True"))[0]
        assert torch.tensor(found).allclose(torch.tensor(rows[SAVED:]), rtol=0.01)
    ends = [digests(documents / f"end-{a}-{b}") for a in (True, False) for b in (True, False)]
    assert all(each == ends[0] for each in ends) and ends[0]


def digests(folder: Path) -> dict[str, str]:
    """Of the files that hold tensors."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.suffix in (".distcp", ".safetensors")
    }


def adapter_run(directory: str, in_fp8: bool, variant: str) -> tuple[list[Any], bool]:
    shard_frozen_weights()
    if not in_fp8:
        gather_in_bf16()
    lora = {"rank": 4, "alpha": 12.0, "target_modules": "all-linear", "variant": variant}
    changes = {"training__precision": "fp8", "training__steps": STEPS}
    config = adapter_config(
        Path(directory), model={"id": f"{directory}/base", "lora": lora}, **changes
    )
    trainer, model = build(config)
    rows = run_steps(trainer, 0, SAVED).tolist()
    start_save(trainer, SAVED, f"{directory}/adapters-{in_fp8}").close()
    again, other = build(config, trainer.ranks, filled=False)
    fill_frozen_weights(config, other)
    assert resume_from(again, f"{directory}/adapters-{in_fp8}") == SAVED
    return rows + run_steps(again, SAVED, STEPS).tolist(), model.gathers_fp8


def test_frozen_weights_that_are_sharded_are_gathered_in_fp8_but_beside_dora(
    tmp_path: Path,
) -> None:
    write_base(tmp_path, LLAMA)
    (found, is_used), (expected, is_not) = (
        run_ranks(adapter_run, 2, str(tmp_path), in_fp8, "lora")[0] for in_fp8 in (True, False)
    )
    assert found == expected and is_used and not is_not
    assert not run_ranks(adapter_run, 2, str(tmp_path), True, "dora")[0][1]


def one_rank(directory: str) -> bool:
    """Whether a rank that is alone, under FSDP2, gathers in fp8."""
    config = make_config(Path(directory), training__precision="fp8", training__steps=STEPS)
    with gathered_twice():
        return build(config)[1].gathers_fp8


def test_a_rank_that_is_alone_casts_as_before(documents: Path) -> None:
    assert not run_ranks(one_rank, 1, str(documents))[0]


def fp8_case(ranks: int, **changes: Any) -> tuple[Any, Any]:
    case = Case(MODEL, shard=ranks, precision="fp8", **changes)
    return case, replace(setup_of(case), casts_before_gather=True)


@pytest.mark.parametrize("ranks", [2, 8])
def test_a_step_gathers_and_copies_what_its_formula_says(ranks: int) -> None:
    """A byte per weight and gather instead of 2; of a shard 17 for the cast instead of 6, once a
    step 4 for the scale; 5 bytes of copies and transfers per gathered byte on each rank."""
    case, setup = fp8_case(ranks)
    found, trainer = collectives(case)
    weights = {name: each.numel() for name, each in trainer.root.named_parameters()}
    in_fp8 = sum(size for name, size in weights.items() if "_proj" in name)
    of_root = sum(size for name, size in weights.items() if ".layers." not in name)
    norms = sum(weights.values()) - in_fp8 - of_root
    assert sum(found.gathered) == 2 * in_fp8 + 2 * 2 * norms + 2 * of_root
    assert sum(found.reduced) == 4 * sum(weights.values())
    copied, _ = counted(case)
    in_bf16 = (of_root + 2 * norms) * ((6 + 4 + 2) / ranks + 2 + 4)
    of_fp8 = in_fp8 * (2 * ((17 + 2 + 1) / ranks + 1 + 2) + 4 / ranks)
    # Beside these the scales themselves, a few numbers for each weight.
    assert in_bf16 + of_fp8 <= copied["gather"] < (in_bf16 + of_fp8) * 1.001
    work = count_work(setup)
    once = sum(unit.count * work.gathered_bytes(unit) for unit in work.units)
    assert sum(found.gathered) == 2 * once - work.gathered_bytes(work.root)
    there = sum(unit.count * unit_copies(setup, work, unit)[0] for unit in work.units)
    # The estimate counts the cast and the copy into the weights, and no transfers.
    assert there == in_fp8 * (21 / ranks + 2) + (of_root + norms) * (6 / ranks + 4)


def test_a_gathered_weight_takes_a_byte() -> None:
    ranks = 3
    case, setup = fp8_case(ranks, keeps_unsharded=True)
    measured, step = measure(case), StepMemory(setup)
    kept = step.ledger.at_peak[MemoryKind.GATHERED]
    scales = 4 * 2 * 7 * 2  # of weights in two blocks, and the copy that a parameter refers to
    assert kept <= measured.kinds["Unsharded Param"] <= kept + scales
    assert measured.parameters - step.ledger.at_peak[MemoryKind.PARAMETERS] <= 128
    exact = StepMemory(replace(setup, casts_before_gather=False))
    in_fp8 = sum(fsdp_unit(each.tensors, setup).gathered_fp8 for each in setup.spec.blocks)
    assert exact.ledger.at_peak[MemoryKind.GATHERED] - kept == in_fp8 * ranks


def test_buffers_of_gathers_take_a_byte() -> None:
    case, setup = fp8_case(8)
    buffers = StepMemory(setup).ledger.at_peak[MemoryKind.ALL_GATHER]
    assert measure(case).kinds["All Gather"] == buffers > 0
    with fake_ranks(8, 1) as ranks, FakeTensorMode(allow_non_fake_inputs=True):
        assert assemble(case, ranks).model.gathers_fp8
