"""Configs of DeepSpeed, TRL and Axolotl as run configs: what is taken over, and that nothing is
dropped in silence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from drillyard.cli.main import main
from drillyard.config.load import load_run_config
from drillyard.config.other_trainers import convert
from drillyard.config.starter import completed, starter, write_starters
from drillyard.errors import UserError

TRL = {
    "model_name_or_path": "Qwen/Qwen2.5-0.5B",
    "dataset_name": "trl-lib/Capybara",
    "learning_rate": 2.0e-4,
    "max_steps": 200,
    "num_train_epochs": 1,
    "warmup_ratio": 0.1,
    "packing": True,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 8,
    "gradient_checkpointing": True,
    "eval_strategy": "steps",
    "eval_steps": 100,
    "save_strategy": "epoch",
    "save_steps": 7,
    "use_peft": True,
    "load_in_4bit": True,
    "use_bnb_nested_quant": True,
    "use_dora": True,
    "lora_r": 32,
    "lora_alpha": 16,
    "lora_target_modules": ["q_proj", "k_proj"],
    "output_dir": "out/Qwen2-SFT",
    "push_to_hub": True,
    "fp16": True,
}
AXOLOTL = {
    "base_model": "NousResearch/Meta-Llama-3.1-8B",
    "load_in_4bit": True,
    "datasets": [
        {"path": "a/b", "type": "alpaca", "shards": 4},
        {"path": "c/d", "type": "chat_template", "split": "t"},
    ],
    "val_set_size": 0.05,
    "output_dir": "./outputs/lora-out",
    "sequence_len": 4096,
    "sample_packing": True,
    "adapter": "qlora",
    "lora_r": 32,
    "lora_alpha": 64,
    "lora_target_linear": True,
    "micro_batch_size": 2,
    "num_epochs": 4,
    "optimizer": "paged_adamw_8bit",
    "lr_scheduler": "rex",
    "learning_rate": 0.0002,
    "bf16": "auto",
    "wandb_project": "p",
    "gradient_checkpointing": False,
    "warmup_steps": 10,
}
DEEPSPEED = {
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": "auto",
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-5, "eps": 1e-6, "amsgrad": True}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_num_steps": 100, "total_num_steps": 2000, "warmup_max_lr": 2e-5},
    },
}
FILES: dict[str, dict[str, Any]] = {"trl": TRL, "axolotl": AXOLOTL, "deepspeed": DEEPSPEED}
EXPECTED: dict[str, dict[str, Any]] = {
    "trl": {
        "name": "qwen2-sft",
        "output": "out",
        "model.id": "Qwen/Qwen2.5-0.5B",
        "model.lora.rank": 32,
        "model.lora.alpha": 16,
        "model.lora.dropout": 0.05,
        "model.lora.variant": "dora",
        "data.source": "trl-lib/Capybara",
        "data.sequence_length": 1024,
        "data.held_out.source": {"path": "trl-lib/Capybara", "split": "test"},
        "training.steps": 200,
        "training.epochs": None,
        "training.schedule.warmup_steps": 20,
        "training.schedule.name": "linear",
        "training.optimizer.weight_decay": 0.0,
        "training.optimizer.betas": [0.9, 0.999],
        "training.activation_checkpointing": "full",
        "training.precision": "bf16",
        "evaluation.every_steps": 100,
        "checkpoint.every_steps": None,
        "logging.every_steps": 10,
        "training.seed": 42,
    },
    "axolotl": {
        "name": "lora-out",
        "output": "outputs",
        "data.format": "chat",
        "data.source": [{"path": "a/b"}, {"path": "c/d", "split": "t"}],
        "data.held_out.fraction": 0.05,
        "model.lora.target_modules": "all-linear",
        "training.epochs": 4,
        "training.micro_batch_size": 2,
        "training.schedule.name": "cosine",
        "training.activation_checkpointing": "none",
        "logging.wandb": {"project": "p"},
    },
    "deepspeed": {
        "training.global_batch_size": 32,
        "training.micro_batch_size": 4,
        "training.gradient_accumulation": None,
        "training.optimizer.learning_rate": 2e-5,
        "training.optimizer.epsilon": 1e-6,
        "training.optimizer.betas": [0.9, 0.999],
        "training.optimizer.weight_decay": 0.0,
        "training.schedule.name": "linear",
        "training.schedule.warmup_steps": 100,
        "training.steps": 2000,
        "training.precision": "bf16",
    },
}
LEFT_OUT = {
    "trl": {
        "push_to_hub", "use_bnb_nested_quant", "fp16", "save_strategy: epoch", "data.format",
        "save_total_limit",
    },
    "axolotl": {
        "datasets[0].shards", "datasets[0].type: alpaca", "optimizer: paged_adamw_8bit",
        "lr_scheduler: rex", "save_strategy: epoch", "logging_steps",
    },
    "deepspeed": {
        "gradient_clipping", "zero_optimization.stage", "zero_optimization.offload_optimizer",
        "optimizer.params.amsgrad", "scheduler.params.warmup_type: log", "model", "data",
    },
}  # fmt: skip


def written(directory: Path, content: object) -> Path:
    path = directory / "config.yaml"
    path.write_text(json.dumps(content))
    return path


def at(settings: dict[str, Any], path: str) -> Any:
    found: Any = settings
    for part in path.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    return found


@pytest.mark.parametrize("tool", FILES)
def test_settings_are_those_of_the_file_and_of_its_tool(tool: str, tmp_path: Path) -> None:
    found = convert(tool, written(tmp_path, FILES[tool]))
    settings = completed(found)
    assert {path: at(settings, path) for path in EXPECTED[tool]} == EXPECTED[tool]
    assert {key for key, _ in found.left_out} == LEFT_OUT[tool]
    assert all(reason for _, reason in found.left_out)


@pytest.mark.parametrize("tool", FILES)
def test_what_is_written_loads_as_the_same_settings(tool: str, tmp_path: Path) -> None:
    settings = completed(convert(tool, written(tmp_path, FILES[tool])))
    run, _ = write_starters(tmp_path / "new", starter("run", settings))
    config = load_run_config(run).model_dump(mode="json")
    assert config["training"]["optimizer"]["learning_rate"] == at(
        settings, "training.optimizer.learning_rate"
    )
    for path, value in EXPECTED[tool].items():
        if not isinstance(value, dict | list) and value is not None:
            assert at(config, path) == value, path


# Where another key of the file decides, or the value is that of the default.
WITHOUT_EFFECT = {
    "num_train_epochs", "save_steps", "gradient_accumulation_steps", "bf16",
    "gradient_checkpointing",
}  # fmt: skip


@pytest.mark.parametrize(
    ("tool", "key"),
    [
        (tool, key)
        for tool, content in FILES.items()
        for key in content
        if key not in WITHOUT_EFFECT
    ],
)
def test_no_key_is_dropped_in_silence(tool: str, key: str, tmp_path: Path) -> None:
    without = {name: value for name, value in FILES[tool].items() if name != key}
    results = []
    for content in (FILES[tool], without):
        found = convert(tool, written(tmp_path, content))
        results.append((found.settings, found.left_out))
    assert results[0] != results[1]


@pytest.mark.parametrize(
    ("kind", "parameters", "expected", "named"),
    [
        # DeepSpeed's own values where the file has none.
        (
            "WarmupLR",
            {},
            {"name": "constant", "warmup_steps": 1000, "rate": 3e-5},
            ["warmup_max_lr", "warmup_type: log"],
        ),
        (
            "WarmupDecayLR",
            {"warmup_type": "linear"},
            {"name": "linear", "warmup_steps": 1000, "rate": 0.001},
            [],
        ),
        (
            "WarmupCosineLR",
            {"total_num_steps": 50, "warmup_min_ratio": 0.1, "warmup_type": "linear"},
            {"name": "cosine", "warmup_steps": 1000, "rate": 3e-5, "final_fraction": 0.0001},
            ["warmup_min_ratio"],
        ),
        (
            "WarmupCosineLR",
            {
                "total_num_steps": 50,
                "warmup_num_steps": 5,
                "warmup_type": "linear",
                "cos_min_ratio": 0.1,
            },
            {"name": "cosine", "warmup_steps": 5, "rate": 3e-5, "final_fraction": 0.1},
            [],
        ),
    ],
)
def test_a_schedule_of_deepspeed_is_read_with_its_defaults(
    kind: str,
    parameters: dict[str, Any],
    expected: dict[str, Any],
    named: list[str],
    tmp_path: Path,
) -> None:
    scheduler = {"type": kind, "params": parameters}
    found = convert("deepspeed", written(tmp_path, {**DEEPSPEED, "scheduler": scheduler}))
    training = found.settings["training"]
    schedule = {**training["schedule"], "rate": training["optimizer"]["learning_rate"]}
    assert schedule.items() >= expected.items()
    assert [key for key, _ in found.left_out if "scheduler" in key] == [
        f"scheduler.params.{each}" for each in named
    ]


@pytest.mark.parametrize(
    ("tool", "changes"), [("trl", {"use_peft": False}), ("axolotl", {"adapter": None})]
)
def test_settings_of_adapters_do_not_make_a_full_fine_tune_one_of_adapters(
    tool: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    content = {**FILES[tool], "lora_r": 32, "lora_alpha": 16, **changes}
    found = convert(tool, written(tmp_path, content))
    assert "lora" not in found.settings["model"]
    assert {"lora_r", "lora_alpha"} <= {key for key, _ in found.left_out}


@pytest.mark.parametrize(
    ("learns_answers", "loss_on"), [({}, "all"), ({"assistant_only_loss": True}, None)]
)
def test_what_a_chat_teaches_is_what_trl_learns(
    learns_answers: dict[str, Any], loss_on: str | None, tmp_path: Path
) -> None:
    content = {
        key: value for key, value in TRL.items() if key != "assistant_only_loss"
    } | learns_answers
    assert convert("trl", written(tmp_path, content)).settings["data"].get("loss_on") == loss_on


@pytest.mark.parametrize(
    ("sections", "precision", "named"),
    [
        ({"bf16": {"enabled": False}, "fp16": {"enabled": False}}, "fp32", set()),
        ({}, "fp32", set()),
        ({"bf16": {"enabled": "auto"}}, None, {"bf16.enabled"}),
        ({"fp16": {"enabled": True}}, "bf16", {"fp16"}),
    ],
)
def test_the_precision_is_that_of_deepspeed(
    sections: dict[str, Any], precision: str | None, named: set[str], tmp_path: Path
) -> None:
    content = {key: value for key, value in DEEPSPEED.items() if key != "bf16"} | sections
    found = convert("deepspeed", written(tmp_path, content))
    assert found.settings["training"].get("precision") == precision
    assert {key for key, _ in found.left_out if "16" in key} == named


@pytest.mark.parametrize(
    ("tool", "changes", "path", "value", "named"),
    [
        ("trl", {"max_length": "2048"}, "data.sequence_length", 2048, None),
        ("trl", {"max_steps": "30"}, "training.steps", 30, None),
        (
            "trl",
            {"max_steps": 30, "warmup_steps": 0.03},
            "training.schedule.warmup_steps",
            1,
            None,
        ),
        (
            "trl",
            {"save_strategy": "steps", "save_steps": 0.25},
            "checkpoint.every_steps",
            None,
            "save_steps",
        ),
        ("trl", {"max_grad_norm": 0}, "training.gradient_clipping", None, None),
        (
            "axolotl",
            {"lr_scheduler": ["cosine"]},
            "training.schedule.name",
            "cosine",
            "lr_scheduler: ['cosine']",
        ),
        ("deepspeed", {"steps_per_print": 1e3}, "logging.every_steps", 1000, None),
        ("deepspeed", {"train_batch_size": 64.0}, "training.global_batch_size", 64, None),
        (
            "deepspeed",
            {"optimizer": {"type": "AdamW", "params": "auto"}},
            "training.optimizer.weight_decay",
            0,
            "optimizer.params",
        ),
        (
            "deepspeed",
            {"scheduler": {"type": ["WarmupLR"], "params": 3}},
            None,
            None,
            "scheduler.params",
        ),
    ],
)
def test_odd_values_are_taken_over_or_named(
    tool: str,
    changes: dict[str, Any],
    path: str | None,
    value: Any,
    named: str | None,
    tmp_path: Path,
) -> None:
    found = convert(tool, written(tmp_path, {**FILES[tool], **changes}))
    settings = completed(found)
    if path is not None:
        assert at(settings, path) == value
    assert named is None or named in {key for key, _ in found.left_out}
    run, _ = write_starters(tmp_path / "new", starter("run", settings))
    load_run_config(run)


def test_weight_decay_in_the_gradient_is_named(tmp_path: Path) -> None:
    optimizer = {"type": "Adam", "params": {"lr": 3e-5, "adam_w_mode": False}}
    found = convert("deepspeed", written(tmp_path, {**DEEPSPEED, "optimizer": optimizer}))
    assert "optimizer.params.adam_w_mode: false" in dict(found.left_out)


def test_an_unknown_key_is_named(tmp_path: Path) -> None:
    for tool, content in FILES.items():
        near = "lerning_rate" if tool != "deepspeed" else "gradient_cliping"
        found = convert(tool, written(tmp_path, {**content, near: 3, "zzz": {"a": 1}}))
        reasons = dict(found.left_out)
        assert {near, "zzz"} <= reasons.keys()
        assert ("learning_rate" if tool != "deepspeed" else "gradient_clipping") in reasons[near]


def test_a_value_that_no_run_may_have_is_refused_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, {**TRL, "learning_rate": -1})
    with pytest.raises(SystemExit) as ended:
        main(["init", str(tmp_path / "new"), "--from-trl", str(path)])
    assert ended.value.code == 2
    assert "training.optimizer.learning_rate" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_the_command_names_what_it_leaves_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, AXOLOTL)
    with pytest.raises(SystemExit) as ended:
        main(["init", str(tmp_path / "new"), "--from-axolotl", str(path)])
    assert ended.value.code == 0
    assert "paged_adamw_8bit" in capsys.readouterr().err
    assert yaml.safe_load((tmp_path / "new/run.yaml").read_text())["model"]["lora"]["rank"] == 32


@pytest.mark.parametrize("content", [[], "text", 3])
def test_what_is_no_config_is_refused(content: object, tmp_path: Path) -> None:
    for tool in FILES:
        with pytest.raises(UserError, match=tool):
            convert(tool, written(tmp_path, content))


def test_one_file_at_a_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(written(tmp_path, TRL))
    with pytest.raises(SystemExit) as ended:
        main(["init", str(tmp_path / "new"), "--from-trl", path, "--from-axolotl", path])
    assert ended.value.code == 2 and "give one of them" in capsys.readouterr().err
