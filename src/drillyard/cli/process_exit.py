"""Exit of processes: of ranks at once, of a supervisor before its run starts, of any command after
an unexpected error.

An unexpected exception gives two lines on stderr, a file with the traceback, and exit code 70
(EX_SOFTWARE of sysexits.h), which no command uses otherwise. A rank's traceback goes to stderr: its
log in the run directory.
"""

from __future__ import annotations

import errno
import importlib.util
import os
import signal
import sys
from typing import NoReturn

from drillyard.errors import MissingExtraError
from drillyard.redaction import redact
from drillyard.version import __version__

EXIT_UNEXPECTED = 70

MODULES_OF_EXTRAS = {
    "train": (
        "datasets",
        "peft",
        "pyarrow",
        "safetensors",
        "tensorboard",
        "tokenizers",
        "torch",
        "transformers",
    ),
    "kubernetes": ("kubernetes",),
    "gcp": ("google", "httplib2"),
    "nebius": ("botocore",),
    "remote": ("aiohttp", "fsspec", "gcsfs", "s3fs"),
    "torchao": ("torchao",),
    "wandb": ("wandb",),
    "mlflow": ("mlflow",),
}
"""Top-level modules of each extra in pyproject.toml."""


def is_rank() -> bool:
    """Whether this process was started as one rank of several."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def exit_process(code: int) -> NoReturn:
    """Flush the output and exit with `code` at once, without the interpreter's shutdown.

    gloo's threads can abort a process during shutdown, and a rank that failed must not wait for the
    others there.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def exit_on_signal() -> None:
    """Exit with code 85 (start again) on a stop signal: no ranks have been started yet. Later
    handlers replace this."""
    from drillyard.supervise.launch_contract import EXIT_CHECKPOINTED
    from drillyard.supervise.stop_requests import RANK_STOP_SIGNALS

    for number in RANK_STOP_SIGNALS:
        signal.signal(number, lambda *_: os._exit(EXIT_CHECKPOINTED))


def missing_extra(error: BaseException) -> str | None:
    """Say what to install if `error` is the failed import of a package that an extra provides; else
    None."""
    name = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    for extra, modules in MODULES_OF_EXTRAS.items():
        # A missing submodule of an installed package is an unknown version, which installing would
        # not fix.
        if name in modules and importlib.util.find_spec(name) is None:
            return f"this needs {name}, which is not installed: pip install 'drillyard[{extra}]'"
    return None


def require_training() -> None:
    """Raise MissingExtraError if a package that ranks need is missing, before any rank is
    started."""
    for name in ("torch", "transformers"):
        if importlib.util.find_spec(name) is None:
            raise MissingExtraError(missing_extra(ModuleNotFoundError(name=name)))


def disk_problem(error: BaseException) -> str | None:
    """Say what could not be written, if `error` is a full or failing disk; stdout may be a file
    too.

    Or that the working directory was deleted, if `error` comes from looking it up.
    """
    if isinstance(error, FileNotFoundError) and error.filename is None:
        try:
            os.getcwd()
        except FileNotFoundError:
            return (
                "the working directory does not exist any more; change to another one (cd) and"
                " repeat the command"
            )
    if not isinstance(error, OSError) or error.errno not in (
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EFBIG,
        errno.EIO,
    ):
        return None
    return (
        f"cannot write {error.filename or 'the output'}: {error.strerror}. Write it to another"
        " disk, or free space."
    )


def describe_unexpected(error: BaseException) -> str:
    """Write the traceback of `error` to a file; return two lines with the error and the file.

    The file is in the directory for temporary files, readable by its owner only. It holds versions
    and the traceback, no arguments and no values of variables; secrets of a config are replaced by
    their references.
    """
    import platform
    import tempfile
    import traceback

    # On one line, cut: libraries may quote a whole file.
    what = " ".join(redact(f"unexpected {type(error).__name__}: {error}").split())[:300].rstrip(
        " :"
    )
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
        return (
            f"{what}\nThis is a bug in Drillyard. Its traceback could not be saved"
            f" ({failed.strerror}):\n{text}"
        )
    return (
        f"{what}\nThis is a bug in Drillyard. Please report it with its traceback, which is in"
        f" {path}"
    )
