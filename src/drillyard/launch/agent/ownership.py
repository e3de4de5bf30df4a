"""Owners and modes of the directories that a launch executes code from: RUN/launch holds the agent
and job scripts.

A user who can put a file there, or another directory in its place, runs programs as the user who
launches. So RUN, launch/ and everything in it belong to the user or to root, others may not write
to RUN, and no directory on the way may let every user rename what is in it. A group that may write
to a directory *above* RUN is trusted: that is how projects share storage, and `chmod +t` on that
directory takes the right to rename away from it.

A file system may show other owners and modes than those that were set: NFS with root_squash, FUSE
mounts of buckets (all files have the owner and modes of the mount). What counts is what it shows
for a file made by this process.
"""

from __future__ import annotations

import contextlib
import grp
import os
import pwd
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_CODE = ("agent", "files")
"""Directories below launch/."""


class _Shown(NamedTuple):
    """Owner of this process's files as a file system shows it, and whether it keeps their modes."""

    owner: int
    keeps_modes: bool


def make_launch_directory(launch: Path) -> str | None:
    """Create a run's directory and its launch directory, where they are missing, writable by their
    owner only; returns what makes it unsafe to execute anything from there. Raises OSError."""
    launch.parent.parent.mkdir(parents=True, exist_ok=True)
    for directory in (launch.parent, launch):
        with contextlib.suppress(FileExistsError):
            directory.mkdir(mode=0o755)
    problem = problem_of(launch)
    if problem is None:
        for directory in (launch, *(launch / name for name in _CODE)):
            _take_from_others(directory)
    return problem


def problem_of(launch: Path) -> str | None:
    """Reason not to execute anything from a launch directory, whether it exists yet or not, and
    what to do about it; None if it is safe. Raises OSError."""
    run = launch.parent
    shown = _Shown(os.geteuid(), keeps_modes=True)
    return _problem(launch, shown) and _problem(
        launch, _shown_in(run if run.is_dir() else run.parent)
    )


def _problem(launch: Path, shown: _Shown) -> str | None:
    run = launch.parent
    for path in (Path(os.path.abspath(run)), Path(os.path.realpath(run))):
        for directory in reversed(path.parents):
            if problem := _problem_above(directory, path, shown):
                return problem
    for path in (run, Path(os.path.realpath(run)), *_executed(launch)):
        if problem := _problem_of_owner(path, shown):
            return problem
    if run.is_dir() and shown.keeps_modes:
        status = run.stat()
        if (
            status.st_mode & _OTHERS
            and not status.st_mode & stat.S_ISVTX
            and not _is_private(status)
        ):
            return (
                f"{run}: others may write there ({stat.filemode(status.st_mode)}), and could have"
                f" programs of theirs run as {_name(os.geteuid())}; chmod go-w {run}, or use"
                " another `name` or `output`"
            )
    return None


def _problem_above(directory: Path, run: Path, shown: _Shown) -> str | None:
    """Problem with what every user may do in one directory on the path to `run`."""
    try:
        mode = directory.stat().st_mode
        below = directory / run.relative_to(directory).parts[0]
    except FileNotFoundError:
        return None
    if not mode & stat.S_IWOTH or not shown.keeps_modes:
        return None
    if not mode & stat.S_ISVTX:
        return (
            f"{directory}: every user may rename what is in it ({stat.filemode(mode)}), also"
            f" {below}; chmod +t {directory} (or have that done), or put `output` elsewhere"
        )
    # Any user may have created it.
    return _problem_of_owner(below, shown)


def _problem_of_owner(path: Path, shown: _Shown) -> str | None:
    try:
        owner = path.lstat().st_uid
    except FileNotFoundError:
        return None
    if owner in (0, os.geteuid(), shown.owner):
        return None
    return (
        f"{path}: belongs to {_name(owner)}, who could have programs run as {_name(os.geteuid())};"
        " use another `name` or `output`, or have it removed"
    )


def _executed(launch: Path) -> Iterator[Path]:
    """Yield what is executed from a launch directory, and the other entries of it."""
    yield launch
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        yield from (launch / name for name in os.listdir(launch))
    for code in _CODE:
        for parent, directories, files in os.walk(launch / code):
            yield from (Path(parent, name) for name in [*directories, *files])


def _shown_in(directory: Path) -> _Shown:
    """Create a file, read its owner and mode, and remove it."""
    path = directory / f".drillyard-probe-{secrets.token_hex(8)}"
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError:
        return _Shown(os.geteuid(), keeps_modes=True)
    try:
        status = os.fstat(descriptor)
        return _Shown(status.st_uid, not status.st_mode & _OTHERS)
    finally:
        os.close(descriptor)
        os.unlink(path)


def _is_private(status: os.stat_result) -> bool:
    """Whether the only ones who may write are the owner and the owner's own group (as distributions
    with umask 002 have it: a group of the user's name, without other members)."""
    if status.st_mode & stat.S_IWOTH:
        return False
    try:
        group, user = grp.getgrgid(status.st_gid), pwd.getpwuid(status.st_uid)
    except KeyError:
        return False
    return (group.gr_name, group.gr_gid) == (user.pw_name, user.pw_gid) and set(group.gr_mem) <= {
        user.pw_name
    }


def _take_from_others(directory: Path) -> None:
    # A mount that keeps no modes, or a directory of root's.
    with contextlib.suppress(OSError):
        mode = stat.S_IMODE(directory.lstat().st_mode)
        if mode & _OTHERS and not directory.is_symlink():
            directory.chmod(mode & ~_OTHERS)


def _name(owner: int) -> str:
    try:
        return f"{pwd.getpwuid(owner).pw_name} (user {owner})"
    except KeyError:
        return f"user {owner}"
