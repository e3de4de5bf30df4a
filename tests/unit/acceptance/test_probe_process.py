"""Processes of probes: what they print needs no disk, and nothing that they do harms the job, the
host or files of others."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from drillyard.acceptance.job import node_files
from drillyard.acceptance.node import evidence_file, probe_host, probe_process, probe_storage
from drillyard.acceptance.node.evidence_file import write_evidence
from drillyard.acceptance.node.probe_process import ProbeProcesses


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def ended(*codes: str) -> list[probe_process.Ended]:
    processes = ProbeProcesses([python(code) for code in codes], [{}] * len(codes), "{}")
    return processes.wait(20)


@pytest.fixture
def full_tmp(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for name in ("TemporaryFile", "NamedTemporaryFile", "gettempdir", "mkstemp"):
        monkeypatch.setattr(tempfile, name, full)


def test_probes_run_where_no_temporary_file_can_be_made(full_tmp: None) -> None:
    (found,) = ended("import json; print(json.dumps({'a': 1}))")
    assert (found.values, found.error) == ({"a": 1}, None)
    assert "/tmp" in probe_host.probe({})["disks"]


def test_the_host_is_looked_at_from_a_directory_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert {"/", "/tmp", str(tmp_path)} == probe_host.probe({})["disks"].keys()


def test_where_one_process_cannot_be_started_none_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []

    class Recorded(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            started.append(self)

    monkeypatch.setattr(probe_process.subprocess, "Popen", Recorded)
    sleeps = python("import time; time.sleep(60)")
    with pytest.raises(FileNotFoundError):
        ProbeProcesses([sleeps, ["/missing/program"]], [{}, {}], "{}")
    (first,) = started
    assert first.poll() is not None


def test_what_prints_without_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_process, "_MOST_PRINTED_BYTES", 1 << 20, raising=False)
    (found,) = ended("while True: print('x' * 9999)")
    assert found.values is None and found.error is not None and "MiB" in found.error


@pytest.mark.parametrize("printed", ["'{\"a\":' * 99999", "'[]'", "'{'", "''", "'{}' + chr(0)"])
def test_what_is_not_an_object_is_an_error(printed: str) -> None:
    (found,) = ended(f"print({printed})")
    assert found.values is None and found.error


@pytest.mark.parametrize("place", ["/dev/null/scratch", "/proc/scratch"])
def test_storage_that_cannot_be_written_is_named_in_one_line(place: str, tmp_path: Path) -> None:
    for file in node_files():
        (tmp_path / Path(file.path).name).write_text(file.content)
    arguments = {"bytes": 1, "files": 1, "files_seconds": 1}
    ran = subprocess.run(
        [sys.executable, str(tmp_path), "probe", "storage"],
        input=json.dumps(arguments),
        env={**os.environ, "ACCEPTANCE_SCRATCH": place},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.returncode, ran.stdout) == (1, "")
    (line,) = ran.stderr.splitlines()
    assert place.rpartition("/")[0] in line


def test_leftovers_are_removed_and_directories_of_others_stay(tmp_path: Path) -> None:
    own = tmp_path / probe_storage.scratch_name(0, 7, "0123456789abcdef")
    own.mkdir()
    (own / "data").write_bytes(b"x")
    (own / "f12").write_bytes(b"1")
    mine = [tmp_path / "scratch-notes", tmp_path / "scratch-0-7"]
    edited = tmp_path / probe_storage.scratch_name(0, 8, "0123456789abcdef")
    for each in (*mine, edited):
        each.mkdir()
        (each / "thesis.tex").write_text("kept")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    link = tmp_path / probe_storage.scratch_name(1, 1, "0123456789abcdef")
    link.symlink_to(elsewhere)
    probe_storage.remove_leftovers(tmp_path)
    left = {each.name for each in tmp_path.iterdir()}
    assert left == {each.name for each in (*mine, edited, elsewhere, link)}
    assert (edited / "thesis.tex").read_text() == "kept"


def test_a_full_disk_keeps_the_evidence_that_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "evidence.json"
    write_evidence(path, {"step": 1})

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(evidence_file.os, "replace", full)
    with pytest.raises(OSError):
        write_evidence(path, {"step": 2})
    assert json.loads(path.read_text()) == {"step": 1}
    assert [each.name for each in tmp_path.iterdir()] == [path.name]
