"""Runs programs on this machine and, through ssh, on others: always an argv list, never a shell
string.

A command for a remote `Host` becomes the argv of ssh, each word quoted for the remote shell: a plan
shows what is executed. Connections are shared (ControlMaster): the second command to a host costs a
round trip and no handshake.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pwd
import shlex
import signal
import subprocess
import sys
import tarfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from drillyard.errors import UnreachableError, UserError
from drillyard.launch.plan import PlanFile

CONNECT_SECONDS = 15
_SSH_FAILED = 255
"""Exit code of ssh when it cannot connect or authenticate (ssh(1))."""

TEMPORARY = """d=$(mktemp -d) && trap 'rm -rf "$d"' EXIT && trap 'exit 1' HUP INT TERM"""
"""Shell: makes the directory `$d`, removed when the shell exits. dash runs no EXIT trap when a
signal ends it."""
_CONTROL_PATH = "~/.ssh/drillyard-%C"
"""Of shared connections: short, since a socket's path has at most 108 bytes, and private to the
user."""


@dataclass(frozen=True)
class Result:
    """A program's exit code and output."""

    argv: tuple[str, ...]
    returncode: int
    stdout: str
    stderr: str

    @property
    def unreachable(self) -> bool:
        """Whether ssh could not reach the host; False where the command on it failed."""
        return self.argv[0] == "ssh" and self.returncode == _SSH_FAILED

    def printed_json(self) -> Any:
        """The JSON on the last line of its output: a login may print something first. Raises
        ValueError."""
        return json.loads(self.stdout.strip().rpartition("\n")[2])


class Programs:
    """Runs programs of this machine. Tests replace it."""

    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        timeout: float | None = None,
        directory: Path | None = None,
    ) -> Result:
        """Run to the end, in `directory`. Raises UserError where the program is missing or takes
        longer than `timeout` seconds."""
        try:
            with _installed(argv):
                done = subprocess.run(
                    list(argv),
                    input=stdin,
                    capture_output=True,
                    timeout=timeout,
                    check=False,
                    cwd=directory,
                )
        except subprocess.TimeoutExpired:
            raise UnreachableError(f"{shlex.join(argv)}: no answer after {timeout:.0f} s") from None
        out, err = done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")
        return Result(tuple(argv), done.returncode, out, err)

    def stream(self, argv: Sequence[str]) -> subprocess.Popen[bytes]:
        """Start a program that answers requests: its standard streams are pipes. The caller ends
        it."""
        with _installed(argv):
            return subprocess.Popen(
                list(argv), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )


@contextlib.contextmanager
def _installed(argv: Sequence[str]) -> Iterator[None]:
    """Raise UserError where the program that the block starts is missing."""
    if argv[0] == "ssh":
        # The directory of shared connections, which ssh makes only without -F.
        Path(pwd.getpwuid(os.getuid()).pw_dir, ".ssh").mkdir(mode=0o700, exist_ok=True)
    try:
        yield
    except FileNotFoundError:
        raise UserError(
            f"{argv[0]}: is not installed on this machine; it is needed for: {shlex.join(argv)}"
        ) from None


def comment_safe(text: str) -> str:
    """`text` for a comment of a generated script, which a line break would end."""
    return "".join(f"\\x{ord(each):02x}" if not each.isprintable() else each for each in text)


def require_success(result: Result, what: str, advice: str = "") -> Result:
    """`result` of exit code 0. Raises UserError with its last output otherwise, UnreachableError
    where ssh failed."""
    if result.returncode == 0:
        return result
    said = (
        result.stderr.strip() or result.stdout.strip() or f"exit code {result.returncode}"
    ).splitlines()[-8:]
    lines = [
        f"{what}: {said[-1] if len(said) == 1 else 'failed:'}",
        *(said if len(said) > 1 else []),
    ]
    kind = UnreachableError if result.unreachable else UserError
    raise kind(
        "\n".join([*lines, f"command: {shlex.join(result.argv)}", *([advice] if advice else [])])
    )


@dataclass(frozen=True)
class Host:
    """A host that runs a cluster's commands. `name` None: this machine."""

    name: str | None = None
    user: str | None = None
    port: int | None = None
    identity_file: str | None = None
    config_file: str | None = None

    @property
    def title(self) -> str:
        return self.name or "this machine"

    def argv(self, command: Sequence[str]) -> tuple[str, ...]:
        """The argv on this machine that runs `command` (words, not a shell line) on the host."""
        if self.name is None:
            return tuple(command)
        options = {
            "BatchMode": "yes",
            "ConnectTimeout": str(CONNECT_SECONDS),
            "ServerAliveInterval": "15",
            "ServerAliveCountMax": "3",
            "ControlMaster": "auto",
            "ControlPath": _CONTROL_PATH,
            "ControlPersist": "60",
        }
        given = {"-F": self.config_file, "-l": self.user, "-i": self.identity_file, "-p": self.port}
        words = ["ssh"]
        for name, value in given.items():
            words += [name, str(value)] if value is not None else []
        for name, value in options.items():
            words += ["-o", f"{name}={value}"]
        return (*words, "--", self.name, shlex.join(command))


def archive(files: Sequence[PlanFile]) -> bytes:
    """A tar archive of plan files, sorted, without times or owners: the same files give the same
    bytes."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for file in sorted(
            {file.path: file for file in files}.values(), key=lambda file: file.path
        ):
            content, member = file.content.encode(), tarfile.TarInfo(file.path)
            member.size, member.mode = len(content), file.mode
            tar.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


_Item = TypeVar("_Item")
_Answer = TypeVar("_Answer")


def parallel_map(
    function: Callable[[_Item], _Answer], items: Sequence[_Item], most: int
) -> list[_Answer]:
    """`function` of each item, in order, for at most `most` of them at the same time.

    Raises the first item's exception once all have ended, and KeyboardInterrupt at once: unlike
    those of concurrent.futures, the threads are daemons, so Ctrl-C does not wait for hosts that do
    not answer.
    """
    futures: list[Future[_Answer]] = [Future() for _ in items]
    # Shared by the threads: a step of a list's iterator is atomic.
    waiting = iter(list(zip(items, futures, strict=True)))

    def work() -> None:
        for item, future in waiting:
            try:
                future.set_result(function(item))
            except BaseException as error:
                future.set_exception(error)

    for _ in range(min(most, len(futures))):
        threading.Thread(target=work, daemon=True).start()
    wait(futures)
    return [future.result() for future in futures]


@contextlib.contextmanager
def defer_interrupt(handle: str) -> Iterator[None]:
    """Defer Ctrl-C until the block ends, also for programs started in it. Does nothing outside of
    the main thread.

    Programs inherit the mask; the handler covers signals that another thread of this process
    receives.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda number, frame: received.append(number))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, handler)
    if received:
        print(
            f"drillyard: {handle} is submitted already; drillyard runs cancel {handle}",
            file=sys.stderr,
        )
