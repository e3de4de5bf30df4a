"""What goes into a build: files of the commit, and neither secrets nor what git does not track."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import pytest
from tests.unit.provision.images.checkout import EPOCH, git, make_checkout

from drillyard.errors import UserError
from drillyard.programs import Programs
from drillyard.provision.images.build_context import (
    context_archive,
    context_notices,
    read_context,
    write_context,
)

KEY = "-----BEGIN PRIVATE KEY-----\nMIIEvQIBADANBgkqhkiG9w0BAQEF\n-----END PRIVATE KEY-----\n"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    made = tmp_path / "checkout"
    make_checkout(
        made, {"Dockerfile": "FROM a:1\n", "app/main.py": "x = 1\n", ".gitignore": "runs/\n"}
    )
    return made


def test_a_clean_checkout_is_its_commit(checkout: Path) -> None:
    context = read_context(checkout, Programs())
    assert context.files == (".gitignore", "Dockerfile", "app/main.py")
    assert context.epoch == EPOCH
    assert context.commit == context.revision == git(checkout, "rev-parse", "HEAD")
    assert context.tag == f"sha-{context.commit[:12]}"
    assert context.version == context.commit[:12]
    assert list(context_notices(context)) == []
    git(checkout, "tag", "v1.2.3")
    assert read_context(checkout, Programs()).version == "v1.2.3"


def test_a_directory_below_the_repository_is_a_context_of_its_own(checkout: Path) -> None:
    (checkout / "app/main.py").write_text("x = 2\n")
    (checkout / "elsewhere").write_text("1")
    context = read_context(checkout / "app", Programs())
    assert (context.files, context.changed, context.untracked) == (("main.py",), ("main.py",), ())


def test_changed_and_untracked_files_are_named(checkout: Path) -> None:
    (checkout / "app/main.py").write_text("x = 2\n")
    (checkout / "Dockerfile").unlink()
    (checkout / "new file.py").write_text("1")
    (checkout / "runs/a").mkdir(parents=True)
    (checkout / "runs/a/events.jsonl").write_text("{}\n")
    context = read_context(checkout, Programs())
    assert context.changed == ("Dockerfile", "app/main.py")
    assert context.untracked == ("new file.py",)
    assert context.files == (".gitignore", "app/main.py")
    assert context.revision.endswith("-dirty")
    assert context.tag.endswith("-dirty")
    assert context.version.endswith("-dirty")
    named = "\n".join(context_notices(context))
    for name in ("Dockerfile", "app/main.py", "new file.py"):
        assert f"'{name}'" in named
    assert "runs" not in named


def test_no_secret_no_git_and_no_run_directory_goes_in(checkout: Path, tmp_path: Path) -> None:
    secrets = {
        ".env": "A=1",
        "deep/id_rsa": "x",
        "server.key": "x",
        "account.json": '{"key": "-----BEGIN PRIVATE KEY-----\\nMIIEvQIBADANBgkqhkiG9w0BAQ"}',
        "both.pem": KEY,
        "note.txt": f"see:\n{KEY}",
    }
    harmless = {
        ".env.example": "A=",
        "ca.pem": "-----BEGIN CERTIFICATE-----\nMIIEvQIBADANBgkqhkiG9w0BAQEF\n",
        "test.py": 'MARK = "-----BEGIN PRIVATE KEY-----"\n',
    }
    for name, content in (secrets | harmless).items():
        (checkout / name).parent.mkdir(exist_ok=True)
        (checkout / name).write_text(content)
    git(checkout, "add", "--all", "--force")
    git(checkout, "commit", "--quiet", "--message", "two")
    (checkout / "runs").mkdir()
    (checkout / "runs/run.yaml").write_text("token: x")
    context = read_context(checkout, Programs())
    assert set(context.credentials) == set(secrets)
    assert set(harmless) <= set(context.files)
    named = "\n".join(context_notices(context))
    assert all(f"'{name}'" in named for name in secrets)
    write_context(context, tmp_path / "out")
    written = {
        path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*")
    }
    assert not written & {*secrets, "runs", ".git"}
    with tarfile.open(fileobj=io.BytesIO(context_archive(context))) as tar:
        assert set(tar.getnames()) == set(context.files)


def test_two_checkouts_of_a_commit_are_the_same_bytes(checkout: Path, tmp_path: Path) -> None:
    (checkout / "app/run.sh").write_text("#!/bin/sh\n")
    (checkout / "app/run.sh").chmod(0o755)
    (checkout / "app/link").symlink_to("/etc/passwd")
    git(checkout, "add", "--all")
    git(checkout, "commit", "--quiet", "--message", "two")
    mask = os.umask(0o077)
    git(tmp_path, "clone", "--quiet", str(checkout), "other")
    os.umask(mask)
    os.utime(tmp_path / "other/Dockerfile", (1, 1))
    archives, trees = set(), []
    for name in ("checkout", "other"):
        context = read_context(tmp_path / name, Programs())
        archives.add(context_archive(context))
        copy = tmp_path / f"{name}-copy"
        write_context(context, copy)
        trees.append(
            [
                (str(path.relative_to(copy)), path.lstat().st_mode, path.lstat().st_mtime)
                for path in sorted(copy.rglob("*"))
            ]
        )
    assert len(archives) == 1
    assert trees[0] == trees[1]
    assert {time for _, _, time in trees[0]} == {EPOCH}
    # A link is a link: what it points to on this machine is not copied.
    assert (tmp_path / "other-copy/app/link").is_symlink()


def test_without_a_commit_there_is_no_image(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(UserError, match=r"git init && git add \. && git commit"):
        read_context(tmp_path / "a", Programs())
    git(tmp_path / "a", "init", "--quiet")
    with pytest.raises(UserError, match=r"no commit.*git commit"):
        read_context(tmp_path / "a", Programs())
    with pytest.raises(UserError, match="--context"):
        read_context(tmp_path / "missing", Programs())


def test_a_submodule_goes_in_once_it_is_checked_out(checkout: Path, tmp_path: Path) -> None:
    make_checkout(tmp_path / "part", {"part.py": "y = 1\n"})
    allowed = ("-c", "protocol.file.allow=always")
    git(checkout, *allowed, "submodule", "--quiet", "add", str(tmp_path / "part"), "sub")
    git(checkout, "commit", "--quiet", "--message", "two")
    assert "sub/part.py" in read_context(checkout, Programs()).files
    git(tmp_path, "clone", "--quiet", str(checkout), "other")
    context = read_context(tmp_path / "other", Programs())
    assert (context.submodules, "sub" in context.files) == (("sub",), False)
    assert "git submodule update --init" in "\n".join(context_notices(context))
    git(tmp_path / "other", *allowed, "submodule", "--quiet", "update", "--init")
    context = read_context(tmp_path / "other", Programs())
    assert (context.submodules, "sub/part.py" in context.files) == ((), True)


def test_a_name_that_is_no_text_is_an_error_and_not_left_out(checkout: Path) -> None:
    Path(os.fsdecode(os.fsencode(checkout) + b"/a\xff.py")).write_text("x = 1\n")
    git(checkout, "add", "--all")
    with pytest.raises(UserError, match=r"not UTF-8.*git mv"):
        read_context(checkout, Programs())


def test_a_pipe_in_the_place_of_a_file_is_named(checkout: Path) -> None:
    (checkout / "app/main.py").unlink()
    os.mkfifo(checkout / "app/main.py")
    with pytest.raises(UserError, match=r"app/main\.py: is a named pipe"):
        read_context(checkout, Programs())
