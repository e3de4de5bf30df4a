"""The files that an image is built from: what git tracks below a directory, as they are there now.

Nothing else is sent to a builder: neither .git, nor what git ignores or does not know (run
directories, environments, downloads), nor files that look like credentials. Times are those of the
commit and modes are 644 or 755, so two checkouts of a commit give the same bytes whenever and
however they were made. A .dockerignore among the files applies to them as usual.
"""

from __future__ import annotations

import gzip
import io
import os
import re
import shutil
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from drillyard.errors import UserError
from drillyard.formatting import plural
from drillyard.guarded_files import open_regular, require_regular
from drillyard.launch.sync_archive import looks_like_credentials
from drillyard.programs import Programs

COMMIT_DIGITS = 12


@dataclass(frozen=True)
class BuildContext:
    """The files of a build and the commit that they are of.

    `files`: paths below `directory`. `changed`: those that differ from the commit, or are deleted;
    `untracked`, `credentials` and `submodules`, which are not checked out, are left out. `epoch`:
    the commit's time, in Unix seconds.
    """

    directory: Path
    commit: str
    epoch: int
    version: str
    files: tuple[str, ...]
    changed: tuple[str, ...] = ()
    untracked: tuple[str, ...] = ()
    credentials: tuple[str, ...] = ()
    submodules: tuple[str, ...] = ()

    @property
    def revision(self) -> str:
        """The commit; with `-dirty` where files differ from it."""
        return self.commit + ("-dirty" if self.changed else "")

    @property
    def tag(self) -> str:
        return f"sha-{self.commit[:COMMIT_DIGITS]}" + ("-dirty" if self.changed else "")


def read_context(directory: Path, programs: Programs) -> BuildContext:
    """What git says of the directory. Raises UserError where it is in no repository, or where that
    has no commit."""
    if not directory.is_dir():
        raise UserError(f"{directory}: is not a directory; --context names one")

    def git(*argv: str) -> str | None:
        done = programs.run(["git", "-C", str(directory), *argv])
        return done.stdout if done.returncode == 0 else None

    place = "commit its files first: git init && git add . && git commit"
    if git("rev-parse", "--show-toplevel") is None:
        said = programs.run(["git", "-C", str(directory), "status", "--short"]).stderr.splitlines()
        raise UserError(
            f"{directory}: is not in a git repository ({said[0] if said else 'git says nothing'});"
            f" an image is made of what git tracks, and carries its commit: {place}"
        )
    head = git("log", "-1", "--format=%H %ct")
    if head is None:
        raise UserError(f"{directory}: its repository has no commit; {place}")
    commit, seconds = head.split()
    listed = (git("ls-files", "-z", "--cached", "--recurse-submodules") or "").split("\0")
    status = git("status", "--porcelain", "-z", "--no-renames", "--untracked-files=all", "--", ".")
    prefix = (git("rev-parse", "--show-prefix") or "").strip("\n")
    entries = [line for line in (status or "").split("\0") if line]
    below = {line[3:].removeprefix(prefix): line[:2] for line in entries}
    present = [name for name in listed if name and os.path.lexists(directory / name)]
    if odd := [name for name in listed if _UNREADABLE in name]:
        raise UserError(
            f"{directory}: git has {plural(len(odd), 'file')} whose name is not UTF-8, such as"
            f" {odd[0]!r}; rename it: git mv"
        )
    secret = [name for name in present if _is_secret(directory / name)]
    empty = [name for name in present if _is_directory(directory / name)]
    paths = (directory / name for name in present if name not in empty)
    require_regular(*(path for path in paths if not path.is_symlink()))
    return BuildContext(
        directory=directory,
        commit=commit,
        epoch=int(seconds),
        version=(git("describe", "--tags", "--always", f"--abbrev={COMMIT_DIGITS}") or "").strip()
        + ("-dirty" if any(code != "??" for code in below.values()) else ""),
        files=tuple(sorted(set(present) - set(secret) - set(empty))),
        changed=tuple(sorted(name for name, code in below.items() if code != "??")),
        untracked=tuple(sorted(name for name, code in below.items() if code == "??")),
        credentials=tuple(sorted(secret)),
        submodules=tuple(sorted(empty)),
    )


def write_context(context: BuildContext, target: Path) -> None:
    """Copy the files to the new directory `target`."""
    target.mkdir()
    for name in context.files:
        source, copy = context.directory / name, target / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        if source.is_symlink():
            copy.symlink_to(os.readlink(source))
        else:
            shutil.copyfile(source, copy)
            copy.chmod(_mode(source))
    for path in sorted(target.rglob("*"), reverse=True):
        if path.is_dir() and not path.is_symlink():
            path.chmod(0o755)
        os.utime(path, (context.epoch, context.epoch), follow_symlinks=False)
    target.chmod(0o755)
    os.utime(target, (context.epoch, context.epoch))


def context_archive(context: BuildContext) -> bytes:
    """The files as a .tar.gz: the same files give the same bytes."""
    packed = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=packed, mode="wb", mtime=context.epoch, filename="") as compressed,
        tarfile.open(fileobj=compressed, mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        for name in context.files:
            source, member = context.directory / name, tarfile.TarInfo(name)
            member.mtime = context.epoch
            if source.is_symlink():
                member.type, member.linkname, member.mode = (
                    tarfile.SYMTYPE,
                    os.readlink(source),
                    0o777,
                )
                tar.addfile(member)
            else:
                with open_regular(source) as file:
                    member.size, member.mode = os.fstat(file.fileno()).st_size, _mode(source)
                    tar.addfile(member, file)
    return packed.getvalue()


def context_notices(context: BuildContext) -> Iterator[str]:
    """What a user must know of the files, a line each."""
    kinds = (
        (context.changed, "changed since the commit, so the image is not the commit's"),
        (context.untracked, "left out, which git does not track (git add)"),
        (
            context.credentials,
            "left out, which may be credentials (a secret for one step: -- --secret)",
        ),
        (context.submodules, "left out: submodules (git submodule update --init)"),
    )
    for names, what in kinds:
        if names:
            yield f"of {context.directory}, {plural(len(names), 'file')} {what}:"
            yield from (f"  {name!r}" for name in names[:_MOST_NAMED])
            if len(names) > _MOST_NAMED:
                yield f"  and {len(names) - _MOST_NAMED} more: git status"


_MOST_NAMED = 20


def _is_directory(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _is_secret(path: Path) -> bool:
    """By its name, or since a private key is in it, not only its first line: in a test, say."""
    if path.is_symlink() or not path.is_file():
        return False
    # Certificates have the same ending as their keys.
    if path.suffix != ".pem" and looks_like_credentials(path, b""):
        return True
    with open_regular(path) as file:
        return _PRIVATE_KEY.search(file.read(_HEAD_BYTES)) is not None


_HEAD_BYTES = 1 << 16
_UNREADABLE = "\ufffd"
_PRIVATE_KEY = re.compile(
    rb"-----BEGIN [A-Z ]*PRIVATE KEY(?: BLOCK)?-----(?:\\n|\s)+(?:Proc-Type:|[A-Za-z0-9+/]{16})"
)


def _mode(path: Path) -> int:
    return 0o755 if path.stat().st_mode & 0o100 else 0o644
