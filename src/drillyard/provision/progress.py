"""Where the progress of `up` and `down` goes."""

from __future__ import annotations

import sys


def print_progress(line: str) -> None:
    """Progress goes to standard error: the result is on standard output."""
    print(line, file=sys.stderr, flush=True)
