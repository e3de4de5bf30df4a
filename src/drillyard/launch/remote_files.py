"""Files of a host, read in pieces: of this machine directly, of another over one ssh connection.

The program at the other end is `file_server.py`, which is sent along and needs only a Python there.
It keeps no state between requests, so a lost connection is replaced and the request repeated: once,
or with `patient` until the host is back, since a follower outlives a login node that restarts. A
request for many files is one round trip.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.resources
import json
import os
import shlex
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO, Final, NamedTuple, TypeVar

from drillyard.errors import UnreachableError, UserError
from drillyard.launch import file_server
from drillyard.launch.agent.submit import SAYS
from drillyard.programs import Host, Programs, printed_errors
from drillyard.safe_files import new_file_below, require_plain_name

_BOOTSTRAP: Final = "import sys; exec(sys.stdin.buffer.read(int(sys.argv[1])))"
READ_BYTES: Final = 4 << 20
"""The most that one `Launcher.read` returns."""
_LONGEST_PAUSE: Final = 15.0
_LATER: Final = 4
_LINE_BYTES: Final = 64 << 20
"""Of one answer: the names of about half a million files. More could fill this machine's memory."""
_NO_ARTIFACTS: Final = (
    "launch/agent/",
    "launch/agents/",
    "launch/cancelled",
    "launch/claim",
    "launch/epochs/",
    "launch/secret",
)
"""Prefixes of paths in a run directory that are not listed: the agents' code, locks, and
secrets."""

_Answer = TypeVar("_Answer")


class ReadRequest(NamedTuple):
    """Bytes of a file: at most `length` from `offset` on; below 0: its last bytes. `head`: its
    first bytes when it was last read. `top`: the directory below which no part of the path may be a
    link; by default the file's own one."""

    path: str
    offset: int
    length: int
    head: bytes = b""
    top: str = ""


class ReadResult(NamedTuple):
    """Result of a read. `replaced`: the file is another or shorter than before, and `data` is from
    its beginning."""

    head: bytes
    replaced: bool
    data: bytes


class UnreadableFile(UserError):
    """A host was reached and one of its files could not be read: no permission, a failing disk."""


class Files(ABC):
    """Files of one host. Every method raises UserError where the host cannot be read,
    UnreadableFile for a file."""

    title: str
    patient = False
    """Wait for a host that has answered before."""
    _has_answered = False
    _is_away = False
    """Whether its user has read that it is waited for."""
    _notice_lock = threading.Lock()

    def _retried(self, ask: Callable[[], _Answer]) -> _Answer:
        """The answer; where `patient`, asked for until a host that has answered before can be
        reached again.

        Several threads may wait for one host: its user reads once that it is away, and once that it
        is back.
        """
        pause = 1.0
        while True:
            try:
                answer = ask()
            except UnreachableError as error:
                if not (self.patient and self._has_answered):
                    raise
                with self._notice_lock:
                    if not self._is_away:
                        print_notice(f"{str(error).splitlines()[0]}; trying again until it is back")
                    self._is_away = True
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
                continue
            with self._notice_lock:
                if self._is_away:
                    print_notice(f"{self.title}: connected again")
                self._is_away = False
            self._has_answered = True
            return answer

    @abstractmethod
    def find(self, patterns: Sequence[str]) -> list[tuple[str, int]]:
        """Path and size of the files that glob patterns match."""

    @abstractmethod
    def tree(self, directory: str) -> list[tuple[str, int]]:
        """Path, relative to the directory, and size of all files below it; none where it is not
        there."""

    @abstractmethod
    def read(self, requests: Sequence[ReadRequest]) -> list[ReadResult | None]:
        """A piece of each file; None for one that is not there, or is a link or a device."""

    @abstractmethod
    def close(self) -> None:
        """End the connection."""


def open_files(host: Host, programs: Programs) -> Files:
    """The files of `host`; nothing is connected before the first request."""
    return LocalFiles() if host.name is None else RemoteFiles(host, programs)


class LocalFiles(Files):
    title = "this machine"

    def find(self, patterns: Sequence[str]) -> list[tuple[str, int]]:
        return file_server.matching_files(patterns)

    def tree(self, directory: str) -> list[tuple[str, int]]:
        return file_server.tree(directory)

    def read(self, requests: Sequence[ReadRequest]) -> list[ReadResult | None]:
        return [self._read(request) for request in requests]

    def _read(self, request: ReadRequest) -> ReadResult | None:
        try:
            found = file_server.read(*request)
        except OSError as error:
            raise UnreadableFile(f"{request.path}: cannot be read: {error.strerror}") from None
        return None if found is None else ReadResult(*found)

    def close(self) -> None:
        pass


class RemoteFiles(Files):
    """Files of a host, read by a program at the other end of one connection.

    `connect_seconds`: the longest wait for the first answer, where the program that connects sets
    no limit of its own; `_LATER` times as long for later ones, which have more to send.
    """

    def __init__(
        self,
        host: Host,
        programs: Programs,
        python: str = "python3",
        connect_seconds: float | None = None,
    ) -> None:
        self.title = host.title
        self._connect_seconds = connect_seconds
        self._is_late = False
        self._programs = programs
        self._source = (
            importlib.resources.files(file_server.__package__)
            .joinpath("file_server.py")
            .read_bytes()
        )
        self._argv = host.argv([python, "-u", "-c", _BOOTSTRAP, str(len(self._source))])
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def find(self, patterns: Sequence[str]) -> list[tuple[str, int]]:
        return self._sizes({"list": list(patterns)})

    def tree(self, directory: str) -> list[tuple[str, int]]:
        return self._sizes({"tree": directory})

    def read(self, requests: Sequence[ReadRequest]) -> list[ReadResult | None]:
        if not requests:
            return []
        wanted = [
            (each.path, each.offset, each.length, each.head.hex(), each.top) for each in requests
        ]
        return self._ask({"read": wanted}, len(requests), max(each.length for each in requests))

    def close(self) -> None:
        self._end()

    def _end(self, *, explain: bool = False) -> str:
        """End the connection; with `explain`, returns what the program at the other end printed
        last."""
        process, self._process = self._process, None
        if process is None:
            return "no connection"
        assert (
            process.stdin is not None and process.stdout is not None and process.stderr is not None
        )
        with contextlib.suppress(OSError):
            process.stdin.close()
        try:
            code = process.wait(2)
            said = printed_errors(process) if explain else ""
        except subprocess.TimeoutExpired:
            process.kill()
            code, said = process.wait(), "no answer"
        process.stdout.close()
        process.stderr.close()
        return said.splitlines()[-1] if said else f"exit code {code}"

    def _sizes(self, request: dict[str, Any]) -> list[tuple[str, int]]:
        (listed,) = self._ask(request, 1)
        try:
            return [(str(path), int(size)) for path, size in listed]
        except (TypeError, ValueError):
            raise UserError(
                f"{self.title}: its list of files cannot be read; does {self._argv[0]} reach the"
                " right host?"
            ) from None

    def _ask(self, request: dict[str, Any], answers: int, most_bytes: int = 0) -> list[Any]:
        """The answers to a request, asked again over a new connection where this one is lost."""

        def ask() -> list[Any]:
            with contextlib.suppress(EOFError, OSError, ValueError):
                return list(self._answers(request, answers, most_bytes))
            why = self._end(explain=True)
            why = "no answer" if self._is_late else why
            raise UnreachableError(
                f"{self.title}: its files cannot be read: {why}\ncommand: {shlex.join(self._argv)}"
            )

        with self._lock:
            if self._has_answered:
                # Once at once: only the connection may be lost.
                with contextlib.suppress(UnreachableError):
                    return ask()
            return self._retried(ask)

    def _answers(self, request: dict[str, Any], answers: int, most_bytes: int) -> Iterator[Any]:
        sent = json.dumps(request).encode() + b"\n"
        is_new = self._process is None
        if self._process is None:
            self._process = self._programs.stream(self._argv)
            sent = self._source + sent
        with self._limited(self._process, is_new):
            yield from self._read_answers(self._process, sent, answers, most_bytes)

    @contextlib.contextmanager
    def _limited(self, process: subprocess.Popen[bytes], is_new: bool) -> Iterator[None]:
        """End the connection where it takes too long inside of the `with`."""
        self._is_late = False
        if self._connect_seconds is None:
            yield
            return

        def end() -> None:
            self._is_late = True
            process.kill()

        timer = threading.Timer(self._connect_seconds * (1 if is_new else _LATER), end)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _read_answers(
        self, process: subprocess.Popen[bytes], sent: bytes, answers: int, most_bytes: int
    ) -> Iterator[Any]:
        to, out = process.stdin, process.stdout
        assert to is not None and out is not None
        to.write(sent)
        to.flush()
        for _ in range(answers):
            line = out.readline(_LINE_BYTES)
            if not line.endswith(b"\n"):
                raise EOFError
            answer = json.loads(line)
            if answer is None or isinstance(answer, list):
                yield answer
                continue
            if not isinstance(answer, dict):
                raise ValueError(f"not an answer: {type(answer).__name__}")
            if "error" in answer:
                self.close()
                raise UnreadableFile(f"{self.title}: {answer['error']}")
            size = answer.get("bytes")
            if not isinstance(size, int) or not 0 <= size <= most_bytes:
                raise ValueError(f"{size} bytes, where at most {most_bytes} were requested")
            data = out.read(size)
            if len(data) < size:
                raise EOFError
            yield ReadResult(
                bytes.fromhex(str(answer.get("head"))), answer.get("replaced") is True, data
            )


def read_file(files: Files, path: str, offset: int) -> bytes:
    """At most READ_BYTES of a file from `offset` on; below 0: its last bytes. Empty where it is not
    there."""
    (piece,) = files.read([ReadRequest(path, offset, READ_BYTES)])
    return b"" if piece is None or piece.replaced else piece.data


def artifacts_of(files: Files, run_directory: str) -> list[tuple[str, int]]:
    """The files of a run directory: relative path and size; none that is secret."""
    return [
        (path, size)
        for path, size in files.tree(run_directory)
        if not path.startswith(_NO_ARTIFACTS)
    ]


def copy_files(files: Files, directory: str, paths: Sequence[str], destination: str) -> None:
    """Copy files, named relative to `directory`, to a directory here. A file gets its name when it
    is complete.

    Nothing outside of `destination` is written, whatever names the other side gives; links are not
    followed on either side. Raises UserError for a name outside of the destination, with nothing
    copied, for a missing file, and for one that cannot be written here.
    """
    for path in paths:
        require_plain_name(path, files.title)
    for path in paths:
        try:
            with new_file_below(destination, path) as out:
                _copy(files, directory, path, out)
        except OSError as error:
            target = os.path.join(destination, path)
            linked = error.errno in (errno.ENOTDIR, errno.ELOOP)
            why = (
                "a directory on the way is a link or a file; fetch to a new directory"
                if linked
                else error.strerror
            )
            raise UserError(f"{target}: cannot be written: {why}") from None


def _copy(files: Files, directory: str, path: str, out: BinaryIO) -> None:
    head, offset, source = b"", 0, os.path.join(directory, path)
    while True:
        (piece,) = files.read([ReadRequest(source, offset, READ_BYTES, head, directory)])
        if piece is None:
            raise UserError(
                f"{source}: is not on {files.title} (any more), or is a link, which is not followed"
            )
        if piece.replaced:
            offset = 0
            out.seek(0)
            out.truncate()
        head = piece.head
        if not piece.data:
            return
        out.write(piece.data)
        offset += len(piece.data)


def print_notice(text: str) -> None:
    """Print a message to standard error."""
    print(f"{SAYS}{text}", file=sys.stderr, flush=True)


def print_notices(stderr: str) -> None:
    """Print the messages for the user that a program on another host wrote to its standard
    error."""
    for line in stderr.splitlines():
        if line.startswith(SAYS):
            print_notice(line.removeprefix(SAYS))
