"""A tokenizer's files: written as a whole, and with errors that say what the disk said.

The tokenizers library raises plain exceptions for what the system answers; they become OSErrors here.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

from drillyard.errors import UserError
from drillyard.storage import describe, flush, publish


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
    """Have a tokenizer at `directory`, complete or as before; the same one that is there is not written again.

    Raises UserError when the disk does not take it.
    """
    staging = directory.with_name(f".{directory.name}.incomplete")
    try:
        with tempfile.TemporaryDirectory() as made:
            write_tokenizer(tokenizer, Path(made))
            files = _contents(Path(made))
        if files == _contents(directory):
            return
        shutil.rmtree(staging, ignore_errors=True)
        for name, content in files.items():
            (staging / name).parent.mkdir(parents=True, exist_ok=True)
            (staging / name).write_bytes(content)
            flush(staging / name)
        shutil.rmtree(directory, ignore_errors=True)
        publish(staging, directory, last="tokenizer_config.json")
    except OSError as error:
        shutil.rmtree(staging, ignore_errors=True)
        raise UserError(f"{error.filename or directory}: the tokenizer cannot be saved: {describe(error)}") from error


def _contents(directory: Path) -> dict[Path, bytes]:
    return {path.relative_to(directory): path.read_bytes() for path in directory.rglob("*") if path.is_file()}
