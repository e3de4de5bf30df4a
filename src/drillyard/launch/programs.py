"""The one place where launching runs programs: an argv list, never a shell string, with what it sends to its input.

`Host` is where commands of a cluster are given: this machine, or one that OpenSSH reaches. A command for a remote host
becomes the argv of ssh around it, each word quoted for the remote shell, so what a plan shows is what is executed.
Connections are shared (ControlMaster), so that the second command to a host costs a round trip and no handshake.
"""

from __future__ import annotations

import contextlib
import io
import os
import pwd
import queue
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
from typing import TypeVar

from drillyard.errors import UserError
from drillyard.launch.plan import PlanFile

CONNECT_SECONDS = 15
_SSH_FAILED = 255
"""What ssh itself exits with when it cannot connect or authenticate (ssh(1))."""


@dataclass(frozen=True)
class Result:
    """How a program ended and what it said."""

    argv: tuple[str, ...]
    returncode: int
    stdout: str
    stderr: str

    @property
    def unreachable(self) -> bool:
        """Whether ssh could not reach the host, as opposed to the command on it having failed."""
        return self.argv[0] == "ssh" and self.returncode == _SSH_FAILED


class Programs:
    """Runs programs of this machine. Tests and dry runs put another object with these methods in its place."""

    def run(self, argv: Sequence[str], *, stdin: bytes = b"", timeout: float | None = None) -> Result:
        """Run to the end. Raises UserError where the program is missing or takes longer than `timeout` seconds."""
        _prepare(argv)
        try:
            done = subprocess.run(list(argv), input=stdin, capture_output=True, timeout=timeout, check=False)
        except FileNotFoundError:
            raise UserError(
                f"{argv[0]}: is not installed on this machine; it was needed for: {shell_line(argv)}"
            ) from None
        except subprocess.TimeoutExpired:
            raise UserError(f"{shell_line(argv)}: no answer after {timeout:.0f} s") from None
        out, err = done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")
        return Result(tuple(argv), done.returncode, out, err)

    def stream(self, argv: Sequence[str], *, asked: bool = False) -> subprocess.Popen[bytes]:
        """Start, with standard output and error as pipes: for what is followed. The caller ends it.

        `asked`: standard input is a pipe too, for a program that answers requests.
        """
        _prepare(argv)
        try:
            return subprocess.Popen(
                list(argv),
                stdin=subprocess.PIPE if asked else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        except FileNotFoundError:
            raise UserError(
                f"{argv[0]}: is not installed on this machine; it was needed for: {shell_line(argv)}"
            ) from None


def shell_line(argv: Sequence[str]) -> str:
    """An argv as a line for a person, ready to be pasted into a shell."""
    return shlex.join(argv)


def comment_safe(text: str) -> str:
    """`text` for a comment of a generated script, which a line break would end."""
    return "".join(f"\\x{ord(each):02x}" if not each.isprintable() else each for each in text)


def require_success(result: Result, what: str, advice: str = "") -> Result:
    """`result`, where its program ended with 0. Raises UserError with its own words otherwise."""
    if result.returncode == 0:
        return result
    said = (result.stderr.strip() or result.stdout.strip() or f"exit code {result.returncode}").splitlines()[-8:]
    lines = [f"{what}: {said[-1] if len(said) == 1 else 'failed:'}", *(said if len(said) > 1 else [])]
    raise UserError("\n".join([*lines, f"command: {shell_line(result.argv)}", *([advice] if advice else [])]))


@dataclass(frozen=True)
class Host:
    """Where a cluster's commands are given. `name` None: this machine."""

    name: str | None = None
    user: str | None = None
    port: int | None = None
    identity_file: str | None = None
    config_file: str | None = None

    @property
    def title(self) -> str:
        """For people."""
        return self.name or "this machine"

    def argv(self, command: Sequence[str]) -> tuple[str, ...]:
        """What is executed on this machine so that `command` (words, not a shell line) runs on the host."""
        if self.name is None:
            return tuple(command)
        return (*self.ssh(), "--", self.name, shlex.join(command))

    def ssh(self) -> tuple[str, ...]:
        """ssh and its options, without the host."""
        options = {
            "BatchMode": "yes",
            "ConnectTimeout": str(CONNECT_SECONDS),
            "ServerAliveInterval": "15",
            "ServerAliveCountMax": "3",
            "ControlMaster": "auto",
            "ControlPath": control_path(),
            "ControlPersist": "60",
        }
        words = ["ssh"]
        for name, value in (("-F", self.config_file), ("-l", self.user), ("-i", self.identity_file)):
            words += [name, value] if value is not None else []
        words += ["-p", str(self.port)] if self.port is not None else []
        for name, value in options.items():
            words += ["-o", f"{name}={value}"]
        return tuple(words)


def control_path() -> str:
    """Where connections are shared: short, since a socket's path may have 108 bytes, and private to the user."""
    return "~/.ssh/drillyard-%C"


def _prepare(argv: Sequence[str]) -> None:
    """Have the directory of shared connections where ssh looks for it: it makes it only where no -F is given."""
    if argv[0] == "ssh":
        Path(pwd.getpwuid(os.getuid()).pw_dir, ".ssh").mkdir(mode=0o700, exist_ok=True)


def archive(files: Sequence[PlanFile]) -> bytes:
    """A tar archive of plan files, sorted, without times or owners: the same files give the same bytes."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for file in sorted({file.path: file for file in files}.values(), key=lambda file: file.path):
            content, member = file.content.encode(), tarfile.TarInfo(file.path)
            member.size, member.mode = len(content), file.mode
            tar.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


_Item = TypeVar("_Item")
_Answer = TypeVar("_Answer")


def parallel_map(function: Callable[[_Item], _Answer], items: Sequence[_Item], most: int) -> list[_Answer]:
    """What `function` returns for each item, in their order; at most so many are asked at the same time.

    Raises what it raised for the first item that it failed for, once all have ended; KeyboardInterrupt at once.
    """
    waiting: queue.SimpleQueue[tuple[_Item, Future[_Answer]]] = queue.SimpleQueue()
    futures: list[Future[_Answer]] = []
    for item in items:
        future: Future[_Answer] = Future()
        futures.append(future)
        waiting.put((item, future))

    def work() -> None:
        while True:
            try:
                item, future = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                future.set_result(function(item))
            except BaseException as error:
                # Whatever it is: who waits for this future would wait for ever.
                future.set_exception(error)

    for _ in range(min(most, len(futures))):
        threading.Thread(target=work, daemon=True).start()
    wait(futures)
    return [future.result() for future in futures]


@contextlib.contextmanager
def defer_interrupt(handle: str) -> Iterator[None]:
    """Defer Ctrl-C until the block ends, also for programs started in it. Does nothing outside the main thread.

    Programs inherit the mask; the handler is for a signal that another thread of this process takes.
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
        print(f"drillyard: {handle} is submitted already; drillyard runs cancel {handle}", file=sys.stderr)
