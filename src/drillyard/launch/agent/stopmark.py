"""The file `cancelled`: a user wants no more of this start of the run, so its end is no failure and starts nothing."""

from __future__ import annotations

import json
import time
from pathlib import Path

from .records import replace_file


def mark_cancelled(launch_directory: Path, submission: str) -> None:
    """Say that a submission is cancelled; a later submission of the run is not. Raises OSError."""
    told = {"submission": submission, "at": time.time()}
    replace_file(launch_directory / "cancelled", json.dumps(told) + "\n")


def is_cancelled(launch_directory: Path, submission: str) -> bool:
    """Whether that was said."""
    try:
        told = json.loads((launch_directory / "cancelled").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(told, dict) and told.get("submission") == submission
