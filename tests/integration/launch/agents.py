"""A run's agents as processes of this host, with cheap commands: what the tests of the agent start
and look at."""

from __future__ import annotations

import contextlib
import json
import os
import random
import secrets
import socket
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tests.integration import waiting

from drillyard.launch.agent.job import Job, run_token
from drillyard.launch.prepared_run import agent_files
from drillyard.supervise import reaper
from drillyard.supervise.reaper import RUN_MARK

TIMEOUT_SECONDS = 90.0
until = partial(waiting.until, seconds=TIMEOUT_SECONDS)
TELL = 'echo $NODE_RANK $ROUND $$ >> "$RUN/commands"'
"""A command that leaves a line in RUN/commands."""
WAIT = 'while [ ! -e "$RUN/finish" ]; do sleep 0.05; done'
"""A command that works until the test lets it finish."""


def free_port_range() -> int:
    """First of 16 free ports."""
    while True:
        first = random.SystemRandom().randrange(20_000, 32_000, 16)
        with contextlib.ExitStack() as stack:
            try:
                for port in range(first, first + 16):
                    stack.enter_context(socket.create_server(("", port)))
            except OSError:
                continue
            return first


class Agents:
    """One run of `nodes` nodes whose command is a shell script; its agents are copied beside it, as
    a plan does it."""

    def __init__(self, directory: Path, script: str, nodes: int = 1, **settings: Any) -> None:
        self.directory = directory
        self.launch = directory / "launch"
        (self.launch / "agent").mkdir(parents=True, exist_ok=True)
        for file in agent_files():
            (self.launch / file.path).write_text(file.content, encoding="utf-8")
        settings.setdefault("port", free_port_range())
        settings.setdefault("environment", {"RUN": "{run_directory}", "ROUND": "{round}"})
        settings.setdefault("command", ["sh", "-c", script])
        job = Job(
            run="tiny",
            cluster="here",
            platform="local",
            nodes=nodes,
            processes_per_node=1,
            run_directory=str(directory),
            launch_directory=str(self.launch),
            **settings,
        )
        self.job = self.launch / "job.json"
        self.job.write_text(job.as_json(), encoding="utf-8")
        (self.launch / "secret").write_text(secrets.token_hex(32))
        self.started: list[subprocess.Popen[bytes]] = []

    def call(self, verb: str, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """A verb of the agent, to its end."""
        argv = [sys.executable, str(self.launch / "agent"), verb, *words]
        ended = subprocess.run(
            argv, capture_output=True, text=True, env={**os.environ, **environment}, check=False
        )
        print(ended.stdout, ended.stderr)
        return ended

    def run(
        self,
        node: int = 0,
        *words: str,
        wrapped: Callable[[list[str]], list[str]] = lambda argv: argv,
        **environment: str,
    ) -> subprocess.Popen[bytes]:
        """An agent in the foreground of its own process; `wrapped` may put another program in front
        of it."""
        argv = [
            sys.executable,
            str(self.launch / "agent"),
            "run",
            "--job",
            str(self.job),
            "--quiet",
        ]
        argv = wrapped([*argv, "--node-rank", str(node), "--leader", "127.0.0.1", *words])
        self.started.append(subprocess.Popen(argv, env={**os.environ, **environment}))
        return self.started[-1]

    def run_all(self, *words: str) -> list[subprocess.Popen[bytes]]:
        """One agent per node."""
        return [self.run(node, *words) for node in range(self.nodes)]

    def start(self, node: int) -> dict[str, Any]:
        """A detached agent; what `start` tells."""
        words = [
            "--job",
            str(self.job),
            "--node-rank",
            str(node),
            "--leader",
            "127.0.0.1",
            "--submission",
            "first",
        ]
        ended = self.call("start", *words)
        assert ended.returncode == 0, ended.stderr
        return dict(json.loads(ended.stdout))

    def stop(self) -> dict[str, Any]:
        """The verb `stop`."""
        return dict(
            json.loads(
                self.call("stop", "--launch-directory", str(self.launch), "--patience", "60").stdout
            )
        )

    @property
    def nodes(self) -> int:
        """Nodes of the job."""
        return int(json.loads(self.job.read_text())["nodes"])

    @property
    def state(self) -> dict[str, Any]:
        """state.json; empty before there is one."""
        path = self.launch / "state.json"
        return dict(json.loads(path.read_text())) if path.exists() else {}

    def lines(self, name: str) -> list[str]:
        """Lines of a file that the commands have written in the run directory; none where it is not
        there."""
        path = self.directory / name
        return path.read_text().splitlines() if path.exists() else []

    def log(self, node: int) -> str:
        """What the log of a node holds."""
        return (self.launch / f"node-{node}.log").read_text()

    def marked(self) -> list[int]:
        """Processes of this run that are there, agents of `run` left out."""
        return reaper.marked_processes(run_token(str(self.launch)), RUN_MARK)

    def close(self) -> None:
        """End everything that is left, whatever state it is in."""
        for process in self.started:
            if process.poll() is None:
                process.kill()
                process.wait()
        until(lambda: reaper.end_marked_processes(run_token(str(self.launch)), RUN_MARK))


def codes(agents: list[subprocess.Popen[bytes]]) -> list[int]:
    """Exit codes, when all have ended."""
    return [agent.wait(TIMEOUT_SECONDS) for agent in agents]


Make = Callable[..., Agents]
"""Makes a run: its command, the number of nodes, and settings of `Agents`."""
