"""Old flags and keys work, and warn with the new name."""

from __future__ import annotations

import warnings

import pytest

import drillyard
from drillyard.cli import main as cli
from drillyard.config.load import load_run_config
from drillyard.deprecation import (
    RENAMED_FLAGS,
    RENAMED_KEYS,
    RenamedWarning,
    rename_flags,
    rename_key,
)

RUN = """
name: trial
model: {id: some/model}
data: {source: rows.jsonl, seq_len: 128}
training: {steps: 3, optimizer: {learning_rate: 1.0e-4}}
"""


@pytest.mark.parametrize("form", [["--gpu", "b200"], ["--gpu=b200"]])
def test_an_old_flag_becomes_the_new_one_with_a_warning(form):
    with pytest.warns(RenamedWarning, match="--gpu is now --accelerator"):
        renamed = rename_flags([*form, "run.log"], {"--gpu": "--accelerator"})
    assert "=".join(renamed[:-1]) == "--accelerator=b200"


def test_arguments_after_two_dashes_keep_their_words(recwarn):
    assert rename_flags(["--", "--gpu"], {"--gpu": "--accelerator"}) == ["--", "--gpu"]
    assert not recwarn.list


def test_an_old_key_moves_to_its_new_place(recwarn):
    values = {"data": {"seq_len": 128}, "old": 1}
    rename_key("data.seq_len", "data.sequence_length", values)
    rename_key("old", "a.b", values)
    rename_key("absent.key", "c", values)
    assert values == {"data": {"sequence_length": 128}, "a": {"b": 1}}
    assert [str(warning.message).split(";")[0] for warning in recwarn.list] == [
        "data.seq_len is now data.sequence_length",
        "old is now a.b",
    ]


def test_where_both_keys_are_given_the_new_one_wins():
    values = {"data": {"seq_len": 128, "sequence_length": 256}}
    with pytest.warns(RenamedWarning):
        rename_key("data.seq_len", "data.sequence_length", values)
    assert values == {"data": {"sequence_length": 256}}


def test_a_section_that_is_no_mapping_is_left_to_the_checks(recwarn):
    values = {"data": None, "old": 1}
    rename_key("data.seq_len", "data.sequence_length", values)
    rename_key("old", "data.sequence_length", values)
    assert values == {"data": None, "old": 1} and not recwarn.list


def test_an_override_with_an_old_key_wins_over_the_file(tmp_path, monkeypatch):
    monkeypatch.setitem(RENAMED_KEYS, "data.seq_len", "data.sequence_length")
    (tmp_path / "run.yaml").write_text(RUN.replace("seq_len", "sequence_length"))
    with pytest.warns(RenamedWarning):
        assert (
            load_run_config(tmp_path / "run.yaml", ["data.seq_len=64"]).data.sequence_length == 64
        )


def test_a_config_with_an_old_key_is_read(tmp_path, monkeypatch):
    monkeypatch.setitem(RENAMED_KEYS, "data.seq_len", "data.sequence_length")
    (tmp_path / "run.yaml").write_text(RUN)
    with pytest.warns(RenamedWarning, match=r"data\.seq_len is now data\.sequence_length"):
        assert load_run_config(tmp_path / "run.yaml").data.sequence_length == 128


def test_a_warning_points_at_the_caller_of_the_public_function(tmp_path, monkeypatch):
    monkeypatch.setitem(RENAMED_KEYS, "title", "name")
    (tmp_path / "run.yaml").write_text("title: trial\nworkload: {command: [echo], per: node}\n")
    (tmp_path / "cluster.yaml").write_text("name: here\nplatform: local\nprocesses_per_node: 1\n")
    with pytest.warns(RenamedWarning) as caught:
        drillyard.plan(tmp_path / "run.yaml", tmp_path / "cluster.yaml")
    assert {warning.filename for warning in caught} == {__file__}


@pytest.mark.parametrize("command", [["hardware"], ["checkpoint", "list"]])
def test_a_command_takes_its_old_flag_and_warns_in_one_line(command, monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(RENAMED_FLAGS, " ".join(command), {"--as-json": "--json"})
    (tmp_path / "checkpoints").mkdir()
    place = [] if command == ["hardware"] else [str(tmp_path)]
    with pytest.raises(SystemExit), pytest.warns(RenamedWarning) as caught:
        cli.main([*command, *place, "--as-json"])
    assert capsys.readouterr().out.startswith("{")
    (warning,) = caught.list
    line = warnings.formatwarning(warning.message, warning.category, "cli.py", 1)
    assert line.startswith("warning: --as-json is now --json") and line.count("\n") == 1


def test_a_flag_that_another_command_renamed_is_unknown(monkeypatch, tmp_path):
    monkeypatch.setitem(RENAMED_FLAGS, "hardware", {"--as-json": "--json"})
    with pytest.raises(SystemExit) as ended:
        cli.main(["checkpoint", "list", str(tmp_path), "--as-json"])
    assert ended.value.code == 2
