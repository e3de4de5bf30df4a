"""Small git repositories to build images from, and programs that record how they are called."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

DATE = "2026-02-03T04:05:06Z"
EPOCH = 1770091506
_GIT = {
    **os.environ,
    "GIT_AUTHOR_DATE": DATE,
    "GIT_COMMITTER_DATE": DATE,
    "GIT_AUTHOR_NAME": "a",
    "GIT_AUTHOR_EMAIL": "a@example.com",
    "GIT_COMMITTER_NAME": "a",
    "GIT_COMMITTER_EMAIL": "a@example.com",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_CONFIG_NOSYSTEM": "1",
}


def git(directory: Path, *argv: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(directory), *argv], check=True, capture_output=True, text=True, env=_GIT
    )
    return done.stdout.strip()


def make_checkout(directory: Path, files: Mapping[str, str]) -> str:
    """A repository with one commit of the files; returns the commit."""
    directory.mkdir(exist_ok=True)
    git(directory, "init", "--quiet", "--initial-branch=main")
    for name, content in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    git(directory, "add", "--all", "--force")
    git(directory, "commit", "--quiet", "--message", "one")
    return git(directory, "rev-parse", "HEAD")


def make_programs(directory: Path, scripts: Mapping[str, str]) -> Path:
    """Programs that append their arguments to `calls` in `directory`, one line each call, and then
    run their script. Returns the directory for PATH."""
    bin_directory = directory / "bin"
    bin_directory.mkdir()
    for name, script in scripts.items():
        path = bin_directory / name
        path.write_text(f'#!/bin/sh\necho "{name} $*" >>"{directory}/calls"\n{script}\n')
        path.chmod(0o755)
    return bin_directory
