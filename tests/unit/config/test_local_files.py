"""Where the files that a config names are, whatever directory the command is typed in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from drillyard.config.load import (
    load_cluster_config,
    load_launch_config,
    load_run_config,
    save_resolved,
)
from drillyard.config.run import RunConfig, WorkloadRunConfig
from drillyard.config.run_data import SourceConfig
from drillyard.config.run_identity import differences
from drillyard.config.saved_config import load_saved_config

TRAINING: dict[str, Any] = {"steps": 3, "optimizer": {"learning_rate": 1.0e-3}}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with `configs`, in which run.yaml is, and `here`, in which commands are typed."""
    for name in ("configs", "here"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path


def write(place: Path, **settings: Any) -> Path:
    """configs/run.yaml with these settings over the least that a run has."""
    data = {"source": "org/rows", "sequence_length": 64} | settings.pop("data", {})
    content = {"name": "a", "model": {"id": "org/model"}, "data": data, "training": TRAINING}
    path = place / "configs" / "run.yaml"
    path.write_text(yaml.safe_dump(content | settings))
    return path


def touch(*paths: Path) -> None:
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def test_each_file_of_a_run_config_is_beside_it(place: Path) -> None:
    configs = place / "configs"
    touch(configs / "rows.jsonl", configs / "more.jsonl", configs / "tok" / "tokenizer.json")
    touch(configs / "model" / "config.json", configs / "adapter" / "adapter_config.json")
    touch(configs / "pair.bin", configs / "pair.idx", place / "test.jsonl")
    (configs / "checkpoints" / "step-5").mkdir(parents=True)
    path = write(
        place,
        model={"id": "model", "lora": {"adapter": "adapter"}},
        data={
            "source": ["rows.jsonl", {"path": "./more.jsonl", "weight": 2.0}, "pair"],
            "held_out": {"source": "../test.jsonl"},
            "tokenizer": "tok",
        },
        checkpoint={"resume": "checkpoints/step-5"},
    )
    config = load_run_config(path)
    first, second, third = config.data.source
    assert isinstance(second, SourceConfig) and second.weight == 2.0
    found = [first, second.path, third, config.data.held_out.source, config.data.tokenizer]
    assert found == [
        *(str(configs / name) for name in ("rows.jsonl", "more.jsonl", "pair")),
        str(place / "test.jsonl"),
        str(configs / "tok"),
    ]
    assert config.model.id == str(configs / "model") and config.model.lora is not None
    assert config.model.lora.adapter == str(configs / "adapter")
    assert config.checkpoint.resume == str(configs / "checkpoints" / "step-5")
    # A copy that is saved elsewhere names the same files.
    save_resolved(config, place / "here" / "saved.yaml")
    assert load_saved_config(place / "here" / "saved.yaml") == config
    assert load_run_config(place / "here" / "saved.yaml") == config


def test_what_is_not_beside_the_config_is_in_the_working_directory(place: Path) -> None:
    touch(place / "here" / "corpus" / "rows.jsonl")
    config = load_run_config(write(place, data={"source": "corpus/rows.jsonl"}))
    assert config.data.source == str(place / "here" / "corpus" / "rows.jsonl")
    touch(place / "configs" / "corpus" / "rows.jsonl")
    config = load_run_config(write(place, data={"source": "corpus/rows.jsonl"}))
    assert config.data.source == str(place / "configs" / "corpus" / "rows.jsonl")


def test_what_is_nowhere_is_missed_beside_the_config_and_names_stay(place: Path) -> None:
    path = write(place, data={"source": "rows.jsonl", "tokenizer": "openai-community/gpt2"})
    config = load_run_config(path)
    assert config.data.source == str(place / "configs" / "rows.jsonl")
    assert (config.model.id, config.data.tokenizer) == ("org/model", "openai-community/gpt2")
    assert config.checkpoint.resume == "auto"
    for name in (
        "",
        " ",
        "builtin:text-to-sql",
        "s3://bucket/rows.jsonl",
        "https://host/a.jsonl?b=./c",
    ):
        assert load_run_config(write(place, data={"source": name})).data.source == name


def test_what_an_option_sets_begins_in_the_working_directory(place: Path) -> None:
    touch(place / "configs" / "rows.jsonl", place / "here" / "rows.jsonl")
    path = write(place)
    config = load_run_config(path, ["data.source=rows.jsonl"])
    assert config.data.source == str(place / "here" / "rows.jsonl")
    config = load_run_config(path, ["data.source=[{path: none.jsonl}]"])
    (source,) = config.data.source
    assert isinstance(source, SourceConfig) and source.path == str(place / "here" / "none.jsonl")


def test_references_and_links_are_kept(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROWS", "rows.jsonl")
    touch(
        place / "configs" / "rows.jsonl", place / "far" / "off" / "sub" / "x", place / "far" / "y"
    )
    config = load_run_config(write(place, data={"source": "${env:ROWS}"}))
    assert config.model_dump(mode="json")["data"]["source"] == "${env:ROWS}"
    (place / "configs" / "linked").symlink_to(place / "far" / "off" / "sub")
    touch(place / "far" / "off" / "rows.jsonl")
    source = load_run_config(write(place, data={"source": "linked/../rows.jsonl"})).data.source
    assert isinstance(source, str)
    assert Path(source).resolve() == place / "far" / "off" / "rows.jsonl"


def test_a_launch_names_what_is_below_the_working_directory_as_the_nodes_have_it(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    touch(place / "configs" / "rows.jsonl")
    path = write(place, data={"source": "rows.jsonl", "tokenizer": "~/tok"})
    outside = load_launch_config(path)
    assert isinstance(outside, RunConfig)
    assert outside.data.source == str(place / "configs" / "rows.jsonl")
    monkeypatch.chdir(place)
    below = load_launch_config("configs/run.yaml")
    assert isinstance(below, RunConfig)
    assert (below.data.source, below.data.tokenizer) == ("configs/rows.jsonl", "~/tok")
    # What only the nodes have is below the project's directory there.
    path.write_text(path.read_text().replace("rows.jsonl", "theirs/rows.jsonl"))
    theirs = load_launch_config("configs/run.yaml")
    assert isinstance(theirs, RunConfig) and theirs.data.source == "theirs/rows.jsonl"
    monkeypatch.chdir(place / "configs")
    assert load_launch_config("run.yaml") == theirs


def test_files_that_a_workload_carries_are_beside_its_config(place: Path) -> None:
    touch(place / "configs" / "job.sh", place / "here" / "nemo.yaml")
    workload = {"launcher_file": "job.sh", "files": {"conf/nemo.yaml": "nemo.yaml"}}
    path = place / "configs" / "work.yaml"
    path.write_text(yaml.safe_dump({"name": "w", "workload": workload}))
    config = load_launch_config(path)
    assert isinstance(config, WorkloadRunConfig)
    assert config.workload.launcher_file == str(place / "configs" / "job.sh")
    assert config.workload.files == {"conf/nemo.yaml": "nemo.yaml"}


def test_files_of_a_cluster_config_are_beside_it_alone(place: Path) -> None:
    touch(place / "here" / "ssh_config")
    path = place / "configs" / "cluster.yaml"
    path.write_text("name: c\nplatform: ssh\nssh: {hosts: [h0], config_file: ssh_config}\n")
    section = load_cluster_config(path).section
    assert getattr(section, "config_file", None) == str(place / "configs" / "ssh_config")
    path.write_text("name: c\nplatform: ssh\nssh: {hosts: [h0], config_file: none}\n")
    assert getattr(load_cluster_config(path).section, "config_file", None) == "none"


def test_storage_is_beside_the_config_where_it_is_of_this_machine(place: Path) -> None:
    path = place / "configs" / "cluster.yaml"
    path.write_text("name: c\nplatform: local\nstorage: {directory: results}\n")
    assert load_cluster_config(path).storage.directory == str(place / "configs" / "results")
    path.write_text("name: c\nplatform: local\nstorage: {directory: '${env:ROOT}/a'}\n")
    config = load_cluster_config(path, resolve_environment=False)
    assert config.storage.directory == "${env:ROOT}/a"
    path.write_text("name: c\nplatform: ssh\nssh: {hosts: [h]}\nstorage: {directory: /a}\n")
    assert load_cluster_config(path).storage.directory == "/a"


def test_a_path_written_in_another_way_or_moved_with_its_project_is_the_same_run(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    touch(place / "configs" / "rows.jsonl", place / "configs" / "other.jsonl")
    path = write(place, data={"source": "rows.jsonl"})
    saved = place / "saved.yaml"
    saved.write_text(path.read_text())
    monkeypatch.chdir(place / "configs")
    # Earlier versions saved the path as it was typed.
    assert differences(load_saved_config(saved), load_run_config(path)) == []
    monkeypatch.chdir(place / "here")
    assert differences(load_saved_config(saved), load_run_config(path)) == []
    save_resolved(load_run_config(path), saved)
    (place / "configs").rename(place / "moved")
    moved = load_run_config(place / "moved" / "run.yaml")
    assert differences(load_saved_config(saved), moved) == []
    other = load_run_config(place / "moved" / "run.yaml", ["data.source=../moved/other.jsonl"])
    assert differences(load_saved_config(saved), other)
    touch(place / "configs" / "rows.jsonl")
    assert differences(load_saved_config(saved), moved)
