"""The agents of a cluster's hosts, as this machine asks them: one program per host, in parallel.

The agent's source is sent with each request, so that a host needs nothing of ours. The head host,
the first one, has the index of runs.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass

from drillyard.errors import UnreachableError, UserError
from drillyard.launch.hosts.host_facts import HostAnswer, no_answer_reason
from drillyard.launch.hosts.plan import HostLayout
from drillyard.launch.launcher import NotListedError
from drillyard.launch.prepared_run import SENT_AGENT, agent_files
from drillyard.programs import Host, Programs, Result, archive, parallel_map, require_success

MOST_AT_ONCE = 64
"""Programs of this machine that run at the same time: each is an ssh with a connection of its
own."""
QUICK_SECONDS = 120.0
"""Time limit of all that is quick."""
NOTHING_TO_SAVE_SECONDS = 10.0
"""The grace period of agents that were just started, and of those whose leader died."""
_STOP = (
    'if [ -O "$1" ] && [ -O "$1/agent" ] && [ -O "$1/agent/__main__.py" ] && [ -e "$1/job.json" ];'
    ' then exec "$0" "$1/agent" stop --launch-directory "$1" --patience "$2"'
    ' ${3:+--submission "$3"}; fi; set -- stop --launch-directory "$1" --patience "$2"'
    ' ${3:+--submission "$3"}; ' + SENT_AGENT
)
"""Stops a run with its own agent, which needs no free disk space, where this user owns it; with the
agent that is sent where the run's directory was deleted. "$3": only what this submission has
started."""
_STOP_SECONDS = 180.0
"""Time limit of stopping, after the grace period: for a slow login, a file system that hangs."""


class HeadFailed(NotListedError):
    """The head host cannot list its runs."""


class HeadUnreachable(HeadFailed, UnreachableError):
    """ssh cannot reach the head host."""


@dataclass(frozen=True)
class HostAgents:
    """The hosts of one cluster."""

    cluster: str
    layout: HostLayout
    programs: Programs

    @property
    def hosts(self) -> tuple[Host, ...]:
        return self.layout.hosts

    def ask(
        self,
        hosts: Sequence[Host],
        words: Sequence[str],
        seconds: float = QUICK_SECONDS,
        script: str = SENT_AGENT,
    ) -> list[HostAnswer]:
        """Run a verb of the agent on each host. `script` runs it, with the agent's source as its
        input."""
        titles = [host.title for host in hosts]
        argvs = [host.argv(["sh", "-c", script, self.layout.python, *words]) for host in hosts]
        return ask_all(titles, argvs, self.programs, stdin=archive(agent_files()), seconds=seconds)

    def ask_head(self, words: Sequence[str]) -> Result:
        """Run a verb of the agent on the head host."""
        (answer,) = self.ask(self.hosts[:1], words)
        if answer.result is None or answer.result.unreachable:
            raise HeadUnreachable(f"{answer.host}: {no_answer_reason(answer)}")
        try:
            return require_success(answer.result, f"{answer.host}: its runs cannot be listed")
        except UserError as error:
            raise HeadFailed(str(error)) from None

    def forget(self, run: str, *words: str) -> None:
        """Take a run off the index; with `--submission ID`, only where its entry is that one's."""
        self.ask_head(["forget", "--cluster", self.cluster, "--run", run, *words])

    def stop(
        self,
        hosts: Sequence[Host],
        launch_directory: str,
        grace_seconds: float,
        submission: str | None = None,
    ) -> list[HostAnswer]:
        """Stop a run's agents on some hosts; with `submission`, only what that one has started."""
        words = [launch_directory, f"{grace_seconds:g}", *([submission] if submission else [])]
        return self.ask(hosts, words, grace_seconds + _STOP_SECONDS, _STOP)

    def stop_all(self, launch_directory: str, grace_seconds: float) -> list[str]:
        """Stop a run's agents on all hosts; returns the problems, host by host."""
        problems = []
        for answer in self.stop(self.hosts, launch_directory, grace_seconds):
            if answer.parsed() is None:
                silent = answer.result is None or answer.result.unreachable
                advice = f"\n  {self.unreached_advice}" if silent else ""
                problems.append(f"{answer.host}: {no_answer_reason(answer)}{advice}")
        return problems

    def end_leftovers(self, launch_directory: str) -> None:
        """End agents whose leader died: they wait for it for up to `join_seconds`.

        The check of all hosts that follows reports agents that could not be ended and hosts that do
        not answer.
        """
        words = ["stop", "--launch-directory", launch_directory]
        words += ["--patience", f"{NOTHING_TO_SAVE_SECONDS:g}", "--keep-state"]
        self.ask(self.hosts, words, NOTHING_TO_SAVE_SECONDS + _STOP_SECONDS)

    @property
    def unreached_advice(self) -> str:
        several = "its part of the run cannot continue without the others and ends by itself"
        state = several if len(self.hosts) > 1 else "the run continues there"
        return f"{state}; repeat the command when it is back"


def ask_all(
    hosts: Sequence[str],
    argvs: Sequence[Sequence[str]],
    programs: Programs,
    *,
    stdin: bytes = b"",
    seconds: float | None,
) -> list[HostAnswer]:
    """Run one command per host, at most MOST_AT_ONCE at a time; what each gave, in the order
    given."""

    def ask(host: str, argv: Sequence[str]) -> HostAnswer:
        asked_at = time.time()
        try:
            result = programs.run(argv, stdin=stdin, timeout=seconds)
        except UserError as error:
            text = str(error).partition("\ncommand: ")[0]
            for prefix in (shlex.join(argv), host):
                text = text.removeprefix(f"{prefix}: ")
            return HostAnswer(host, None, text, is_reached=not isinstance(error, UnreachableError))
        return HostAnswer(host, result, "", asked_at, time.time())

    return parallel_map(
        lambda asked: ask(*asked), list(zip(hosts, argvs, strict=True)), MOST_AT_ONCE
    )
