"""A supervisor in a process of its own, over tiny scripts as ranks: for tests of what it does when
they misbehave."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from tests.integration import waiting

DRIVER = """
import sys
from pathlib import Path
from rich.console import Console
from drillyard.supervise.attempt import GracePeriods
from drillyard.supervise.run_lock import exclusive_run_lock
from drillyard.supervise.supervisor import supervise
directory = Path(sys.argv[1])
with exclusive_run_lock(directory) as lock:
    code = supervise(
        [sys.executable, "-c", sys.argv[2]],
        num_ranks=int(sys.argv[3]), run_directory=directory, lock=lock, max_restarts=int(sys.argv[4]),
        environment={"FROM_CALLER": "yes"}, console=Console(), trains=sys.argv[9] == "True",
        grace=GracePeriods(
            watchdog=float(sys.argv[5]) or None, stacks=2.0, settle=float(sys.argv[6]), terminate=float(sys.argv[7]),
            kill=float(sys.argv[8]),
        ),
    )
sys.exit(code)
"""  # noqa: E501
TIMEOUT_SECONDS = 180
"""For what takes a second or two: only what hangs takes so long, on a slow and busy machine too."""
until = partial(waiting.until, seconds=TIMEOUT_SECONDS)
# What every rank script starts with: its place, and a way to tell of a step as the trainer does.
# `forever` is longer than any test waits: what sleeps so long has to be ended.
PREAMBLE = """
import json, os, signal, subprocess, sys, time
rank, attempt = int(os.environ["RANK"]), int(os.environ["DRILLYARD_ROUND"])
directory = os.environ["RUN_DIRECTORY"]
forever = 1000
def step(number):
    from drillyard.supervise.heartbeat import heartbeat_writer
    heartbeat_writer(os.environ).step(number, 100)
def summary():
    with open(directory + "/summary.json", "w") as file:
        file.write("{}")
def wait_for(name):
    while not os.path.exists(directory + "/" + name):
        time.sleep(0.01)
def touch(name):
    open(directory + "/" + name, "w").close()
"""


class Supervised:
    """A supervisor in a process of its own; `prelude` is Python that it runs first."""

    def __init__(
        self, directory: Path, script: str, ranks: int, *settings: float, prelude: str = ""
    ) -> None:
        self.directory = directory
        directory.mkdir(exist_ok=True)
        script = PREAMBLE + textwrap.dedent(script)
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                prelude + DRIVER,
                str(directory),
                script,
                str(ranks),
                *map(str, settings),
            ],
            env={**os.environ, "RUN_DIRECTORY": str(directory)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def end(self) -> tuple[int, str, str]:
        """Exit code, standard output and standard error of the supervisor."""
        out, err = self.process.communicate(timeout=TIMEOUT_SECONDS)
        return self.process.returncode, out, err

    def wait_for(self, name: str) -> None:
        """Until a rank has made this file."""
        until((self.directory / name).exists)

    def log(self, rank: int) -> str:
        """All of a rank's log."""
        return (self.directory / "logs" / f"rank-{rank}.log").read_text()

    def events(self) -> list[dict[str, object]]:
        """The lines of events.jsonl."""
        return [
            json.loads(line) for line in (self.directory / "events.jsonl").read_text().splitlines()
        ]

    def left_running(self) -> list[str]:
        """Processes of this run that still live, by their environment."""
        needle = f"RUN_DIRECTORY={self.directory}\0".encode()
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if needle in (process / "environ").read_bytes():
                    found.append(
                        (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:80]
                    )
        return found


Start = Callable[..., Supervised]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[Supervised] = []

    def begin(
        script: str,
        *,
        ranks: int = 2,
        max_restarts: int = 3,
        watchdog: float = 0,
        settle: float = 0.2,
        terminate: float = 30.0,
        kill: float = 60.0,
        prelude: str = "",
        trains: bool = True,
    ) -> Supervised:
        settings = (max_restarts, watchdog, settle, terminate, kill, trains)
        started.append(Supervised(tmp_path / "run", script, ranks, *settings, prelude=prelude))
        return started[-1]

    yield begin
    for supervised in started:
        if supervised.process.poll() is None:
            supervised.process.kill()
            supervised.process.communicate()
        until(lambda supervised=supervised: not supervised.left_running())  # type: ignore[misc]
