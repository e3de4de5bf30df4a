"""Adapters beside weights in nf4: the weights of every forward to the bit, and training as on them
unpacked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from tests.distributed import adapter_case, training_case
from tests.distributed.adapter_case import LORA, adapter_config, write_base
from tests.distributed.ranks import run_ranks
from tests.distributed.training_case import LLAMA, build, run_steps
from transformers import AutoModelForCausalLM

from drillyard.models.export import export
from drillyard.models.nf4 import LEVELS, Nf4Linear
from drillyard.models.sharding import plain_name

WIDE = LLAMA | {
    "hidden_size": 64,
    "intermediate_size": 192,
    "head_dim": 16,
    "initializer_range": 0.15,
}


def in_nf4(
    weight: torch.Tensor, *, maxima: torch.dtype = torch.float32, shift: int = 0
) -> torch.Tensor:
    """The definition: the level nearest to each number's share of the largest of its 64, times that
    in fp32.

    `maxima` and `shift` (blocks by which the codes are off) are ways to get it wrong.
    """
    levels = np.array(LEVELS, np.float32)
    blocks = weight.float().numpy().reshape(-1, 64)
    largest = np.abs(blocks).max(1, keepdims=True)
    codes = np.abs((blocks / largest)[..., None].astype(np.float64) - levels).argmin(-1)
    largest = torch.from_numpy(largest).to(maxima).float().numpy()
    return torch.from_numpy((np.roll(levels[codes], shift, 0) * largest).reshape(weight.shape))


def is_quantized(name: str) -> bool:
    return name.endswith("_proj.weight")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An fp32 base, and another one of its weights as nf4 has them."""
    made = tmp_path_factory.mktemp("qlora")
    write_base(made, WIDE)
    (made / "unpacked").mkdir()
    for file in (made / "base").iterdir():
        (made / "unpacked" / file.name).write_bytes(file.read_bytes())
    weights = load_file(made / "base" / "model.safetensors")
    assert sum(map(is_quantized, weights)) == 14
    save_file(
        {
            name: in_nf4(tensor) if is_quantized(name) else tensor
            for name, tensor in weights.items()
        },
        made / "unpacked" / "model.safetensors",
        {"format": "pt"},
    )
    return made


def config_of(directory: str, *, packed: bool, variant: str = "lora", **changes: Any) -> Any:
    model = (
        {"model__quantization": "nf4"}
        if packed
        else {"model__id": str(Path(directory) / "unpacked")}
    )
    return adapter_config(
        Path(directory), model__lora=LORA | {"variant": variant}, **model, **changes
    )


def weights_in_forward(directory: str, folder: str, precision: str) -> dict[str, torch.Tensor]:
    """Each quantized weight as the products of the second step have it."""
    trainer, model = build(config_of(directory, packed=True, training__precision=precision))
    run_steps(trainer, 0, 1)
    found: dict[str, torch.Tensor] = {}
    original = torch.nn.functional.linear

    def product(
        x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        seen.append(weight.detach().clone())
        return original(x, weight, bias)

    seen: list[torch.Tensor] = []
    for name, layer in model.causal_lm.named_modules():
        if not isinstance(layer, Nf4Linear):
            continue
        name = plain_name(f"{name}.weight")
        layer.register_forward_pre_hook(lambda *_: seen.clear())
        layer.register_forward_hook(lambda *_, name=name: found.__setitem__(name, seen[-1]))
    torch.nn.functional.linear = product  # type: ignore[assignment]
    run_steps(trainer, 1, 2)
    return found


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_weights_inside_forward_are_the_definition_to_the_bit(
    directory: Path, tmp_path: Path, precision: str
) -> None:
    base = load_file(directory / "base" / "model.safetensors")
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    for found in run_ranks(weights_in_forward, 2, str(directory), str(tmp_path), precision):
        assert found.keys() == {name for name in base if is_quantized(name)}
        for name, weight in found.items():
            assert weight.dtype == dtype and torch.equal(weight, in_nf4(base[name]).to(dtype)), name
            for wrong in ({"maxima": torch.bfloat16}, {"shift": 1}):
                assert not torch.equal(weight, in_nf4(base[name], **wrong).to(dtype))


def train_on_rank(
    directory: str, folder: str, packed: bool, variant: str, checkpointing: str
) -> list[float]:
    config = config_of(
        directory, packed=packed, variant=variant, training__activation_checkpointing=checkpointing
    )
    return adapter_case.train(config, folder)


@pytest.mark.parametrize(
    ("variant", "checkpointing", "num_ranks"),
    [
        ("lora", "none", 2),
        ("lora", "full", 1),
        ("lora", "selective", 2),
        ("dora", "none", 2),
        ("rslora", "full", 2),
    ],
)
def test_training_is_that_of_adapters_on_the_unpacked_weights(
    directory: Path, tmp_path: Path, variant: str, checkpointing: str, num_ranks: int
) -> None:
    ends = []
    for packed in (True, False):
        folder = tmp_path / str(packed)
        losses = run_ranks(
            train_on_rank, num_ranks, str(directory), str(folder), packed, variant, checkpointing
        )[0]
        ends.append((losses, load_file(folder / "end" / "adapter_model.safetensors")))
    (ours, adapter), (expected, reference) = ends
    assert len(expected) == 20 and expected[0] - expected[-1] > 0.4
    assert np.abs(np.subtract(ours, expected)).max() < 1e-5
    assert adapter.keys() == reference.keys()
    assert (
        max(float((adapter[name] - tensor).abs().max()) for name, tensor in reference.items())
        < 1e-4
    )


def train_and_export(directory: str, folder: str, variant: str) -> None:
    training_case.norms_in_fp64 = lambda model: None  # type: ignore[assignment]
    config = config_of(
        directory, packed=True, variant=variant, training__steps=4, training__precision="fp64"
    )
    trainer, model = build(config)
    run_steps(trainer, 0, 4)
    export(model.causal_lm, Path(folder) / "final", adapters="alone")
    export(model.causal_lm, Path(folder) / "merged", adapters="merged")


@pytest.mark.parametrize("variant", ["lora", "dora"])
def test_final_on_the_unpacked_base_and_merged_give_the_same_logits(
    directory: Path, tmp_path: Path, variant: str
) -> None:
    run_ranks(train_and_export, 2, str(directory), str(tmp_path), variant)
    tokens = torch.arange(5, 69)[None]
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["model_type"] == "llama"
    with torch.no_grad():
        load = AutoModelForCausalLM.from_pretrained
        base = load(directory / "unpacked", dtype=torch.float64).eval()
        without = base(input_ids=tokens).logits
        merged = load(tmp_path / "merged", dtype=torch.float64).eval()(input_ids=tokens).logits
        adapted = (
            PeftModel.from_pretrained(base, tmp_path / "final").eval()(input_ids=tokens).logits
        )
    assert (adapted - without).abs().max() > 1e-2
    assert (merged - adapted).abs().max() < 1e-6
