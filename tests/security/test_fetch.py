"""`runs artifacts --fetch` and logs: a hostile host, hostile names and links lead nowhere outside
of the destination.

Export and prune are in tests/integration/test_export_directories.py and tests/unit/checkpoint.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.security.trees import snapshot

from drillyard.errors import UserError
from drillyard.launch.remote_files import (
    LocalFiles,
    ReadRequest,
    ReadResult,
    RemoteFiles,
    artifacts_of,
    copy_files,
    read_file,
)
from drillyard.programs import Host, Programs

HOSTILE_NAMES = [
    "../escaped.txt",
    "../../escaped.txt",
    "..",
    ".",
    "",
    "/",
    "{outside}/escaped.txt",
    "{outside}",
    "//{outside}/escaped.txt",
    "final/../../escaped.txt",
    "final/..",
    "final/../..",
    "./../escaped.txt",
    "a//../../escaped.txt",
    "logs//rank-0.log",
    "logs/./rank-0.log",
    "logs/",
    "linked/escaped.txt",
    "linked/deeper/escaped.txt",
    "file/below",
    "name\nwith a line",
    "name\x1b]0;title\x07",
    "name\x9b2J",
    "name\u202etxt.exe",
    "d/" * 150 + "name",
    "name\x00",
    "\x7f",
    "no text \ud800",
]


class HostileHost(LocalFiles):
    """Answers every request for a file."""

    def read(self, requests: Sequence[ReadRequest]) -> list[ReadResult | None]:
        return [
            ReadResult(b"evil", False, b"evil" if request.offset == 0 else b"")
            for request in requests
        ]


@pytest.fixture
def destination(tmp_path: Path, outside: Path) -> Path:
    place = tmp_path / "fetched" / "run"
    place.mkdir(parents=True)
    (place / "linked").symlink_to(outside)
    (place / "file").write_text("")
    return place


@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_a_fetched_name_never_leaves_the_destination(
    tmp_path: Path, outside: Path, destination: Path, name: str
) -> None:
    before = snapshot(tmp_path, destination)

    with pytest.raises(UserError):
        copy_files(
            HostileHost(), "/run", ["summary.json", name.format(outside=outside)], str(destination)
        )

    assert snapshot(tmp_path, destination) == before
    assert sorted(path.name for path in destination.iterdir() if path.name != "summary.json") == [
        "file",
        "linked",
    ]


def test_a_link_in_the_place_of_a_fetched_file_is_replaced_and_not_followed(
    outside: Path, destination: Path
) -> None:
    (destination / "summary.json").symlink_to(outside / "escaped.txt")

    copy_files(HostileHost(), "/run", ["summary.json"], str(destination))

    assert (outside / "escaped.txt").read_text() == "mine"
    assert (destination / "summary.json").read_text() == "evil"
    assert not (destination / "summary.json").is_symlink()


@pytest.fixture
def run(tmp_path: Path, outside: Path) -> Path:
    """A run directory in which somebody has left links and a pipe."""
    place = tmp_path / "runs" / "a"
    (place / "launch").mkdir(parents=True)
    (place / "summary.json").write_text("{}")
    (place / "secret.txt").symlink_to(outside / "escaped.txt")
    (place / "logs").symlink_to(outside)
    (place / "launch" / "node-0.log").symlink_to(outside / "escaped.txt")
    os.mkfifo(place / "pipe")
    return place


def remote() -> RemoteFiles:
    class ThisMachine(Programs):
        def stream(self, argv: Sequence[str]) -> Any:
            return super().stream(shlex.split(argv[-1])[5:])

    return RemoteFiles(Host("login"), ThisMachine(), python=sys.executable)


@pytest.mark.parametrize("files", [LocalFiles(), remote()], ids=["here", "remote"])
def test_links_and_pipes_of_a_run_directory_are_neither_listed_nor_read(
    files: LocalFiles | RemoteFiles, run: Path, tmp_path: Path
) -> None:
    assert artifacts_of(files, str(run)) == [("summary.json", 2)]
    assert files.find([f"{run}/launch/node-*.log", f"{run}/*"]) == [(f"{run}/summary.json", 2)]
    assert read_file(files, f"{run}/secret.txt", 0) == b""
    assert read_file(files, f"{run}/pipe", 0) == b""
    for name in ("secret.txt", "logs/escaped.txt", "launch/node-0.log", "pipe"):
        with pytest.raises(UserError, match="is a link"):
            copy_files(files, str(run), [name], str(tmp_path / "fetched"))
    copy_files(files, str(run), ["summary.json"], str(tmp_path / "fetched"))
    fetched = [path.name for path in (tmp_path / "fetched").rglob("*") if not path.is_dir()]
    assert fetched == ["summary.json"]
    files.close()


def test_a_run_directory_that_is_itself_reached_by_a_link_is_read(
    run: Path, tmp_path: Path
) -> None:
    (tmp_path / "storage").symlink_to(tmp_path / "runs")

    copy_files(
        LocalFiles(), str(tmp_path / "storage" / "a"), ["summary.json"], str(tmp_path / "fetched")
    )

    assert (tmp_path / "fetched" / "summary.json").read_text() == "{}"


ANSWERS = {
    "more bytes than asked for": '{"head": "", "replaced": false, "bytes": 5000000}\n'
    + 5_000_000 * "x",
    "fewer than none": '{"head": "", "replaced": false, "bytes": -1}\n',
    "no number of bytes": '{"head": "", "replaced": false, "bytes": "all"}\n',
    "no bytes": "{}\n",
    "no head": '{"head": 1, "replaced": false, "bytes": 0}\n',
    "a number": "1\n",
}


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS.keys())
def test_an_answer_that_is_none_is_an_error(answer: str, tmp_path: Path) -> None:
    (tmp_path / "answer").write_text(answer)

    class Answering(Programs):
        def stream(self, argv: Sequence[str]) -> Any:
            return super().stream(
                ["sh", "-c", 'cat "$0"; timeout 2 cat >/dev/null', str(tmp_path / "answer")]
            )

    with pytest.raises(UserError, match=r"^login: "):
        read_file(RemoteFiles(Host("login"), Answering()), "/run/a", 0)
