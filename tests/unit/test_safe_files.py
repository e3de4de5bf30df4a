"""A file is replaced as a whole or not at all, and its draft overwrites nothing and does not
stay."""

from __future__ import annotations

import errno
import os
import secrets
from pathlib import Path

import pytest
from tests.facts import says

from drillyard.safe_files import describe_os_error, replace_file


def test_a_file_is_replaced_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for data in (b"old", b"new"):
        replace_file(path, data)
        assert path.read_bytes() == data and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("durable", [False, True])
def test_a_full_disk_leaves_the_old_file_and_no_draft(tmp_path: Path, durable: bool) -> None:
    path, draft = tmp_path / "file", tmp_path / "draft"
    path.write_bytes(b"old")
    draft.symlink_to("/dev/full")
    with pytest.raises(OSError) as refused:
        replace_file(path, b"new", draft=draft, durable=durable)
    assert refused.value.errno == errno.ENOSPC
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def test_a_directory_that_is_not_there_is_named_as_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(OSError) as refused:
        replace_file(tmp_path / "absent" / "file", b"new")
    assert says(describe_os_error(refused.value), "directory does not exist; create it")


def test_a_durable_file_is_on_the_disk_before_it_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, seen = tmp_path / "file", []
    monkeypatch.setattr(
        os, "fsync", lambda descriptor: seen.append((os.fstat(descriptor).st_size, path.exists()))
    )
    replace_file(path, b"content", durable=True)
    assert seen == [(7, False)] and path.read_bytes() == b"content"


def test_a_draft_takes_no_name_that_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(secrets, "token_hex", lambda _: "taken")
    other, path = tmp_path / "other", tmp_path / "file"
    other.write_bytes(b"another's")
    link = tmp_path / ".file.taken"
    link.symlink_to(other)
    with pytest.raises(FileExistsError):
        replace_file(path, b"new")
    assert other.read_bytes() == b"another's" and link.is_symlink() and not path.exists()


def test_a_file_has_its_permissions_before_it_has_content(tmp_path, monkeypatch):
    path, seen = tmp_path / "file", []
    path.write_text("old")
    known = os.fchmod

    def fchmod(descriptor, mode):
        known(descriptor, mode)
        seen.append((os.fstat(descriptor).st_size, mode))

    monkeypatch.setattr(os, "fchmod", fchmod)
    replace_file(path, b"new", mode=0o600)
    assert seen == [(0, 0o600)]
    assert path.read_bytes() == b"new" and path.stat().st_mode & 0o777 == 0o600
