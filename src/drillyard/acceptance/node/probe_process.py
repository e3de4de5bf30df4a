"""Starts a probe as processes of their own and reads the JSON object that each prints, so that one
that hangs, is killed or prints something else leaves the others as they are."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
MOST_OUTPUT_BYTES = 8 << 20
_SHOWN_CHARACTERS = 400


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
        """Start one process per command, with `asked` on its standard input."""
        self._stopped: str | None = None
        self._files = [(tempfile.TemporaryFile(), tempfile.TemporaryFile()) for _ in commands]
        self._processes = []
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
        for process in self._processes:
            threading.Thread(target=_feed, args=(process, asked.encode()), daemon=True).start()

    def wait(self, seconds: float) -> list[Ended]:
        """What each printed. After `seconds` those that still run are killed. Where one fails, the
        others get a few seconds to follow."""
        deadline = time.monotonic() + seconds
        while any(process.poll() is None for process in self._processes):
            if time.monotonic() > deadline:
                self.stop(f"did not end within {seconds:.0f} s and was killed")
            elif any(process.returncode for process in self._processes):
                deadline = min(deadline, time.monotonic() + 5.0)
            time.sleep(0.02)
        return [
            self._ended(process, *files) for process, files in zip(self._processes, self._files)
        ]

    def stop(self, why: str) -> None:
        """Kill what still runs."""
        self._stopped = self._stopped or why
        for process in self._processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        for process in self._processes:
            process.wait()

    def _ended(self, process: subprocess.Popen[bytes], out: Any, error: Any) -> Ended:
        printed, complaints = _text(out), _text(error)
        code = process.returncode
        if code != 0:
            why = f"exit code {code}" if code > 0 else f"killed by {_signal_name(-code)}"
            if self._stopped is not None and code == -signal.SIGKILL:
                why = self._stopped
            last = next(iter(reversed(complaints.strip().splitlines())), "")
            return Ended(_object_in(printed), f"{why}: {last[:_SHOWN_CHARACTERS]}" if last else why)
        values = _object_in(printed)
        return Ended(values, None if values is not None else "printed no JSON object")


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
            except ValueError:
                return None
            return found if isinstance(found, dict) else None
    return None


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
