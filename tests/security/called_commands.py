"""Run commands of `drillyard` one after the other in one process of its own, which records what it
connects to and starts: `python called_commands.py` reads [[argument, ...], ...] and writes a list
of results, both JSON."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Called:
    """The end of one command. `contacted`: hosts that were resolved and addresses that were
    connected to; `started`: the words of the commands that it started."""

    code: int
    output: str
    contacted: list[str]
    started: list[str]


def call_commands(
    commands: list[list[str]], directory: Path, environment: Mapping[str, str]
) -> list[Called]:
    """The results of `commands`, run in `directory`."""
    found = subprocess.run(
        [sys.executable, __file__],
        input=json.dumps(commands),
        cwd=directory,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    return [Called(**one) for one in json.loads(found.stdout)]


def main() -> None:
    """Read commands, run them, write results."""
    from drillyard.cli import main as cli

    contacted: list[str] = []
    started: list[str] = []

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "socket.connect" and isinstance(arguments[1], tuple):
            contacted.append(f"{arguments[1][0]}:{arguments[1][1]}")
        elif event == "socket.getaddrinfo":
            contacted.append(f"{arguments[0]}:{arguments[1]}")
        elif event == "subprocess.Popen":
            started.extend(map(str, arguments[1]))

    sys.addaudithook(watch)
    results = []
    for arguments in json.load(sys.stdin):
        contacted.clear()
        started.clear()
        output = io.StringIO()
        code: Any = 0
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            try:
                cli.main(arguments)
            except SystemExit as left:
                code = left.code or 0
        results.append(
            {
                "code": code,
                "output": output.getvalue(),
                "contacted": list(contacted),
                "started": list(started),
            }
        )
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
