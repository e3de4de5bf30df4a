"""Directories before and after an attack, for tests that nothing outside of a destination
changes."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path


def snapshot(directory: Path, without: Path) -> dict[str, str]:
    """Every file (mode and digest), link and directory below `directory`, but those below
    `without`."""
    found = {}
    for parent, directories, files in os.walk(directory):
        directories[:] = [name for name in directories if Path(parent, name) != without]
        for path in (Path(parent, name) for name in [*directories, *files]):
            mode = f"{path.lstat().st_mode:o}"
            if path.is_symlink():
                found[str(path)] = f"{mode} -> {os.readlink(path)}"
            else:
                found[str(path)] = (
                    f"{mode} {hashlib.sha256(path.read_bytes()).hexdigest()}"
                    if path.is_file()
                    else mode
                )
    return found
