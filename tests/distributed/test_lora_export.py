"""What is left of a run with adapters: `final/` in plain peft and the merged model in plain
transformers agree."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from peft import PeftModel
from tests.distributed import training_case
from tests.distributed.adapter_case import LORA, adapter_config, write_base
from tests.distributed.ranks import run_ranks
from tests.distributed.training_case import build, run_steps
from tests.unit.models.tiny import model_config
from transformers import AutoModelForCausalLM

from drillyard.config.model_files import ARCHITECTURES
from drillyard.data.prepared_data import prepare
from drillyard.errors import DoesNotFitError
from drillyard.models.export import export
from drillyard.parallel.parallelize import MASTER_DTYPE
from drillyard.parallel.ranks import start_ranks
from drillyard.training.model_setup import build_sharded_model

TOKENS = torch.arange(5, 69)[None]
PURPOSES: tuple[Literal["training", "evaluation", "export"], ...] = (
    "training",
    "evaluation",
    "export",
)


def base_config(architecture: str) -> dict[str, Any]:
    """A tiny model of an architecture with weights large enough to matter."""
    positions = "n_positions" if architecture == "gpt2" else "max_position_embeddings"
    config = model_config(architecture, initializer_range=0.15, **{positions: 128}).config
    assert config is not None
    return config


def train_and_export(directory: str, variant: str) -> None:
    """Train in fp64, then write final/ and the merged model."""
    training_case.norms_in_fp64 = lambda model: None  # type: ignore[assignment]
    lora = LORA | {"variant": variant}
    config = adapter_config(
        Path(directory), model__lora=lora, training__steps=4, training__precision="fp64"
    )
    trainer, model = build(config)
    run_steps(trainer, 0, 4)
    export(model.causal_lm, Path(directory) / "final", adapters="alone")
    export(model.causal_lm, Path(directory) / "merged", adapters="merged")


def load(path: Path, architecture: str) -> Any:
    options = {"experts_implementation": "eager"} if ARCHITECTURES[architecture].mixture else {}
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, **options).eval()


@pytest.mark.parametrize(
    ("architecture", "variant", "num_ranks", "stored"),
    [
        *(
            (name, "lora", 2, "fp32")
            for name in ("llama", "qwen3", "gemma3_text", "gpt2", "olmo2", "qwen3_moe")
        ),
        ("mixtral", "lora", 2, "fp32"),
        ("llama", "dora", 2, "fp32"),
        ("gpt2", "dora", 2, "fp32"),
        ("llama", "rslora", 2, "fp32"),
        ("mixtral", "lora", 1, "fp32"),
        ("gpt2", "dora", 1, "fp32"),
        # Frozen weights in the precision of the forward stay in their files and are whole on every
        # rank.
        *((name, "dora", 2, "fp64") for name in ("llama", "gpt2")),
        ("gemma3_text", "lora", 2, "fp64"),
        ("mixtral", "lora", 2, "fp64"),
    ],
)
def test_final_in_peft_and_merged_give_the_same_logits(
    tmp_path: Path, architecture: str, variant: str, num_ranks: int, stored: str
) -> None:
    write_base(tmp_path, base_config(architecture), MASTER_DTYPE[stored])
    run_ranks(train_and_export, num_ranks, str(tmp_path), variant)
    with torch.no_grad():
        base = load(tmp_path / "base", architecture)
        without_adapter = base(input_ids=TOKENS).logits
        merged = load(tmp_path / "merged", architecture)(input_ids=TOKENS).logits
        with_adapter = (
            PeftModel.from_pretrained(base, tmp_path / "final").eval()(input_ids=TOKENS).logits
        )
    assert (with_adapter - without_adapter).abs().max() > 1e-2
    assert (merged - with_adapter).abs().max() < 1e-6


def purposes_that_fit(directory: str) -> list[str]:
    """The purposes for which a base in its files may be twice as large as the memory."""
    config = adapter_config(Path(directory))
    ranks = start_ranks(config.training, config.parallelism)
    tokenizer = prepare(config).tokenizer
    frozen = sum(path.stat().st_size for path in (Path(directory) / "base").glob("*.safetensors"))
    fitting = []
    for purpose in PURPOSES:
        try:
            build_sharded_model(
                config, tokenizer, ranks, purpose=purpose, memory_gib=frozen / 2 / 2**30
            )
            fitting.append(purpose)
        except DoesNotFitError as error:
            assert "the model does not fit: weights" in str(error), error
    return fitting


def test_a_base_larger_than_the_memory_can_be_exported(tmp_path: Path) -> None:
    write_base(tmp_path, base_config("llama"))
    assert run_ranks(purposes_that_fit, 1, str(tmp_path)) == [["export"]]
