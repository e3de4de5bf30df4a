"""Writing the report: RUN_DIR/report.html by default, in the place of an earlier, unedited one."""

from __future__ import annotations

from pathlib import Path

from drillyard.errors import UserError
from drillyard.safe_files import describe_os_error, write_output

REPORT_FILE = "report.html"


def write_report(path: Path, page: str, *, overwrite: bool = False) -> int:
    """Write `page` to `path`, in one move; returns its size in bytes. An unedited report is replaced, and
    any other file only with `overwrite`. Raises UserError when it cannot be written."""
    data = page.encode("utf-8", "replace")
    try:
        write_output(path, data, overwrite=overwrite)
    except OSError as error:
        raise UserError(
            f"{path}: cannot be written: {describe_os_error(error)}; --output FILE writes elsewhere"
        ) from error
    return len(data)
