"""What loading a run.yaml gives, and what it says of a wrong one."""

from __future__ import annotations

import json
import re
import string
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tests.facts import each_says, says

from drillyard.config.load import load_cluster_config, load_run_config, save_resolved
from drillyard.config.run import RunConfig
from drillyard.config.yaml_document import parse_document
from drillyard.errors import UserError

from .conftest import RUN, Load, Refuse

FULL = yaml.safe_dump(
    {
        "name": "full",
        "output": "runs",
        "model": {
            "id": "some/model",
            "init": "pretrained",
            "lora": {"rank": 4, "alpha": 8.0, "dropout": 0.1},
        },
        "data": {
            "source": [
                {"path": "a.jsonl", "weight": 2.0, "name": "a", "split": "train"},
                "b.jsonl",
            ],
            "format": "text",
            "sequence_length": 128,
            "packing": True,
            "held_out": {"fraction": 0.1, "split_by": "db_id"},
            "tokenizer": {"train": "bpe", "vocab_size": 1024},
        },
        "training": {
            "steps": 10,
            "micro_batch_size": 2,
            "gradient_accumulation": 2,
            "precision": "fp32",
            "optimizer": {
                "name": "adamw",
                "learning_rate": 0.001,
                "betas": [0.9, 0.95],
                "weight_decay": 0.1,
            },
            "schedule": {"name": "cosine", "warmup_steps": 2, "final_fraction": 0.1},
            "gradient_clipping": 1.0,
            "activation_checkpointing": "none",
            "threads_per_rank": 1,
        },
        "parallelism": {"shard": "auto", "replicate": 1},
        "checkpoint": {"every_steps": 5, "resume": "auto", "asynchronous": True},
        "evaluation": {"every_steps": 5, "metrics": ["loss"], "batch_size": 4},
        "logging": {"every_steps": 1, "tensorboard": False},
    },
    sort_keys=False,
)
KEY_LINES = [number for number, line in enumerate(FULL.splitlines()) if ":" in line]


@st.composite
def mistyped(draw: st.DrawFn) -> tuple[int, str, str, str]:
    """A line of FULL, its key, one slip of the finger in it, and the whole text with that."""
    lines = FULL.splitlines()
    number = draw(st.sampled_from(KEY_LINES))
    head, colon, rest = lines[number].partition(":")
    key = head.lstrip(" -")
    at = draw(st.integers(0, len(key) - 1))
    letter = draw(st.sampled_from(string.ascii_lowercase))
    wrong = draw(
        st.sampled_from(
            [
                key[:at] + key[at + 1 :],
                key[:at] + letter + key[at:],
                key[:at] + letter + key[at + 1 :],
                key[:at] + key[at + 1 : at + 2] + key[at] + key[at + 2 :],
            ]
        )
    )
    assume(wrong and wrong != key and wrong.strip("_"))
    lines[number] = f"{head[: len(head) - len(key)]}{wrong}{colon}{rest}"
    return number + 1, key, wrong, "\n".join(lines)


@given(case=mistyped())
@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    max_examples=60,
)
def test_any_mistyped_key_is_named_with_its_line_and_the_key_that_was_meant(
    case: tuple[int, str, str, str], refuse: Refuse
) -> None:
    line, key, wrong, text = case
    message = refuse(text)
    assert len(message) == 1
    assert message[0].startswith(f"run.yaml:{line}: ")
    assert f"{wrong}: unknown key; " in message[0]
    if len(key) > 4:
        assert f"{key}'?" in message[0]


def test_the_full_config_is_valid(load: Load) -> None:
    assert load(FULL).training.optimizer.betas == (0.9, 0.95)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2e-5", 2e-5),
        ("1E3", 1000.0),
        (".5", 0.5),
        ("1_000", 1000),
        ("0x10", 16),
        ("-3", -3),
        ("yes", True),
        ("Off", False),
        ("~", None),
        ("", None),
        ("010", "010"),
        ("12:30:00", "12:30:00"),
        ("2024-01-31", "2024-01-31"),
        ("1.2.3", "1.2.3"),
        ("'2e-5'", "2e-5"),
        ('"null"', "null"),
        ("e5", "e5"),
    ],
)
def test_scalars_mean_what_an_engineer_expects(text: str, value: object) -> None:
    found = parse_document(f"key: {text}\n", "x").value["key"]
    assert found == value
    assert type(found) is type(value)


def test_a_number_in_scientific_notation_is_a_learning_rate(load: Load) -> None:
    assert load().training.optimizer.learning_rate == 4e-3


def test_anchors_and_merge_keys_work_and_own_keys_win(load: Load) -> None:
    text = RUN.replace(
        "source: builtin:text-to-sql",
        "source:\n    - &a {path: a.jsonl, weight: 2}\n    - {<<: *a, path: b.jsonl}",
    )
    source = load(text.replace("format: text-to-sql", "format: text")).data.source
    found = [(Path(item.path).name, item.weight) for item in source]  # type: ignore[union-attr]
    assert found == [("a.jsonl", 2.0), ("b.jsonl", 2.0)]


def test_a_mistake_in_a_merged_mapping_is_reported_where_it_is_written(refuse: Refuse) -> None:
    text = RUN.replace(
        "source: builtin:text-to-sql",
        "source:\n    - &a {path: a.jsonl,\n       wieght: 2}\n    - {<<: *a, path: b}",
    )
    assert [line.split(": ")[0] for line in refuse(text)] == ["run.yaml:8", "run.yaml:8"]


def test_all_mistakes_of_a_file_are_reported_at_once_in_its_order(refuse: Refuse) -> None:
    text = (
        RUN.replace("init: random", "init: randon")
        .replace("steps: 100", "stps: 1")
        .replace("fp32", "fp16")
    )
    assert each_says(
        refuse(text),
        [
            "run.yaml:4: model.init: ... 'randon' ... 'pretrained' ... 'random' ... 'random'",
            "run.yaml:11: training.stps: ... 'steps'",
            "run.yaml:12: training.precision: ... 'fp16' ... 'bf16', 'fp8' ... 'fp64'",
        ],
    )


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("steps: 100", "steps: '100'", "11: training.steps: ... '100' ... > 0 ... null"),
        ("steps: 100", "steps: true", "11: training.steps: ... true ... > 0 ... null"),
        ("steps: 100", "steps: 1e2", "11: training.steps: ... 100.0 ... > 0 ... null ... 100"),
        ("steps: 100", "steps: -1", "11: training.steps: ... -1 ... > 0 ... null"),
        ("4e-3", ".inf", "14: training.optimizer.learning_rate: ... Infinity ... > 0"),
        ("4e-3", "fast", "14: training.optimizer.learning_rate: ... 'fast' ... > 0"),
        (
            "name: small",
            "name: 7",
            "1: name: ... 7 ... 63 ... '.', '_' ... '-'",
        ),
        ("  steps: 100", "  max_steps: 9", "11: training.max_steps: unknown ... 'steps'"),
        ("  steps: 100", "  lr: 9", "11: training.lr: unknown ... 'optimizer.learning_rate'"),
        (
            "  steps: 100",
            "  learning_rate: 9",
            "11: training.learning_rate: ... 'training.optimizer'",
        ),
        (
            "  steps: 100",
            "  sequence_lenght: 9",
            "11: training.sequence_lenght: ... 'data.sequence_length'",
        ),
        (
            "  optimizer:\n    learning_rate: 4e-3\n",
            "  seed: 0\n",
            "10: training.optimizer: missing ... `optimizer: {learning_rate: 2.0e-05}`",
        ),
        (
            "    learning_rate: 4e-3",
            "",
            "13: training.optimizer: ... empty ... `optimizer: {learning_rate: 2.0e-05}`",
        ),
        (
            "source: builtin:text-to-sql",
            "source: 5",
            (
                "6: data.source: ... 5 ... (path, weight, name, split, max_samples, options) ..."
                " quotes"
            ),
        ),
        (
            "source: builtin:text-to-sql",
            "source: [a, {path: b, weight: 0}]",
            "6: data.source.1.weight: ... 0 ... > 0",
        ),
        (
            "source: builtin:text-to-sql",
            "source: {weight: 2}",
            "6: data.source.path: missing ... `path: documents.jsonl`",
        ),
        ("vocab_size: 1024", "vocab_size: 8", "9: data.tokenizer.vocab_size: ... 8 ... >= 260"),
        (
            "  precision: fp32",
            "  compile: maybe",
            "12: training.compile: ... 'maybe' ... 'auto' ... true ... false",
        ),
    ],
)
def test_a_mistake_is_reported_with_line_key_what_was_found_and_what_is_allowed(
    old: str, new: str, message: str, refuse: Refuse
) -> None:
    assert old in RUN
    assert each_says(refuse(RUN.replace(old, new)), [f"run.yaml:{message}"])


@pytest.mark.parametrize(("value", "meant"), [("true", "auto"), ("no", "never")])
def test_a_resume_of_yes_or_no_is_reported_what_it_means(
    value: str, meant: str, refuse: Refuse, load: Load
) -> None:
    (problem,) = refuse(f"{RUN}checkpoint:\n  resume: {value}\n")
    assert "quotes" not in problem
    assert says(problem, f"allowed: auto, never ... '{meant}'")
    assert load(RUN, f"checkpoint.resume={meant}").checkpoint.resume == meant


def test_a_whole_section_that_is_missing_is_reported_with_an_example(refuse: Refuse) -> None:
    text = RUN.replace(
        "model:\n  config: {architecture: llama, hidden_size: 64}\n  init: random\n", ""
    )
    assert each_says(refuse(text), ["run.yaml: model: missing ... `model: {id: Qwen/Qwen3-0.6B}`"])


@pytest.mark.parametrize("value", [".inf", "[1, .nan]", "{a: -.inf}"])
def test_a_number_that_is_not_finite_is_refused_in_values_of_any_kind(
    value: str, refuse: Refuse
) -> None:
    model = f"model:\n  init: random\n  config:\n    architecture: llama\n    odd: {value}\n"
    assert says(
        refuse(re.sub(r"(?m)^model:.*\n( .*\n)*", model, RUN)), "model.config ... odd ... finite"
    )


def test_a_list_of_the_wrong_length_is_reported(refuse: Refuse) -> None:
    text = RUN + "    betas: [0.9]\n"
    assert each_says(
        refuse(text),
        ["run.yaml:15: training.optimizer.betas: ... 1 ... 2: ... >= 0 ... < 1 ... >= 0 ... < 1"],
    )


def test_an_error_never_shows_pydantic(refuse: Refuse) -> None:
    text = RUN.replace("source: builtin:text-to-sql", "source: [[1], {pth: 3}, null]").replace(
        "steps: 100", "steps: []"
    )
    message = "\n".join(refuse(text))
    for word in (
        "pydantic",
        "validation error",
        "SourceConfig",
        "Input should",
        "union",
        "int_type",
    ):
        assert word not in message


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "run.yaml: ... empty ... name, output, model"),
        (b"# only a comment\n", "run.yaml: is empty"),
        (b"- a\n- b\n", "run.yaml: ... list of 2 ... mapping"),
        (b"just text\n", "run.yaml: ... 'just text' ... mapping"),
        (b"name: a\nmodel: \xff\n", "run.yaml:2: not UTF-8 (byte 0xff)"),
        (b"name: a\nmodel: {init: [random}\n", "run.yaml:2: not valid YAML"),
        (b"name: a\nmodel:\n\tinit: random\n", "run.yaml:3: not valid YAML"),
        (b"name: a\n\x00\n", "run.yaml:2: not valid YAML"),
        (b"name: a\n---\nname: b\n", "run.yaml:2: not valid YAML"),
        (b"name: *unknown\n", "run.yaml:1: not valid YAML"),
        (b"name: !secret x\n", "run.yaml:1: name: ... YAML ... !secret"),
        (b"name: &a [*a]\n", "run.yaml:1: name.0: ... alias"),
        (b"? [a, b]\n: 1\n", "run.yaml:1: ?: ... key"),
    ],
)
def test_what_is_no_config_is_reported_in_a_line(
    content: bytes, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_bytes(content)
    with pytest.raises(UserError) as caught:
        load_run_config("run.yaml")
    assert any(says(line, message) for line in str(caught.value).splitlines())


def test_a_missing_file_and_a_directory_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"^run\.yaml: .*`drillyard init`"):
        load_run_config("run.yaml")
    with pytest.raises(UserError, match="is a directory"):
        load_run_config(".")


def test_a_byte_order_mark_is_no_part_of_the_first_key(load: Load) -> None:
    assert load("\ufeff" + RUN).name == "small"


def test_a_key_given_twice_is_an_error_that_names_both_lines(refuse: Refuse) -> None:
    text = RUN.replace("  steps: 100\n", "  steps: 100\n  seed: 1\n  steps: 5\n")
    assert each_says(refuse(text), ["run.yaml:13: training.steps: ... 11 ... 13"])


# Saving
# --------------------------------------------------------------------------------------------------

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12).filter(
    lambda text: "${env:" not in text
)
TRICKY = st.sampled_from(
    [
        "2e-5",
        "010",
        "yes",
        "null",
        "<<",
        "=",
        "~",
        "12:30",
        "2024-01-31",
        "1_0",
        "- a",
        "#",
        "",
        ".inf",
    ]
)
SCALARS = st.one_of(
    TEXT,
    TRICKY,
    st.booleans(),
    st.none(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False, allow_infinity=False),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT | TRICKY, inner, max_size=3),
)


@pytest.mark.slow
@given(config=st.dictionaries(TEXT | TRICKY, VALUES, max_size=4))
@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    max_examples=60,
)
def test_whatever_a_config_holds_survives_saving_and_saving_again_changes_nothing(
    config: dict[str, Any], tmp_path: Path, load: Load
) -> None:
    base = load()
    changed = base.model_copy(update={"model": base.model.model_copy(update={"config": config})})
    save_resolved(changed, tmp_path / "first.yaml")
    loaded = load_run_config(tmp_path / "first.yaml")
    assert loaded == changed
    save_resolved(loaded, tmp_path / "second.yaml")
    assert (tmp_path / "first.yaml").read_bytes() == (tmp_path / "second.yaml").read_bytes()


def test_a_saved_config_spells_out_every_default(load: Load, tmp_path: Path) -> None:
    save_resolved(load(), tmp_path / "saved.yaml")
    saved = yaml.safe_load((tmp_path / "saved.yaml").read_text())
    assert set(saved) == set(RunConfig.model_fields)
    assert saved["training"]["optimizer"]["betas"] == [0.9, 0.95]
    assert saved["checkpoint"]["keep"] == 3


def test_saving_leaves_no_half_made_file_and_replaces_the_old_one(
    load: Load, tmp_path: Path
) -> None:
    target = tmp_path / "out" / "run.yaml"
    target.parent.mkdir()
    target.write_text("old")
    save_resolved(load(), target)
    assert [path.name for path in target.parent.iterdir()] == ["run.yaml"]
    assert load_run_config(target) == load()


def test_saving_where_nothing_can_be_written_is_reported(load: Load, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"missing/run\.yaml: .*No such file"):
        save_resolved(load(), tmp_path / "missing" / "run.yaml")


def test_files_of_a_cluster_config_are_relative_to_it(tmp_path: Path) -> None:
    given = {"config_file": "keys/config", "identity_file": "~/.ssh/id", "hosts": ["h0"]}
    path = tmp_path / "cluster.yaml"
    path.write_text(json.dumps({"name": "c", "platform": "ssh", "nodes": 1, "ssh": given}))
    ssh = load_cluster_config(path).section
    assert ssh.config_file == str(tmp_path / "keys/config")
    assert ssh.identity_file == str(Path.home() / ".ssh/id")
    path.write_text(
        json.dumps({"name": "c", "platform": "slurm", "slurm": {"config_file": "config"}})
    )
    assert load_cluster_config(path).section.config_file == str(tmp_path / "config")
