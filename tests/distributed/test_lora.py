"""LoRA, DoRA and rsLoRA against plain peft in a process without Drillyard: losses and adapters, on
1 and 2 ranks; and frozen weights that every rank holds whole against those that are sharded."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.distributed import adapter_case
from tests.distributed.adapter_case import (
    LORA,
    adapter_config,
    record_batches,
    shard_frozen_weights,
    train_with_peft,
    write_base,
)
from tests.distributed.ranks import run_ranks
from tests.distributed.training_case import (
    LLAMA,
    build,
    full_parameters,
    resume_from,
    run_steps,
    start_save,
)
from torch.distributed.tensor import DTensor

from drillyard.evaluation.generate import generate
from drillyard.models.export import export
from drillyard.training.model_setup import fill_frozen_weights

PEFT = {"r": 4, "lora_alpha": 12, "target_modules": "all-linear"}
VARIANTS: dict[str, dict[str, Any]] = {
    "lora": {},
    "dora": {"use_dora": True},
    "rslora": {"use_rslora": True},
}


def config_of(directory: str, variant: str) -> Any:
    return adapter_config(Path(directory), model__lora=LORA | {"variant": variant})


def train_on_rank(directory: str, variant: str, folder: str) -> list[float]:
    return adapter_case.train(config_of(directory, variant), folder)


def train_with_sharded_base(directory: str, variant: str, folder: str) -> list[float]:
    shard_frozen_weights()
    return train_on_rank(directory, variant, folder)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("lora")
    write_base(made, LLAMA | {"initializer_range": 0.15})
    return made


def record_on_rank(directory: str, path: str) -> None:
    record_batches(config_of(directory, "lora"), Path(path))


@pytest.mark.parametrize("variant", VARIANTS)
def test_losses_and_adapters_are_those_of_peft(
    directory: Path, tmp_path: Path, variant: str
) -> None:
    run_ranks(record_on_rank, 1, str(directory), str(tmp_path / "steps.json"))
    alone = run_ranks(train_on_rank, 1, str(directory), variant, str(tmp_path))[0]
    expected = train_with_peft(
        config_of(str(directory), variant), tmp_path, PEFT | VARIANTS[variant]
    )
    shared, sharded = tmp_path / "shared", tmp_path / "sharded"
    on_two = run_ranks(train_on_rank, 2, str(directory), variant, str(shared))[0]
    on_shards = run_ranks(train_with_sharded_base, 2, str(directory), variant, str(sharded))[0]
    assert len(expected) == 20 and expected[0] - expected[-1] > 0.4
    assert np.abs(np.subtract(alone, expected)).max() < 1e-5
    assert np.abs(np.subtract(on_two, expected)).max() < 1e-5
    assert on_two == on_shards
    theirs = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    for folder in (tmp_path, shared, sharded):
        ours = load_file(folder / "end" / "adapter_model.safetensors")
        assert ours.keys() == theirs.keys()
        for name, tensor in theirs.items():
            assert (ours[name] - tensor).abs().max() < 1e-4, name


STEPS, SAVED = 6, 3
WIDE = LLAMA | {"hidden_size": 64, "intermediate_size": 128, "initializer_range": 0.15}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
BASES: dict[str, dict[str, Any]] = {
    "llama": WIDE,
    "tied": WIDE | {"tie_word_embeddings": True},
    "experts": WIDE | EXPERTS | {"architecture": "mixtral"},
}
FROZEN_CASES: dict[str, dict[str, Any]] = {
    "fp64": {},
    "bf16": {"training__precision": "bf16"},
    "tied-recomputed": {"base": "tied", "training__activation_checkpointing": "full"},
    "dora": {"model__lora": LORA | {"variant": "dora"}},
    "some-layers": {"model__lora": LORA | {"target_modules": ["q_proj"]}},
    "nf4": {"training__precision": "bf16", "model__quantization": "nf4"},
    "experts": {"base": "experts"},
    "copies": {"parallelism__replicate": 2, "parallelism__shard": 1},
    "random": {"model__init": "random"},
    "compiled": {"training__precision": "bf16", "training__compile": True},
}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Bases in fp32, which no precision of the cases can map."""
    made = tmp_path_factory.mktemp("frozen")
    for name, config in BASES.items():
        (made / name).mkdir()
        write_base(made / name, config)
    return made


def frozen_case(bases: str, name: str, *, alone: bool = False) -> Any:
    changes = {"training__precision": "fp64", "training__steps": STEPS} | FROZEN_CASES[name]
    directory = Path(bases) / changes.pop("base", "llama")
    if alone:
        changes = {key: value for key, value in changes.items() if "parallelism" not in key}
    return adapter_config(directory, **changes)


def frozen_run(bases: str, name: str, folder: str, whole: bool) -> dict[str, Any]:
    """Six steps with a save after three, and what is left of them."""
    if not whole:
        shard_frozen_weights()
    compile_with_inductor = torch.compile
    torch.compile = functools.partial(compile_with_inductor, backend="aot_eager")
    trainer, model = build(frozen_case(bases, name, alone=folder.endswith("alone")))
    frozen = [each for each in model.root.parameters() if not each.requires_grad]
    figures = run_steps(trainer, 0, SAVED).tolist()
    start_save(trainer, SAVED, folder).close()
    figures += run_steps(trainer, SAVED, STEPS).tolist()
    texts = generate(
        model.root, [[5, 6, 7]], trainer.ranks, end_tokens=[], max_new_tokens=4, batch_size=1
    )
    weights = full_parameters(model.root)
    trained = {name: each.detach() for name, each in weights.items() if "lora_" in name}
    export(model.causal_lm, Path(folder) / "merged", adapters="merged")
    return {
        "says": model.resolved.setup.holds_frozen_whole,
        "sharded": {isinstance(each, DTensor) for each in frozen},
        "dtypes": {each.dtype for each in frozen},
        "figures": figures,
        "texts": texts,
        "adapters": trained,
    }


def resumed_run(bases: str, name: str, folder: str, whole: bool) -> list[Any]:
    """The last three steps, from what was saved."""
    if not whole:
        shard_frozen_weights()
    config = frozen_case(bases, name)
    trainer, model = build(config, filled=False)
    assert resume_from(trainer, folder) == SAVED
    fill_frozen_weights(config, model)
    return run_steps(trainer, SAVED, STEPS).tolist()


@pytest.mark.parametrize("name", FROZEN_CASES)
def test_frozen_weights_whole_on_every_rank_train_as_sharded_ones_to_the_bit(
    bases: Path, tmp_path: Path, name: str
) -> None:
    """Each rank multiplies by the same numbers, wherever they were, and the adapters are summed
    over the same ranks in the same order."""
    folders = [str(tmp_path / each) for each in ("whole", "sharded", "alone")]
    found, expected = (
        run_ranks(frozen_run, 2, str(bases), name, folder, is_whole)
        for folder, is_whole in zip(folders, (True, False), strict=False)
    )
    for one, other in zip(found, expected, strict=True):
        assert one["says"] and one["sharded"] == {False}
        assert not other["says"] and other["sharded"] == {True}
        assert one["dtypes"] == other["dtypes"]
        for key in ("figures", "texts"):
            assert one[key] == other[key]
        assert one["adapters"].keys() == other["adapters"].keys()
        for key, weight in one["adapters"].items():
            assert torch.equal(weight, other["adapters"][key]), key
    merged, of_shards = (
        load_file(Path(folder) / "merged" / "model.safetensors") for folder in folders[:2]
    )
    is_bf16 = FROZEN_CASES[name].get("training__precision") == "bf16"
    for key, weight in merged.items():
        # A merge multiplies the rows that a rank holds, whose number decides how it rounds.
        torch.testing.assert_close(weight, of_shards[key], rtol=2**-7 if is_bf16 else 1e-9, atol=0)
    if is_bf16:
        return  # One rank sums its micro-batches in another order than two ranks theirs.
    alone = run_ranks(frozen_run, 1, str(bases), name, folders[2], True)[0]
    assert np.abs(np.subtract(found[0]["figures"], alone["figures"])).max() < 1e-6
    for key, weight in alone["adapters"].items():
        assert (found[0]["adapters"][key] - weight).abs().max() < 1e-6, key


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("fp64", (2, True), (2, False)),
        ("fp64", (2, False), (2, True)),
        ("nf4", (2, True), (2, False)),
        ("nf4", (2, False), (2, True)),
        ("dora", (2, True), (1, True)),
        ("experts", (1, True), (2, True)),
        ("experts", (1, True), (2, False)),
    ],
)
def test_a_checkpoint_continues_with_frozen_weights_whole_and_sharded(
    bases: Path, tmp_path: Path, name: str, before: tuple[int, bool], after: tuple[int, bool]
) -> None:
    """To the bit on as many ranks; on another number the sums have another order."""
    arguments = str(bases), name, str(tmp_path)
    first = run_ranks(frozen_run, before[0], *arguments, before[1])[0]["figures"][SAVED:]
    second = run_ranks(resumed_run, after[0], *arguments, after[1])[0]
    if before[0] == after[0]:
        assert first == second
    else:
        assert np.abs(np.subtract(first, second)).max() < 1e-9
