"""The runs of the last listing, for shell completion, which must answer at once; nothing else reads
them.

`$XDG_CACHE_HOME/drillyard/runs/CLUSTER` (default ~/.cache) has a handle a line, newest first, and
may be out of date.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

from drillyard.errors import UserError
from drillyard.launch.run_status import Handle, parse_handle
from drillyard.safe_files import make_directory, replace_file

_MOST_NAMES = 1000


def remember_runs(cluster: str, handles: Iterable[Handle]) -> None:
    """Replace the cached runs of a cluster. Failures are ignored: nothing depends on it."""
    kept = list(dict.fromkeys(handles))[:_MOST_NAMES]
    with contextlib.suppress(OSError):
        make_directory(_directory(), parents=True)
        text = "".join(f"{handle}\n" for handle in kept)
        replace_file(_directory() / cluster, text.encode(), mode=0o600)


def remember_run(handle: Handle) -> None:
    """Put a run that was just launched before the others of its cluster."""
    others = [each for each in remembered_runs() if each.cluster == handle.cluster]
    remember_runs(handle.cluster, [handle, *others])


def remembered_runs() -> list[Handle]:
    """The cached runs of all clusters, newest first within each. Never fails, contacts no
    cluster."""
    handles = []
    with contextlib.suppress(OSError, UnicodeDecodeError):
        for path in sorted(_directory().iterdir()):
            for line in path.read_text(encoding="utf-8").splitlines():
                with contextlib.suppress(UserError):
                    handles.append(parse_handle(line))
    return handles


def _directory() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "drillyard" / "runs"
