"""Starts a probe as processes of their own and reads the JSON object that each prints, so that one
that hangs, is killed or prints something else leaves the others as they are."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drillyard.host_tools import memory_file

from .messages import pause

HERE = Path(__file__).resolve().parent
MOST_OUTPUT_BYTES = 8 << 20
_MOST_PRINTED_BYTES = 256 << 20
"""It is in memory."""
_SHOWN_CHARACTERS = 400
_FOLLOW_SECONDS = 5.0
_DEATH_SECONDS = 5.0
"""A killed process that is still there waits for a device or a file system."""


@dataclass
class Ended:
    """How one process of a probe ended: what it printed, or why that cannot be used."""

    values: dict[str, Any] | None
    error: str | None


class ProbeProcesses:
    """Running processes of one probe on this node. `stop` may be called by another thread."""

    def __init__(
        self,
        commands: Sequence[Sequence[str]],
        environments: Sequence[Mapping[str, str]],
        asked: str,
    ) -> None:
        """Start one process per command, with `asked` on its standard input. Raises OSError where
        one cannot be started; then none runs."""
        self._stopped: str | None = None
        self._reaping = threading.Lock()
        self._files = [(memory_file(), memory_file()) for _ in commands]
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            for command, environment, (out, error) in zip(commands, environments, self._files):
                self._processes.append(
                    subprocess.Popen(
                        command,
                        stdin=subprocess.PIPE,
                        stdout=out,
                        stderr=error,
                        env={**os.environ, **environment},
                        start_new_session=True,
                    )
                )
        except OSError:
            self._kill()
            raise
        for process in self._processes:
            threading.Thread(target=_feed, args=(process, asked.encode()), daemon=True).start()

    def wait(self, seconds: float) -> list[Ended]:
        """What each printed. After `seconds` those that still run are killed. Where one fails, the
        others get a few seconds to follow. What a process has started ends with it."""
        deadline = time.monotonic() + seconds
        while running := [each for each in self._processes if _runs(each)]:
            if time.monotonic() > deadline:
                self.stop(f"did not end within {seconds:.0f} s and was killed")
                break
            if any(_size(file) > _MOST_PRINTED_BYTES for files in self._files for file in files):
                self.stop(f"printed more than {_MOST_PRINTED_BYTES >> 20} MiB and was killed")
                break
            if len(running) < len(self._processes) and any(map(_failed, self._processes)):
                deadline = min(deadline, time.monotonic() + _FOLLOW_SECONDS)
            pause(0.02)
        self._kill()
        return [
            self._ended(process, *files) for process, files in zip(self._processes, self._files)
        ]

    def stop(self, why: str) -> None:
        """Kill what still runs, with all that it has started."""
        if any(map(_runs, self._processes)):
            self._stopped = self._stopped or why
        self._kill()

    def _kill(self) -> None:
        """Kill each process's session. Its number is not used again before the process is reaped,
        which happens after that and once."""
        with self._reaping:
            for process in self._processes:
                if process.returncode is None:
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.killpg(process.pid, signal.SIGKILL)
            for process in self._processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_DEATH_SECONDS)

    def _ended(self, process: subprocess.Popen[bytes], out: Any, error: Any) -> Ended:
        printed, complaints = _text(out), _text(error)
        code = process.returncode
        if code is None:
            why = "is stuck in the kernel: it did not end though it was killed"
            return Ended(_object_in(printed), f"{self._stopped or 'ended'}, and {why}")
        if code != 0:
            why = f"exit code {code}" if code > 0 else f"killed by {_signal_name(-code)}"
            if self._stopped is not None and code == -signal.SIGKILL:
                why = self._stopped
            last = next(iter(reversed(complaints.strip().splitlines())), "")
            return Ended(_object_in(printed), f"{why}: {last[:_SHOWN_CHARACTERS]}" if last else why)
        values = _object_in(printed)
        return Ended(values, None if values is not None else "printed no JSON object")


def _size(file: Any) -> int:
    return os.fstat(file.fileno()).st_size


def _runs(process: subprocess.Popen[bytes]) -> bool:
    """Whether it has not ended; it is not reaped."""
    return process.returncode is None and _peek(process) is None


def _failed(process: subprocess.Popen[bytes]) -> bool:
    if process.returncode is not None:
        return process.returncode != 0
    ended = _peek(process)
    return ended is not None and (ended.si_code != os.CLD_EXITED or ended.si_status != 0)


def _peek(process: subprocess.Popen[bytes]) -> Any:
    try:
        return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        # Another thread has reaped it.
        process.wait()
        return None


def probe_command(name: str) -> list[str]:
    """The command of a probe that needs the standard library alone."""
    return [sys.executable, str(HERE), "probe", name]


def _feed(process: subprocess.Popen[bytes], asked: bytes) -> None:
    assert process.stdin is not None
    try:
        process.stdin.write(asked)
        process.stdin.close()
    except OSError:
        pass


def _text(file: Any) -> str:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - MOST_OUTPUT_BYTES))
    with file:
        return str(file.read().decode(errors="replace"))


def _object_in(printed: str) -> dict[str, Any] | None:
    """The JSON object on the last line that has one: libraries print before and after it."""
    for line in reversed(printed.splitlines()):
        if line.startswith("{"):
            try:
                found = json.loads(line)
            except (ValueError, RecursionError):
                return None
            return found if isinstance(found, dict) else None
    return None


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
