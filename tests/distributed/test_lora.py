"""LoRA, DoRA and rsLoRA against plain peft in a process without Drillyard: losses and adapters, on
1 and 2 ranks.

On two ranks with the frozen weights in their files, as on CPUs, and sharded and gathered, as on
GPUs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file
from tests.distributed import adapter_case
from tests.distributed.adapter_case import (
    LORA,
    adapter_config,
    record_batches,
    train_with_peft,
    write_base,
)
from tests.distributed.ranks import run_ranks
from tests.distributed.training_case import LLAMA

from drillyard.training import model_setup

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
    model_setup.weights_in_files = lambda *_: set()
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
    as_on_gpus = run_ranks(train_with_sharded_base, 2, str(directory), variant, str(sharded))[0]
    assert len(expected) == 20 and expected[0] - expected[-1] > 0.4
    assert np.abs(np.subtract(alone, expected)).max() < 1e-5
    assert np.abs(np.subtract(on_two, expected)).max() < 1e-5
    assert on_two == as_on_gpus
    theirs = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    for folder in (tmp_path, shared, sharded):
        ours = load_file(folder / "end" / "adapter_model.safetensors")
        assert ours.keys() == theirs.keys()
        for name, tensor in theirs.items():
            assert (ours[name] - tensor).abs().max() < 1e-4, name
