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
import re
import shlex
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

from drillyard.control_characters import clean
from drillyard.errors import UnreachableError, UserError
from drillyard.plan_files import PlanFile

CONNECT_SECONDS = 15
_SSH_FAILED = 255
"""Exit code of ssh when it cannot connect or authenticate (ssh(1))."""
MARKER = "drillyard: the output of the command follows"
_MARKED_LINE = f"\n{MARKER}\n".encode()
"""Begins with a line break, since what a login prints may end without one."""
_AFTER_LOGIN = (
    r'printf "\n%s\n" "$0"; printf "\n%s\n" "$0" >&2; line=;'
    ' until [ "$line" = "$0" ]; do IFS= read -r line || exit 2; done; exec "$@"'
)
"""Shell: marks both outputs, skips the input that is meant for the login, and runs the command."""
_LOGIN_INPUT = b"\n" * 8
"""Empty answers to a login that asks something."""
_LOGIN_SECONDS = 180.0
"""The longest login, where the command has no time limit of its own."""
_SILENT_SECONDS = 60.0
"""A login that prints nothing for so long hangs. ssh itself gives up on a host that does not
answer after CONNECT_SECONDS, and on a connection that was lost after 45 s."""
_LOGIN_BYTES = 1 << 16
_SHOWN_CHARACTERS = 400
_SIGNAL_SECONDS = 0.5
"""Waits for threads are cut in pieces: a signal between the interpreter's last look and the start
of an endless wait would be seen only when that wait ends."""

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
        """The JSON that it printed. Raises UserError."""
        try:
            return json.loads(self.stdout)
        except (ValueError, RecursionError):
            raise UserError(
                f"the output is not JSON: {shown_text(self.stdout) or 'empty'}\ncommand:"
                f" {shlex.join(self.argv)}"
            ) from None


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
        """Run to the end, in `directory`. Raises UserError where the program is missing, takes
        longer than `timeout` seconds, or the login shell of a remote host does not run it."""
        try:
            with _installed(argv):
                if is_remote(argv):
                    return _run_remote(argv, stdin, timeout, directory)
                done = subprocess.run(
                    list(argv),
                    input=stdin,
                    capture_output=True,
                    timeout=timeout,
                    check=False,
                    cwd=directory,
                )
        except subprocess.TimeoutExpired:
            late, command = f"no answer after {timeout:.0f} s", shlex.join(argv)
            raise UnreachableError(
                f"{_host_in(argv)}: {late}\ncommand: {command}"
                if is_remote(argv)
                else f"{command}: {late}"
            ) from None
        out, err = done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")
        return Result(tuple(argv), done.returncode, out, err)

    def show(self, argv: Sequence[str], *, directory: Path | None = None) -> int:
        """Run to the end, in `directory`, on this process's terminal: what it prints goes to
        standard error as it comes. Returns its exit code. Raises UserError where the program is
        missing."""
        sys.stderr.flush()
        with _installed(argv):
            return subprocess.run(
                list(argv),
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr.fileno(),
                check=False,
                cwd=directory,
            ).returncode

    def stream(self, argv: Sequence[str]) -> subprocess.Popen[bytes]:
        """Start a program that answers requests: its input and output are pipes, and its standard
        error is a file, so that no amount of it blocks the program (`printed_errors`). The caller
        ends it and closes all three. Raises UserError where the login shell of a remote host does
        not run it."""
        errors = tempfile.TemporaryFile("a+b")  # noqa: SIM115
        try:
            with _installed(argv):
                process = subprocess.Popen(
                    list(argv), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors
                )
        except BaseException:
            errors.close()
            raise
        process.stderr = errors
        if is_remote(argv):
            try:
                printed, is_marked = _pass_login(process, argv, _LOGIN_SECONDS, errors)
                if not is_marked and process.wait() != _SSH_FAILED:
                    raise _login_error(argv, process.returncode, printed + _read_all(errors))
            except BaseException:
                process.kill()
                process.wait()
                for pipe in (process.stdin, process.stdout, errors):
                    if pipe is not None:
                        with contextlib.suppress(OSError):
                            pipe.close()
                raise
            _note_login(argv, printed + b"\n" + _read_all(errors).partition(_MARKED_LINE)[0])
        return process


def printed_errors(process: subprocess.Popen[bytes]) -> str:
    """What a program that `Programs.stream` started has written to standard error, without what a
    login wrote before."""
    assert process.stderr is not None
    written = _read_all(process.stderr)
    return written.rpartition(_MARKED_LINE)[2].decode(errors="replace").strip()


def _read_all(errors: IO[bytes]) -> bytes:
    """The beginning and the end of a file, whole where it is short."""
    size = os.fstat(errors.fileno()).st_size
    begin = os.pread(errors.fileno(), _LOGIN_BYTES, 0)
    rest = max(_LOGIN_BYTES, size - _LOGIN_BYTES)
    return begin + os.pread(errors.fileno(), _LOGIN_BYTES, rest)


def is_remote(argv: Sequence[str]) -> bool:
    """Whether `Host.argv` made it for another host."""
    return argv[0] == "ssh" and MARKER in argv[-1]


def _run_remote(
    argv: Sequence[str], stdin: bytes, timeout: float | None, directory: Path | None
) -> Result:
    begun_at = time.monotonic()
    # A file, as a login may write more to standard error than a pipe holds.
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(
            list(argv),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            cwd=directory,
            # `communicate` reads from the descriptor, not from the buffer.
            bufsize=0,
        ) as process,
    ):
        try:
            printed, is_marked = _pass_login(process, argv, timeout or _LOGIN_SECONDS, errors)
            left = None if timeout is None else max(0.0, begun_at + timeout - time.monotonic())
            output, _ = process.communicate(stdin if is_marked else None, left)
        except subprocess.TimeoutExpired as error:
            process.kill()
            raise subprocess.TimeoutExpired(error.cmd, timeout or 0.0) from None
        except BaseException:
            process.kill()
            raise
        errors.seek(0)
        written = errors.read()
    code = process.returncode
    before, marked, after = written.partition(_MARKED_LINE)
    if is_marked:
        _note_login(argv, printed + b"\n" + (before if marked else b""))
        written = after if marked else written
    elif code != _SSH_FAILED:
        raise _login_error(argv, code, printed + written)
    else:
        output = printed
    return Result(
        tuple(argv), code, output.decode(errors="replace"), written.decode(errors="replace")
    )


def _pass_login(
    process: subprocess.Popen[bytes], argv: Sequence[str], seconds: float, errors: IO[bytes]
) -> tuple[bytes, bool]:
    """Read a remote command's output up to the marker; returns what the login printed before, and
    whether the marker came. Raises UnreachableError where neither it nor the end came within
    `seconds`, or nothing at all for `_SILENT_SECONDS`. `errors`: the command's standard error."""
    assert process.stdin is not None and process.stdout is not None
    begun_at = time.monotonic()
    is_late, is_done = threading.Event(), threading.Event()
    printed, num_received, is_marked = bytearray(), 0, False

    def end_when_late() -> None:
        seen, seen_at = 0, begun_at
        while not is_done.wait(min(1.0, seconds / 4, _SILENT_SECONDS / 4)):
            now = time.monotonic()
            if (received := num_received + os.fstat(errors.fileno()).st_size) != seen:
                seen, seen_at = received, now
            if now > min(begun_at + seconds, seen_at + _SILENT_SECONDS):
                is_late.set()
                process.kill()
                return

    watcher = threading.Thread(target=end_when_late, daemon=True)
    watcher.start()
    try:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(_LOGIN_INPUT)
            process.stdin.flush()
        while not is_marked and (line := process.stdout.readline(_LOGIN_BYTES)):
            printed += line
            num_received += len(line)
            is_marked = printed.endswith(_MARKED_LINE)
            if not is_marked and len(printed) > 2 * _LOGIN_BYTES:
                del printed[_LOGIN_BYTES : -len(_MARKED_LINE)]
    finally:
        is_done.set()
        watcher.join()
    if is_late.is_set():
        said = shown_text((bytes(printed) + _read_all(errors)).decode(errors="replace"))
        raise UnreachableError(
            f"{_host_in(argv)}: no answer after {time.monotonic() - begun_at:.0f} s"
            + (f"; its login printed: {said}" if said else "")
            + "\nif the host can be reached, its login shell waits for input or runs another"
            f" program (~/.bashrc): {login_command(argv, _host_in(argv))} shows it"
        )
    if is_marked:
        del printed[-len(_MARKED_LINE) :]
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(f"{MARKER}\n".encode())
            process.stdin.flush()
    return bytes(printed), is_marked


def login_command(argv: Sequence[str], host: str) -> str:
    """A command to type that logs in on `host` as `argv` (of `Host.argv`) does: with its
    configuration file, user, key and port."""
    given = argv[: argv.index("-o")] if "-o" in argv else argv[:1]
    return shlex.join([*given, host, "true"])


def _host_in(argv: Sequence[str]) -> str:
    return argv[-2]


def _login_error(argv: Sequence[str], code: int, printed: bytes) -> UserError:
    host, said = _host_in(argv), shown_text(printed.decode(errors="replace"))
    return UserError(
        f"{host}: its login shell ended with exit code {code} and did not run the command"
        + (f"; it printed: {said}" if said else "")
        + "\nremove `exit` and `exec` for shells without a terminal from ~/.bashrc there, or use an"
        f" account that may run commands: {login_command(argv, host)} shows it"
    )


_noted: set[str] = set()
"""Hosts whose logins were noted, and what those printed: many hosts often have the same login."""
_noted_lock = threading.Lock()
_OF_SSH = re.compile(
    rb"Warning: Permanently added [^\n]*\n|ControlSocket [^\n]* already exists, [^\n]*\n"
)
"""Lines of ssh itself: with StrictHostKeyChecking=accept-new, and where another command opens the
shared connection at the same moment."""


def _note_login(argv: Sequence[str], printed: bytes) -> None:
    """Tell the user once what a login printed before the command ran."""
    host = _host_in(argv)
    text = shown_text(_OF_SSH.sub(b"", printed).decode(errors="replace"))
    with _noted_lock:
        if not text or not _noted.isdisjoint({host, text}):
            return
        _noted.update({host, text})
    print(f"drillyard: {host}: its login printed, and it was left out: {text}", file=sys.stderr)


def shown_text(text: str) -> str:
    """`text` from elsewhere on one line, without control characters, cut to a few lines' length."""
    line = " ".join(clean(text[: 4 * _SHOWN_CHARACTERS]).split())
    return line if len(line) <= _SHOWN_CHARACTERS else line[:_SHOWN_CHARACTERS] + "..."


def input_for_login(argv: Sequence[str]) -> str:
    """A shell command that prints what goes before the input of a remote command: answers to its
    login, and the marker. Empty for one of this machine."""
    lines = "\\n" * len(_LOGIN_INPUT)
    return shlex.join(["printf", f"{lines}%s\\n", MARKER]) if is_remote(argv) else ""


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
        # `exec`: a login shell that stays could print something after the command's output.
        marked = shlex.join(["sh", "-c", _AFTER_LOGIN, MARKER, *command])
        return (*words, "--", self.name, f"exec {marked}")


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
    while wait(futures, timeout=_SIGNAL_SECONDS).not_done:
        pass
    return [future.result() for future in futures]


_interrupted: set[str] = set()
"""Handles of the submissions during which Ctrl-C came."""


def was_interrupted(handle: str) -> bool:
    """Whether Ctrl-C came while a run was submitted (`defer_interrupt`)."""
    return handle in _interrupted


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
        _interrupted.add(handle)
        print(
            f"drillyard: {handle} is submitted already; drillyard runs cancel {handle}",
            file=sys.stderr,
        )
