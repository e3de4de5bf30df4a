"""Section `model` of run.yaml: the model that is trained, and adapters on it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from drillyard.config.strict_model import Fraction, NamedFile, StrictModel


class LoraConfig(StrictModel):
    """Low-rank adapters on a frozen pretrained model."""

    rank: PositiveInt = Field(default=16, description="Rank of the adapters.")
    alpha: PositiveFloat = Field(
        default=32.0, description="Scale of the adapters; the update is multiplied by alpha/rank."
    )
    dropout: Fraction = Field(
        default=0.0, description="Dropout probability on the adapters' input."
    )
    target_modules: Literal["attention", "all-linear"] | list[str] = Field(
        default=["q_proj", "k_proj", "v_proj", "o_proj"],
        description=(
            "Linear layers that get an adapter: a list of their names, `attention` (its linear"
            " layers) or `all-linear` (all but the head; of mixtures that peft knows also router"
            " and experts)."
        ),
    )
    variant: Literal["lora", "dora", "rslora"] = Field(
        default="lora",
        description=(
            "`dora` also trains the length of each row of the adapted weights; `rslora` multiplies"
            " the update by alpha/sqrt(rank) instead of alpha/rank."
        ),
    )
    adapter: NamedFile | None = Field(
        default=None,
        description=(
            "Directory of an adapter in PEFT's format to continue from; null: a new one. Rank,"
            " alpha, variant and target_modules must be those of the adapter."
        ),
    )


class ModelConfig(StrictModel):
    """Causal language model, and the source of its weights."""

    id: NamedFile | None = Field(
        default=None, description="Hugging Face id or local directory of a model."
    )
    config: dict[str, Any] | None = Field(
        default=None,
        description=(
            "Inline model config instead of `id`: `architecture` (a transformers model_type such as"
            " llama) and its own fields."
        ),
    )
    init: Literal["pretrained", "random"] = Field(
        default="pretrained",
        description="`pretrained` reads the weights of `id`; `random` trains from scratch.",
    )
    lora: LoraConfig | None = Field(
        default=None,
        description=(
            "Train low-rank adapters instead of all weights; the weights of `id` stay as they are,"
            " in the compute precision."
        ),
    )
    quantization: Literal["nf4"] | None = Field(
        default=None,
        description=(
            "Beside adapters: `nf4` keeps the linear layers of the frozen model (not the head, nor"
            " stacked experts) in 4.5 bits a number; null: in the compute precision."
        ),
    )
    attention: Literal["auto", "sdpa", "eager", "varlen", "flex"] = Field(
        default="auto",
        description="Attention kernel; `auto` takes the fastest that the device can train with.",
    )
