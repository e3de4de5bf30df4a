"""How a command ends on an exception that no one foresaw: two lines on stderr and a file with the traceback.

Exit code 70 is EX_SOFTWARE of sysexits.h: no command uses it for an answer, so a script can tell the two apart. A rank
of a run is the exception to this: its traceback stays on stderr, which is its log in the run directory.
"""

from __future__ import annotations

import errno
import importlib.util
import os
import platform
import tempfile
import traceback

from drillyard import __version__
from drillyard.errors import MissingExtraError
from drillyard.redaction import redact

EXIT_UNEXPECTED = 70

MODULES_OF_EXTRAS = {
    "train": ("datasets", "peft", "pyarrow", "safetensors", "tensorboard", "tokenizers", "torch", "transformers"),
    "gpu": ("liger_kernel", "torchao"),
    "kubernetes": ("kubernetes",),
    "gcp": ("google",),
    "wandb": ("wandb",),
    "mlflow": ("mlflow",),
}
"""Top-level modules of each extra in pyproject.toml."""


def missing_extra(error: BaseException) -> str | None:
    """What to install, where `error` is the failed import of a package that only an extra brings; None elsewhere."""
    name = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    for extra, modules in MODULES_OF_EXTRAS.items():
        # A submodule that an installed package lacks is a version we do not know, which installing would not change.
        if name in modules and importlib.util.find_spec(name) is None:
            return f"this needs {name}, which is not installed: pip install 'drillyard[{extra}]'"
    return None


def require_training() -> None:
    """Raise UserError where ranks could not start for want of a package, before any is started."""
    for name in ("torch", "transformers"):
        if importlib.util.find_spec(name) is None:
            raise MissingExtraError(missing_extra(ModuleNotFoundError(name=name)))


def disk_problem(error: BaseException) -> str | None:
    """What cannot be written, where `error` says that a disk is full or fails: standard output may be a file, too."""
    if not isinstance(error, OSError) or error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
        return None
    return f"cannot write {error.filename or 'the output'}: {error.strerror}. Write it to another disk, or make room."


def describe_unexpected(error: BaseException) -> str:
    """Two lines about `error`: what it is, and the file that holds its traceback, which this writes.

    The file is in the directory for temporary files, readable by its owner only. It holds versions and the traceback:
    no arguments and no values of variables, and references in the place of secrets that a config refers to.
    """
    # One line, cut: what a library quotes may be a whole file.
    what = " ".join(redact(f"unexpected {type(error).__name__}: {error}").split())[:300].rstrip(" :")
    lines = traceback.format_exception(error)
    versions = f"drillyard {__version__}, Python {platform.python_version()}, {platform.platform()}"
    text = redact(f"{versions}\n\n{''.join(lines)}")
    path = ""
    try:
        descriptor, path = tempfile.mkstemp(prefix="drillyard-error-", suffix=".txt")
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
    except OSError as failed:
        if path:
            os.unlink(path)
        return f"{what}\nThis is a bug in Drillyard. Its traceback could not be saved ({failed.strerror}):\n{text}"
    return f"{what}\nThis is a bug in Drillyard. Please report it with its traceback, which is in {path}"
