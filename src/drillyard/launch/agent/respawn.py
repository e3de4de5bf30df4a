"""Agents that outlive the connection that started them: the verb `start`, and `keep`, which
respawns a killed agent.

The respawning process starts the agent again when a signal has killed it (out of memory, a mistaken
kill -9), soon at first and then after longer pauses, and exits with its code when it exits. It
leads a session of its own, ignores the terminal's hangup, blocks no signal, and passes SIGTERM on.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path

from drillyard.supervise.launch_contract import EXIT_FAILED
from drillyard.supervise.process_identity import process_of, running_process
from drillyard.supervise.reaper import RUN_MARK
from drillyard.supervise.sockets import wait_for
from drillyard.supervise.stop_requests import StopRequests

from .job import UsageError, load_job, run_token
from .scheduler_env import locate_node
from .state_file import agents_here

_SECONDS_TO_APPEAR = 60.0
_FIRST_PAUSE_SECONDS = 0.5
_LONGEST_PAUSE_SECONDS = 60.0
_SECONDS_OF_A_HEALTHY_AGENT = 600.0
"""An agent that was killed after so long is started again without a longer pause."""


def start(options: Namespace) -> int:
    """Start an agent that is respawned, detached; prints JSON when it is up. Raises UsageError."""
    job = load_job(options.job)
    node, _, start = locate_node(job, options)
    directory = Path(job.launch_directory)
    for each, agent in agents_here(directory):
        if not agent.alive or each["node"] != node:
            continue
        if each["submission"] != start["submission"]:
            raise UsageError(
                f"node {node} of {job.run} runs here already (submission"
                f" {each['submission'] or 'without a name'}, process {agent.pid}): stop that one"
                " first"
            )
        print(json.dumps({**each, "already": True}))
        return 0
    log = directory / f"agent-{node}.log"
    with open(log, "ab") as output:
        respawner = subprocess.Popen(
            _this_call_as("keep", "--quiet"),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd="/",
            start_new_session=True,
            env={**os.environ, RUN_MARK: run_token(job.launch_directory)},
        )
    deadline = time.monotonic() + _SECONDS_TO_APPEAR
    own = running_process(respawner.pid)
    while time.monotonic() < deadline:
        for each, _ in agents_here(directory):
            if process_of(each["keeper"]) == own:
                print(json.dumps({**each, "already": False}))
                return 0
        if (code := respawner.poll()) is not None:
            return _ended_at_once(code, log)
        time.sleep(0.05)
    respawner.terminate()
    print(
        f"error: the agent did not come up within {_SECONDS_TO_APPEAR:.0f} s; see {log}",
        file=sys.stderr,
    )
    return EXIT_FAILED


def _ended_at_once(code: int, log: Path) -> int:
    """Report an agent that exited before it was seen: a run that is cancelled, refused, or very
    short."""
    if code == 0:
        print(json.dumps({"ended": True, "exit_code": 0, "already": False}))
        return 0
    words = log.read_text(encoding="utf-8", errors="replace").splitlines()[-3:]
    print(
        "\n".join(words) or f"error: the agent ended at once with exit code {code}; see {log}",
        file=sys.stderr,
    )
    return code if code > 0 else EXIT_FAILED


def respawn(argv: list[str]) -> int:
    """Run an agent until it exits, or until a stop signal, which is passed on; returns the exit
    code."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    pause = _FIRST_PAUSE_SECONDS
    # SIGCHLD, so that waiting ends when the agent does.
    with StopRequests(signal.SIGCHLD) as stop:
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        while True:
            begun = time.monotonic()
            agent = subprocess.Popen(argv)
            while (code := agent.poll()) is None:
                wait_for([stop], 1.0)
                for number in stop.take():
                    agent.send_signal(number)
            if code >= 0:
                return code
            if stop.first is not None:
                return 128 - code
            if time.monotonic() - begun > _SECONDS_OF_A_HEALTHY_AGENT:
                pause = _FIRST_PAUSE_SECONDS
            again_at = time.monotonic() + pause
            words = (
                f"the agent was killed by {signal.Signals(-code).name}; it starts again in"
                f" {pause:.1f} s"
            )
            print(words, file=sys.stderr, flush=True)
            while (left := again_at - time.monotonic()) > 0:
                wait_for([stop], left)
                if asked := stop.take():
                    return 128 + asked[0]
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)


def keep(options: Namespace) -> int:
    """Run an agent, and start it again when a signal kills it; returns the exit code of the agent
    that exited."""
    return respawn(_this_call_as("run", "--kept"))


def _this_call_as(verb: str, *more: str) -> list[str]:
    """The call of this process with another verb."""
    return [sys.executable, str(Path(__file__).resolve().parent), verb, *sys.argv[2:], *more]
