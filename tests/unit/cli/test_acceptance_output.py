"""What `accept` writes: only over what it wrote, and nothing is lost where it cannot."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from tests.unit.acceptance.nccl_samples import a4_output

from drillyard import safe_files
from drillyard.acceptance.accept_command import read_baseline
from drillyard.cli import main as cli


@pytest.fixture
def drillyard(capsys):
    def drillyard(*words):
        """Exit code, standard output and error."""
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main([*map(str, words)])
        return int(ended.value.code or 0), *capsys.readouterr()

    return drillyard


@pytest.fixture
def accept(drillyard):
    return lambda *words: drillyard("accept", *words)


def recorded(tmp_path):
    """Options that judge a recorded table, and pass."""
    output = tmp_path / "output.txt"
    output.write_text(a4_output())
    return ["--from", output, "--machine", "a4-highgpu-8g"]


FILES = ("own.json", "own.html", "own.xml", "own.yaml")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("content", ["notes of mine\n", '{"a": 1}', "<a/>", "\0\xff"])
def test_a_file_of_others_is_not_replaced_and_another_name_works(accept, name, content, tmp_path):
    words = recorded(tmp_path)
    place = tmp_path / "place"
    place.mkdir()
    (place / name).write_text(content)
    outputs = ["--output", place / "own.json", "--write-hardware", place / "own.yaml"]
    code, _, err = accept(*words, *outputs)
    assert code == 2 and name in err
    assert (place / name).read_text() == content
    assert [each.name for each in place.iterdir()] == [name]
    # The remedies: another name, and to move it away.
    other = ["--output", place / "other.json", "--write-hardware", place / "other.yaml"]
    assert accept(*words, *other)[0] == 0
    (place / name).rename(tmp_path / "away")
    assert accept(*words, *outputs)[0] == 0


def test_own_files_are_replaced_until_they_are_edited(accept, tmp_path):
    words = [*recorded(tmp_path), "--output", tmp_path / "own.json"]
    words += ["--write-hardware", tmp_path / "own.yaml"]
    for _ in range(2):
        assert accept(*words)[0] == 0
    assert sorted(each.name for each in tmp_path.iterdir()) == sorted([*FILES, "output.txt"])
    for name in FILES[1:]:
        before = (tmp_path / name).read_text()
        (tmp_path / name).write_text(before.replace("e", "E", 1))
        assert accept(*words)[0] == 2
        (tmp_path / name).write_text("")
        assert accept(*words)[0] == 0
    # What is written is still read: rows as hardware, the document as a baseline.
    assert accept(*words[:4], "--hardware", tmp_path / "own.yaml")[0] == 0
    assert read_baseline(tmp_path / "own.json").recorded


@pytest.mark.parametrize(
    "options",
    [
        ["--output", "same.json", "--write-hardware", "same.json"],
        ["--output", "same.json", "--write-hardware", "same.xml"],
        ["--output", "output.txt"],
        ["--output", "output.txt/below"],
        ["--write-hardware", "directory"],
        ["--write-hardware", "output.txt/below.yaml"],
    ],
)
def test_places_that_cannot_be_written_are_named_before_the_work(
    accept, options, tmp_path, monkeypatch
):
    words = recorded(tmp_path)
    monkeypatch.chdir(tmp_path)
    Path("directory").mkdir()
    code, out, err = accept(*words, *options)
    assert (code, out) == (2, "") and options[1].split("/")[0].split(".")[0] in err
    assert sorted(os.listdir()) == ["directory", "output.txt"]


def test_the_outcome_is_printed_also_where_it_cannot_be_written(accept, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(safe_files, "replace_file", full)
    code, out, err = accept(*recorded(tmp_path), "--output", tmp_path / "own.json")
    assert code == 2 and "own.json" in err
    assert out.startswith("pass: ")


@pytest.mark.parametrize("command", ["accept", "launch"])
def test_the_run_directory_is_no_exception(drillyard, command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("cluster.yaml").write_text("name: lab\nplatform: slurm\nnodes: 2\nprocesses_per_node: 1\n")
    Path("run.yaml").write_text("name: r\nworkload: {command: [python3, x.py]}\n")
    notes = Path("runs/accept-lab/acceptance.json")
    notes.parent.mkdir(parents=True)
    notes.write_text("notes of mine")
    words = {
        "accept": ["accept", "cluster.yaml", "--nodes", 2],
        "launch": ["launch", "run.yaml", "--accept", "quick"],
    }[command]
    code, _, err = drillyard(*words)
    assert code == 2 and str(notes) in err
    # The remedy, as far as a host without a scheduler gets.
    notes.rename("away")
    _, _, err = drillyard(*words)
    assert str(notes) not in err
