"""Run commands of `drillyard`, each in a child of one process that has imported them but not
torch: a command then costs what it does itself. `python forked_commands.py` reads a line of JSON
for each ({"words": [...], "directory": "..."}) and answers with one: exit code, output, seconds of
processor and the most memory of the command with what it starts."""

from __future__ import annotations

import gc
import json
import os
import resource
import select
import signal
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

_LONGEST_SECONDS = 60.0


@dataclass(frozen=True)
class Ended:
    """How a command ended; -9: it was killed after a minute. `bytes`: beyond those of an idle
    child."""

    code: int
    output: str
    seconds: float
    bytes: int


class ForkedCommands:
    """The process: `with ForkedCommands() as run: run(directory, "metrics", "run.log")`."""

    def __enter__(self) -> ForkedCommands:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        self._idle = self._ask("", [])["bytes"]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.communicate()

    def __call__(self, directory: Path, *words: object) -> Ended:
        answer = self._ask(str(directory), list(map(str, words)))
        return Ended(**{**answer, "bytes": answer["bytes"] - self._idle})

    def _ask(self, directory: str, words: list[str]) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        print(
            json.dumps({"words": words, "directory": directory}),
            file=self._process.stdin,
            flush=True,
        )
        answer = json.loads(self._process.stdout.readline())
        assert isinstance(answer, dict)
        return answer


def main() -> None:
    """Import the commands, then run those that are asked for."""
    import drillyard.config.load
    import drillyard.measurement.read_logs  # noqa: F401
    from drillyard.cli import main as cli

    for name in cli.COMMANDS:
        cli.load_command(name)
    assert "torch" not in sys.modules
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        print(json.dumps(_run(**json.loads(line))), flush=True)


def _run(words: list[str], directory: str) -> dict[str, Any]:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        _be_the_command(words, directory, write)
    os.close(write)
    output, until = bytearray(), time.monotonic() + _LONGEST_SECONDS
    ended = 0
    while not ended:
        if select.select([read], [], [], 0.002)[0]:
            output += os.read(read, 1 << 16)
        ended, status, usage = os.wait4(child, os.WNOHANG)
        if not ended and time.monotonic() > until:
            os.killpg(child, signal.SIGKILL)
            until += _LONGEST_SECONDS
    os.set_blocking(read, False)
    while select.select([read], [], [], 0)[0] and (more := os.read(read, 1 << 16)):
        output += more
    os.close(read)
    return {
        "code": os.waitstatus_to_exitcode(status),
        "output": output.decode(errors="replace"),
        # Of the processor: a busy machine makes no test fail, and what waits is killed.
        "seconds": usage.ru_utime + usage.ru_stime,
        "bytes": usage.ru_maxrss * 1024,
    }


def _be_the_command(words: list[str], directory: str, write: int) -> NoReturn:
    from drillyard.cli import main as cli

    code: Any = 0
    try:
        os.setpgid(0, 0)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(write, 1)
        os.dup2(write, 2)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if words:
            os.chdir(directory)
            cli.main(words)
    except SystemExit as left:
        code = left.code or 0
    except BaseException:
        traceback.print_exc()
        code = 99
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)


if __name__ == "__main__":
    main()
