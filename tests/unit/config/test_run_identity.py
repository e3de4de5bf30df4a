"""What makes a config another run, and what a resume may change."""

from __future__ import annotations

import pytest

from drillyard.config.run_identity import (
    changed_settings,
    differences,
    recorded_settings,
    with_recorded_settings,
)

from .conftest import RUN, Load


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.seed=1", "training.seed: 0 -> 1"),
        ("training.precision=bf16", 'training.precision: "fp32" -> "bf16"'),
        ("model.config.hidden_size=32", "model.config.hidden_size: 64 -> 32"),
        ("model.config.extra=1", "model.config.extra: (not set) -> 1"),
        ("data.sequence_length=64", "data.sequence_length: 128 -> 64"),
        ("data.source=org/rows", 'data.source.0.path: "builtin:text-to-sql" -> "org/rows"'),
        ("data.held_out.fraction=0.5", "data.held_out.fraction: 0.0 -> 0.5"),
        ("data.tokenizer.vocab_size=512", "data.tokenizer.vocab_size: 1024 -> 512"),
        ("data.loss_on=all", 'data.loss_on: "completion" -> "all"'),
        ("training.fp8_scaling=rowwise", 'training.fp8_scaling: "tensorwise" -> "rowwise"'),
    ],
)
def test_what_changes_the_training_is_a_difference(override: str, message: str, load: Load) -> None:
    old, new = load(), load(RUN, override)
    assert differences(old, new) == [message]


@pytest.mark.parametrize(
    "override",
    [
        "name=other",
        "output=elsewhere",
        "model.attention=eager",
        "data.cache_directory=/tmp/x",
        "data.source={path: builtin:text-to-sql, weight: 1}",
        "data.source=[builtin:text-to-sql]",
        "data.loss_on=completion",
        "data.too_long=drop",
        "training.fp8_scaling=tensorwise",
        "training.micro_batch_size=8",
        "training.gradient_accumulation=4",
        "training.global_batch_size=32",
        "training.activation_checkpointing=full",
        "training.compile=true",
        "training.device=cpu",
        "training.threads_per_rank=2",
        "parallelism.replicate=2",
        "checkpoint.every_steps=7",
        "evaluation.every_steps=7",
        "logging.every_steps=7",
        "logging.wandb={project: x}",
    ],
)
def test_what_a_resume_may_change_is_none(override: str, load: Load) -> None:
    old, new = load(), load(RUN, override)
    assert differences(old, new) == []


@pytest.mark.parametrize(
    ("override", "key", "values"),
    [
        ("training.steps=200", "training.steps", [100, 200]),
        ("training.gradient_clipping=null", "training.gradient_clipping", [1.0, None]),
        (
            "training.optimizer.learning_rate=2e-3",
            "training.optimizer.learning_rate",
            [0.004, 0.002],
        ),
        (
            "training.optimizer.betas=[0.9, 0.99]",
            "training.optimizer.betas",
            [[0.9, 0.95], [0.9, 0.99]],
        ),
        ("training.schedule.name=linear", "training.schedule.name", ["cosine", "linear"]),
    ],
)
def test_length_and_optimizer_may_change_and_are_recorded(
    override: str, key: str, values: list[object], load: Load
) -> None:
    old, new = load(), load(RUN, override)
    assert differences(old, new) == []
    assert changed_settings(recorded_settings(old), recorded_settings(new)) == {key: values}
    assert with_recorded_settings(new, recorded_settings(old)).training == old.training


def test_several_differences_come_in_the_order_of_the_config(load: Load) -> None:
    message = differences(
        load(), load(RUN, "training.seed=1", "model.config.hidden_size=32", "data.packing=false")
    )
    assert [line.split(":")[0] for line in message] == [
        "model.config.hidden_size",
        "data.packing",
        "training.seed",
    ]


def test_two_given_global_batches_are_compared(load: Load) -> None:
    old, new = (
        load(RUN, "training.global_batch_size=32"),
        load(RUN, "training.global_batch_size=64"),
    )
    assert differences(old, new) == ["training.global_batch_size: 32 -> 64"]
