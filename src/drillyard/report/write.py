"""Writing the report: RUN_DIR/report.html by default; an earlier report is replaced as a whole."""

from __future__ import annotations

from pathlib import Path

from drillyard.errors import UserError
from drillyard.storage import describe, write_output

REPORT_FILE = "report.html"
_TITLE = "· run report</title>".encode()
"""Of every report: see assets/page.html."""


def write_report(path: Path, page: str, *, overwrite: bool = False) -> int:
    """Write `page` to `path`, in one move; returns its size in bytes. A report that is there is replaced, and any other
    file only with `overwrite`. Raises UserError when it cannot be written."""
    data = page.encode("utf-8", "replace")
    try:
        write_output(path, data, made_by_us=_TITLE, overwrite=overwrite)
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {describe(error)}; --output FILE writes elsewhere") from error
    return len(data)
