"""Writing the report: RUN_DIR/report.html by default, replaced as a whole."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from drillyard.errors import UserError
from drillyard.storage import describe

REPORT_FILE = "report.html"


def write_report(path: Path, page: str) -> int:
    """Write `page` to `path`, in one move; returns its size in bytes. Raises UserError when it cannot be written."""
    data = page.encode("utf-8", "replace")
    temporary = path.with_name(path.name + ".tmp")
    try:
        temporary.write_bytes(data)
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise UserError(f"{path}: cannot be written: {describe(error)}; --output FILE writes elsewhere") from error
    return len(data)
