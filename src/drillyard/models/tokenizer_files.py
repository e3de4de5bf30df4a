"""A tokenizer's files: each written as a whole, and with errors that say what the disk said.

The tokenizers library raises plain exceptions for what the system answers; they become OSErrors here.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from pathlib import Path
from typing import Any

from drillyard.errors import UserError
from drillyard.safe_files import describe_os_error, flush


def write_tokenizer(tokenizer: Any, directory: Path) -> None:
    """Write a tokenizer's files into a directory. Raises OSError."""
    try:
        tokenizer.save_pretrained(directory)
    except OSError:
        raise
    except Exception as error:
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(directory)) from error


def save_tokenizer(tokenizer: Any, directory: Path) -> None:
    """Have a tokenizer's files in `directory`; one that is there with the same content is not written again.

    Other files there are left alone. Raises UserError when the disk does not take it.
    """
    draft = directory / "tokenizer.incomplete"
    try:
        with tempfile.TemporaryDirectory() as made:
            write_tokenizer(tokenizer, Path(made))
            files = read_files(Path(made))
        for name, content in files.items():
            path = directory / name
            if path.is_file() and path.read_bytes() == content:
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            draft.write_bytes(content)
            flush(draft)
            draft.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise UserError(
            f"{error.filename or directory}: the tokenizer cannot be saved: {describe_os_error(error)}"
        ) from error


def read_files(directory: Path) -> dict[str, bytes]:
    """The content of every file below a directory, by relative path."""
    paths = sorted(path for path in directory.rglob("*") if path.is_file())
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in paths}
