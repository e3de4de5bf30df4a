"""The file `cancelled`: a user wants no more of this start of the run, so its end is no failure and starts nothing."""

from __future__ import annotations

import errno
import json
import time
from pathlib import Path
from urllib.parse import quote

from .records import replace_file


def mark_cancelled(launch_directory: Path, submission: str) -> None:
    """Say that a submission is cancelled; a later submission of the run is not. Raises OSError.

    On a full disk a name is left that says the same: an empty file needs no room for its contents.
    """
    told = {"submission": submission, "at": time.time()}
    try:
        replace_file(launch_directory / "cancelled", json.dumps(told) + "\n")
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        _empty_mark(launch_directory, submission).touch()


def is_cancelled(launch_directory: Path, submission: str) -> bool:
    """Whether that was said."""
    if _empty_mark(launch_directory, submission).exists():
        return True
    try:
        told = json.loads((launch_directory / "cancelled").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(told, dict) and told.get("submission") == submission


def _empty_mark(launch_directory: Path, submission: str) -> Path:
    return launch_directory / f"cancelled.{quote(submission, safe='')}"
