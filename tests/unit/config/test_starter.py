"""The starters of `drillyard init` and the JSON Schemas."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from pydantic import TypeAdapter

from drillyard.config.load import config_model, json_schema, load_cluster_config, load_run_config
from drillyard.config.run import RunConfig
from drillyard.config.run_checks import NOT_AVAILABLE, check_run
from drillyard.config.starter import starter, write_starters
from drillyard.errors import UserError


def test_the_starters_load_and_have_no_contradictions(tmp_path: Path) -> None:
    run, cluster = write_starters(tmp_path / "new", starter("run"))
    assert check_run(load_run_config(run), num_ranks=2) == []
    assert load_cluster_config(cluster).platform == "local"


def test_deleting_a_comment_sign_before_a_setting_changes_nothing(tmp_path: Path) -> None:
    text = starter("run")
    path = tmp_path / "run.yaml"
    path.write_text(text)
    config = load_run_config(path)
    settings = list(re.finditer(r"^( *)#(\w+: .+)$", text, re.MULTILINE))
    assert len(settings) > 25
    path.write_text(re.sub(r"^( *)#(\w+: .+)$", r"\1\2", text, flags=re.MULTILINE))
    assert load_run_config(path) == config


def test_a_section_behind_comment_signs_can_be_taken_as_it_stands(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    # A comment is `# words`, a setting that is not taken `#key: value`, and what stands below it `#  ...`.  # noqa: E501
    text = re.sub(r"^( *)#(?! \S)", r"\1", starter("run"), flags=re.MULTILINE)
    path.write_text(text.replace("fraction: 0.0\n", "fraction: 0.25\n"))
    assert load_run_config(path).data.held_out.fraction == 0.25


def test_what_every_run_is_refused_for_is_not_in_the_starter() -> None:
    content = yaml.safe_load(re.sub(r"^( *)#(?! \S)", r"\1", starter("run"), flags=re.MULTILINE))
    for key in NOT_AVAILABLE:
        section, _, name = key.partition(".")
        assert section in content and name not in content[section]
    assert "gce" not in re.search(r"What runs the job:[^.]*\.", starter("cluster"))[0]


@pytest.mark.parametrize("which", ["run", "cluster"])
def test_every_setting_and_its_meaning_is_in_the_starter(which: str) -> None:
    words = " ".join(starter(which).replace("#", " ").split())
    for definition in [json_schema(which), *json_schema(which)["$defs"].values()]:
        if definition.get("title") in ("SourceConfig", "TrainTokenizer", "LoraConfig"):
            continue
        for key, field in definition["properties"].items():
            if any(refused.endswith(f".{key}") for refused in NOT_AVAILABLE):
                continue
            assert f"{key}:" in words
            assert " ".join(field.get("description", "").replace("#", " ").split()) in words


def test_a_file_that_is_there_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text("mine")
    with pytest.raises(UserError, match=r"cluster\.yaml: there already"):
        write_starters(tmp_path, starter("run"))
    assert (tmp_path / "cluster.yaml").read_text() == "mine"
    assert not (tmp_path / "run.yaml").exists()


def test_a_place_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        write_starters(tmp_path / "file" / "new", starter("run"))


@pytest.mark.parametrize("which", ["run", "cluster"])
def test_a_schema_describes_every_field_and_forbids_others(which: str) -> None:
    schema = json_schema(which)
    for definition in [schema, *schema["$defs"].values()]:
        assert definition["additionalProperties"] is False
        assert definition["description"]
    assert schema["properties"].keys() == config_model(which).model_fields.keys()


def test_the_schema_is_that_of_what_is_loaded() -> None:
    assert (
        TypeAdapter(RunConfig).json_schema()["required"]
        == json_schema("run")["required"]
        == ["name", "model", "data", "training"]
    )
