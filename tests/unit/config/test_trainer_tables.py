"""The tables of other trainers' keys against the defaults that the tools' packages state, and
public configs of each tool: every key is ours, none with a reason, or refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from drillyard.cli.main import main
from drillyard.config.load import load_run_config
from drillyard.config.other_trainers import convert
from drillyard.config.run import RunConfig
from drillyard.config.starter import completed, starter, write_starters
from drillyard.config.trainer_table import EMPTY, TOOLS, table_of
from drillyard.errors import ConfigError

HERE = Path(__file__).parent
SAMPLES = {
    tool: list(yaml.safe_load_all((HERE / f"trainer_samples/{tool}.yaml").read_text()))
    for tool in TOOLS
}
REFUSED = {"trl": {10, 11}, "llamafactory": {4}}
LEAST = {
    "axolotl": {"base_model": "org/m", "learning_rate": 1e-4},
    "trl": {"model_name_or_path": "org/m", "dataset_name": "org/d"},
    "deepspeed": {"train_batch_size": 8},
    "llamafactory": {"model_name_or_path": "org/m", "cutoff_len": 64, "finetuning_type": "full"},
}


def written(directory: Path, content: object, name: str = "config.yaml") -> Path:
    path = directory / name
    path.write_text(json.dumps(content))
    return path


def converted(directory: Path, tool: str, **content: Any) -> tuple[dict[str, Any], dict[str, str]]:
    """Settings by dotted path, and the reasons of what is left out."""
    found = convert(tool, written(directory, {**LEAST[tool], **content}))
    return dict(flat(found.settings)), dict(found.left_out)


def flat(settings: dict[str, Any], before: str = "") -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = []
    for key, value in settings.items():
        rows.append((before + key, value))
        if isinstance(value, dict):
            rows += flat(value, f"{before}{key}.")
    return rows


@pytest.mark.parametrize("tool", [*TOOLS, "training_arguments"])
def test_the_table_has_every_key_and_default_of_the_package(tool: str) -> None:
    facts = json.loads((HERE / f"trainer_defaults/{tool}.json").read_text())
    table = table_of(tool)
    assert (table.package, table.version) == (facts["package"], facts["version"])
    missing = {key for key in facts["defaults"] if key not in table.keys.keys() | table.aliases}
    assert not missing
    different = {
        key: (table.keys[key].default, default)
        for key, default in facts["defaults"].items()
        if key in table.keys and table.keys[key].default != default
    }
    # LLaMA-Factory's max_length is of generation; DeepSpeed's list has names of two kinds.
    assert different == {}
    if tool in ("axolotl", "training_arguments"):
        extra = table.keys.keys() - facts["defaults"].keys() - table.other_versions
        assert extra <= {"warmup_ratio"}


def paths_of(model: Any, before: str = "") -> set[str]:
    found = set()
    for key, field in model.model_fields.items():
        found.add(before + key)
        for member in [field.annotation, *getattr(field.annotation, "__args__", ())]:
            if hasattr(member, "model_fields"):
                found |= paths_of(member, f"{before}{key}.")
    return found


@pytest.mark.parametrize("tool", TOOLS)
def test_each_row_names_a_setting_that_exists_or_a_reason(tool: str) -> None:
    settings = paths_of(RunConfig)
    for key, row in table_of(tool).keys.items():
        assert (row.ours in settings) if row.ours is not None else row.why, key


@pytest.mark.parametrize(
    ("tool", "number"), [(tool, number) for tool in TOOLS for number in range(len(SAMPLES[tool]))]
)
def test_public_configs_are_taken_over_or_refused(tool: str, number: int, tmp_path: Path) -> None:
    content = SAMPLES[tool][number]
    if number in REFUSED.get(tool, ()):
        with pytest.raises(ConfigError):
            convert(tool, written(tmp_path, content))
        return
    found = convert(tool, written(tmp_path, content))
    settings = completed(found)
    run, _ = write_starters(tmp_path / "new", starter("run", settings))
    config = load_run_config(run)
    named = " ".join(key for key, _ in found.left_out)
    table = table_of(tool)
    if tool != "deepspeed":
        for key, value in content.items():
            row = table.keys[table.aliases.get(key, key)]
            is_default = value in EMPTY or value is False or value == row.default
            assert row.ours or is_default or key in named, key
    for key, row in table.keys.items():
        path = row.ours
        if path is None or row.how or row.default is None or "." in key or "lora" in path:
            continue
        if key not in content and path not in ("model.quantization", "evaluation.batch_size"):
            place: Any = config
            for part in path.split("."):
                place = getattr(place, part)
            assert place == row.default or path in named or key in named, key


@pytest.mark.parametrize(
    ("tool", "key", "name"),
    [
        (tool, key, name)
        for tool, key in (("axolotl", "optimizer"), ("trl", "optim"), ("llamafactory", "optim"))
        for name in ("schedule_free_adamw", "galore_adamw", "adamw_torch_4bit", "lion", "muon")
    ],
)
def test_another_optimizer_is_named(tool: str, key: str, name: str, tmp_path: Path) -> None:
    _, reasons = converted(tmp_path, tool, **{key: name})
    assert f"{key}: {name}" in reasons


@pytest.mark.parametrize("name", ["adamw_torch", "adamw_torch_fused", "paged_adamw_32bit"])
def test_adamw_is_not_named(name: str, tmp_path: Path) -> None:
    _, reasons = converted(tmp_path, "axolotl", optimizer=name)
    assert not [key for key in reasons if key.startswith("optimizer")]


@pytest.mark.parametrize(
    ("content", "steps"),
    [
        ({"max_steps": 1000}, 30),
        ({"max_steps": 100_000}, 100),
        ({"max_steps": 50}, 2),
        ({"max_steps": 1000, "warmup_ratio": 0.1}, 100),
        ({"max_steps": 1000, "warmup_steps": 7}, 7),
        ({"max_steps": 1000, "warmup_steps": 7, "lr_scheduler": "constant"}, 0),
    ],
)
def test_axolotl_warms_up_by_itself(content: dict[str, Any], steps: int, tmp_path: Path) -> None:
    settings, reasons = converted(tmp_path, "axolotl", **content)
    assert settings["training.schedule.warmup_steps"] == steps
    assert ("warmup_steps" in reasons) == ("lr_scheduler" in content)


def test_a_warm_up_that_depends_on_the_data_is_named(tmp_path: Path) -> None:
    settings, reasons = converted(tmp_path, "axolotl")
    assert "training.schedule.warmup_steps" not in settings
    assert "0.03" in reasons["warmup_ratio"]


@pytest.mark.parametrize(
    ("tool", "content", "expected"),
    [
        ("trl", {}, {"data.too_long": "truncate", "data.loss_on": "all"}),
        (
            "trl",
            {"completion_only_loss": True},
            {"data.format": "prompt-completion", "data.loss_on": "completion"},
        ),
        ("trl", {"completion_only_loss": False}, {"data.loss_on": "all"}),
        (
            "trl",
            {"dataset_config": "c"},
            {"data.source": {"path": "org/d", "options": {"name": "c"}}},
        ),
        (
            "trl",
            {
                "lr_scheduler_type": "cosine_with_min_lr",
                "lr_scheduler_kwargs": {"min_lr_rate": 0.1},
            },
            {"training.schedule.final_fraction": 0.1, "training.optimizer.learning_rate": 2e-5},
        ),
        (
            "trl",
            {
                "lr_scheduler_type": "cosine_with_min_lr",
                "learning_rate": 1e-4,
                "lr_scheduler_kwargs": {"min_lr": 1e-5},
            },
            {"training.schedule.final_fraction": pytest.approx(0.1)},
        ),
        (
            "axolotl",
            {"cosine_min_lr_ratio": 0.2},
            {"training.schedule.final_fraction": 0.2, "data.packing": False},
        ),
        ("axolotl", {"dp_replicate_size": 2}, {"parallelism.replicate": 2}),
        (
            "axolotl",
            {"test_datasets": [{"path": "org/t", "type": "chat_template", "split": "test"}]},
            {"data.held_out.source": {"path": "org/t", "split": "test"}},
        ),
        ("axolotl", {"sample_packing": ""}, {"data.packing": False, "data.sequence_length": 512}),
        ("deepspeed", {}, {"training.gradient_clipping": None}),
        ("deepspeed", {"gradient_clipping": 0.5}, {"training.gradient_clipping": 0.5}),
        ("llamafactory", {"finetuning_type": "lora"}, {"model.lora.alpha": 16}),
        ("llamafactory", {"mask_history": True}, {"data.train_on": "last"}),
    ],
)
def test_what_has_a_counterpart_is_written(
    tool: str, content: dict[str, Any], expected: dict[str, Any], tmp_path: Path
) -> None:
    settings, _ = converted(tmp_path, tool, **content)
    assert {path: settings[path] for path in expected} == expected


@pytest.mark.parametrize(
    ("tool", "content", "named"),
    [
        ("deepspeed", {}, "gradient_clipping"),
        ("axolotl", {"shuffle_merged_datasets": False}, "shuffle_merged_datasets"),
        ("axolotl", {"float16": True, "bf16": False}, "float16"),
        ("axolotl", {"evaluation_strategy": "epoch"}, "evaluation_strategy: epoch"),
        ("trl", {"evaluation_strategy": "epoch"}, "evaluation_strategy: epoch"),
        (
            "axolotl",
            {"datasets": [{"path": "org/a", "type": "alpaca"}]},
            "datasets[0].type: alpaca",
        ),
        ("trl", {"packing": True, "packing_strategy": "wrapped"}, "packing_strategy: wrapped"),
        ("trl", {"lr_scheduler_type": "constant", "warmup_steps": 5}, "warmup_steps"),
        ("trl", {"max_lenght": 5}, "max_lenght"),
        ("llamafactory", {"template": "llama3"}, "template"),
    ],
)
def test_what_has_none_is_named_by_the_files_own_key(
    tool: str, content: dict[str, Any], named: str, tmp_path: Path
) -> None:
    _, reasons = converted(tmp_path, tool, **content)
    assert named in reasons


@pytest.mark.parametrize("tool", TOOLS)
def test_an_empty_key_is_its_default(tool: str, tmp_path: Path) -> None:
    plain = convert(tool, written(tmp_path, LEAST[tool]))
    keys = [key for key in table_of(tool).keys if "." not in key and key not in LEAST[tool]]
    empty = convert(tool, written(tmp_path, LEAST[tool] | dict.fromkeys(keys)))
    assert empty == plain


@pytest.mark.parametrize(
    ("tool", "content"),
    [
        ("axolotl", {"rl": "dpo"}),
        ("axolotl", {"reward_model": True}),
        ("trl", {"loss_type": "sigmoid"}),
        ("trl", {"beta": 0.1}),
        ("llamafactory", {"stage": "kto"}),
        ("llamafactory", {"finetuning_type": "freeze"}),
    ],
)
def test_another_kind_of_training_is_refused(
    tool: str, content: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=next(iter(content))):
        converted(tmp_path, tool, **content)


@pytest.mark.parametrize("given", TOOLS)
@pytest.mark.parametrize("tool", TOOLS)
def test_a_file_of_another_tool_is_refused_with_its_flag(
    given: str, tool: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, SAMPLES[tool][0])
    with pytest.raises(SystemExit) as ended:
        main(["init", str(tmp_path / "new"), f"--from-{given}", str(path)])
    assert ended.value.code == (0 if given == tool else 2)
    if given != tool:
        assert f"--from-{tool}" in capsys.readouterr().err
        assert not (tmp_path / "new").exists()


def test_local_files_are_found_from_here_and_beside_the_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "rows.jsonl").write_text("{}\n")
    rows = [{"path": "json", "data_files": "rows.jsonl", "type": "chat_template"}]
    path = written(tmp_path / "configs", {**LEAST["axolotl"], "datasets": rows})
    for directory in (tmp_path, tmp_path / "elsewhere"):
        monkeypatch.chdir(directory)
        found = convert("axolotl", path)
        assert found.settings["data"]["source"] == str(tmp_path / "rows.jsonl")


def test_data_sets_of_llamafactory_are_looked_up(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/own.json").write_text("[]")
    info = {"own": {"file_name": "own.json"}, "far": {"hf_hub_url": "org/far", "subset": "s"}}
    (tmp_path / "data/dataset_info.json").write_text(json.dumps(info))
    content = {**LEAST["llamafactory"], "dataset": "own,far", "max_samples": 5}
    found = convert("llamafactory", written(tmp_path, content))
    assert found.settings["data"]["source"] == [
        {"path": str(tmp_path / "data/own.json"), "max_samples": 5},
        {"path": "org/far", "max_samples": 5, "options": {"name": "s"}},
    ]


def test_the_page_of_importers_is_what_the_tables_say() -> None:
    root = HERE.parents[2]
    done = subprocess.run(
        [sys.executable, root / "tools/importer_docs.py", "--check"], capture_output=True
    )
    assert done.returncode == 0, "run python tools/importer_docs.py"


@pytest.mark.parametrize(
    ("tool", "content", "key"),
    [
        ("axolotl", {"warmup_steps": "auto", "max_steps": 10}, "warmup_steps"),
        ("axolotl", {"micro_batch_size": "auto", "batch_size": 4}, "batch_size"),
        ("trl", {"datasets": [3]}, "datasets"),
        ("trl", {"warmup_steps": "x"}, "warmup_steps"),
        ("llamafactory", {"dataset": "a", "interleave_probs": "x"}, "interleave_probs"),
    ],
)
def test_a_value_of_another_type_is_refused_with_its_key(
    tool: str, content: dict[str, Any], key: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=key):
        converted(tmp_path, tool, **content)
