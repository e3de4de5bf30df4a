"""Tools of a host, each within a limit of time and output, and its GPUs by device files.

It travels as source to the nodes, with the agent of a launch and with the probes of acceptance:
standard library only, nothing newer than Python 3.9. A tool that hangs, is missing or fails costs
its own answer and no other.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

MOST_TEXT_BYTES = 4 << 20
"""Of one tool's output: eight GPUs in full are 0.2 MB of XML."""
_COMPLAINT_CHARACTERS = 2000
_ALSO_SEARCHED = (
    "/usr/local/nvidia/bin",
    "/usr/local/sbin",
    "/usr/sbin",
    "/sbin",
    "/opt/amazon/efa/bin",
)
"""Where drivers and distributions install tools that the PATH of a job may lack."""
_GKE_LIBRARIES = "/usr/local/nvidia/lib64"
"""GKE mounts the driver below /usr/local/nvidia; its tools do not find its libraries by
themselves."""


def tool_path(name: str) -> str | None:
    """The program of that name on PATH or where drivers install theirs; None: not installed."""
    searched = os.pathsep.join([os.environ.get("PATH", os.defpath), *_ALSO_SEARCHED])
    return shutil.which(name, path=searched)


def run_tool(argv: Sequence[str], seconds: float) -> dict[str, Any]:
    """Run a tool: `{"argv", "code", "text", "complaint", "error", "installed"}`.

    `text` is its standard output, `complaint` the beginning of its standard error. `code` None: it
    did not end. `error` None: it ended with 0, and `text` is all of its output.
    """
    ran: dict[str, Any] = {"argv": list(argv), "code": None, "text": "", "complaint": ""}
    ran["error"] = None
    program = tool_path(argv[0])
    ran["installed"] = program is not None
    if program is None:
        ran["error"] = f"{argv[0]} is not installed"
        return ran
    environment = dict(os.environ)
    if program.startswith("/usr/local/nvidia/"):
        paths = [_GKE_LIBRARIES, environment.get("LD_LIBRARY_PATH", "")]
        environment["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, paths))
    environment["LC_ALL"] = "C"
    with memory_file() as out, memory_file() as complaints:
        try:
            process = subprocess.Popen(
                [program, *argv[1:]],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=complaints,
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            ran["error"] = f"{argv[0]} cannot be started: {error.strerror}"
            return ran
        ran["code"] = _wait(process, seconds)
        text, whole = _text(out)
        complaint, _ = _text(complaints)
    ran["text"], ran["complaint"] = text, complaint[:_COMPLAINT_CHARACTERS]
    if ran["code"] is None:
        ran["error"] = f"{argv[0]} did not end within {seconds:.0f} s and was killed"
    elif ran["code"] != 0:
        said = next(iter((complaint.strip() or text.strip()).splitlines()), "")[:200]
        ran["error"] = f"{argv[0]} ended with exit code {ran['code']}" + (said and f": {said}")
    elif not whole:
        ran["error"] = f"{argv[0]} printed more than {MOST_TEXT_BYTES >> 20} MiB"
    return ran


def run_tools(commands: Mapping[str, Sequence[str]], seconds: float) -> dict[str, dict[str, Any]]:
    """Run tools at the same time, each within `seconds`: their answers by key."""
    answers: dict[str, dict[str, Any]] = {}

    def ask(key: str, argv: Sequence[str]) -> None:
        answers[key] = run_tool(argv, seconds)

    threads = [threading.Thread(target=ask, args=item) for item in commands.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {key: answers[key] for key in commands}


def read_small(path: str | Path, most_bytes: int = 1 << 16) -> str | None:
    """The text of a file of /proc or /sys, without surrounding space; None where it cannot be
    read."""
    try:
        with open(path, "rb") as file:
            return file.read(most_bytes).decode(errors="replace").strip()
    except OSError:
        return None


def num_gpus(devices: str = "/dev") -> int:
    """Number of NVIDIA's device files /dev/nvidia0, /dev/nvidia1, ..."""
    try:
        names = os.listdir(devices)
    except OSError:
        return 0
    return sum(re.fullmatch(r"nvidia\d+", name) is not None for name in names)


def gpu_models() -> list[str] | None:
    """Name of each GPU as nvidia-smi reports it; None where nvidia-smi is missing or fails."""
    ran = run_tool(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], 60.0)
    return None if ran["error"] else str(ran["text"]).splitlines()


def memory_file() -> Any:
    """A file in memory for what a process prints: a disk that is full, which the caller may look
    for, must not hide it. Elsewhere than on Linux a temporary file. Raises OSError."""
    try:
        return open(os.memfd_create("printed"), "w+b")
    except (AttributeError, OSError):
        return tempfile.TemporaryFile()


def _wait(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    """The exit code; None where the process had to be killed. One that hangs in the kernel is left
    behind: it ends when its system call does."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        pass
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    deadline = time.monotonic() + 1.0
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    return None


def _text(file: Any) -> tuple[str, bool]:
    """The beginning of a file, and whether that is all of it."""
    file.seek(0)
    content = file.read(MOST_TEXT_BYTES + 1)
    return content[:MOST_TEXT_BYTES].decode(errors="replace"), len(content) <= MOST_TEXT_BYTES
