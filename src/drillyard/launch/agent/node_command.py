"""One node's command: started once per round, stopped in order, and all that it has started is ended with it.

Three nets. The kernel kills the command when its agent dies (exec_command.py). Everything that the command starts
inherits
the mark of this agent in its environment, so after each round whatever is left is found in /proc and killed, also
what left its session. And a guardian, a process of its own, does the same when the agent is gone, or has not renewed
its lease (fence.py). What SIGKILL does not end within ten seconds (it waits in a device call) is named and left.

Nothing here waits: `tick` moves on, and is called many times a second.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from . import rank_output, records
from .identity import AGENT_MARK, RUN_MARK, Process, run_token
from .job import Job
from .output_pump import Pump, Sink, open_log
from .parts import SegmentedLog
from .rank_pipes import RankPipes, marks_ranks
from .shared_modules import guardian, launched, redaction

_SECONDS_TO_END = 10.0
_ISOLATED = (sys.executable, "-I", "-S")
_PLACEHOLDER = re.compile(
    r"\{(node_rank|nodes|processes_per_node|master_addr|master_port|round|run_directory|launch_directory)\}"
)
REFERENCE = re.compile(r"\$\{env:([A-Za-z_][A-Za-z0-9_]*)\}")
"""As configs write them (drillyard.config.environment)."""


def fill(text: str, values: dict[str, str]) -> str:
    """`text` with the placeholders of job.py replaced; any other braces stay."""
    return _PLACEHOLDER.sub(lambda found: values[found[1]], text)


class AgentReaper:
    """The process that ends this agent's processes when the agent is gone or its lease runs out."""

    def __init__(self, token: str, environment: dict[str, str], silence_seconds: float) -> None:
        reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        script = str(Path(guardian.__file__))
        self._process = subprocess.Popen(
            [*_ISOLATED, script, token, AGENT_MARK, str(silence_seconds)],
            env=environment,
            stdin=reader,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(reader)

    def renewed(self) -> None:
        """Tell it that the lease was renewed."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            os.write(self._writer, b".")

    def close(self) -> None:
        """Have it end what is left, and end."""
        os.close(self._writer)
        self._process.wait()


class NodeCommand:
    """The command of node `rank`, round after round. Use it from one thread, in a `with`."""

    def __init__(
        self, job: Job, rank: int, me: Process, quiet: bool = False, submission: str = "", umask: int = -1
    ) -> None:
        self.job = job
        self.rank = rank
        self.host = me.host
        self.token = f"{run_token(job.launch_directory)}-{rank}-{me.pid}-{me.started}"
        self.report: dict[str, Any] | None = None
        """How the round's command ended, once nothing of it is left."""
        self._directory = Path(job.launch_directory)
        self._umask = umask
        self._submission = submission
        self._secrets = records.read_secrets(self._directory)
        self._redactor = redaction.Redactor(self._secrets)
        environment = {**os.environ, **self._secrets, RUN_MARK: run_token(job.launch_directory)}
        environment[redaction.GIVEN_NAMES] = ",".join(sorted(self._secrets))
        # The guardian is of the run, so that a stop finds it, and not of those that it ends itself.
        environment.pop(AGENT_MARK, None)
        self.guardian = AgentReaper(self.token, environment, job.lease_seconds / 2)
        self._environment = {**environment, AGENT_MARK: self.token}
        log = self._directory / f"node-{rank}.log"
        self._log = SegmentedLog(log) if job.log_parts else open_log(log)
        self._passed_on = None if quiet else Sink(1, f"not shown here; it is in node-{rank}.log")
        self._command: subprocess.Popen[bytes] | None = None
        self._pump: Pump | None = None
        self._rank_pipes: RankPipes | None = None
        self._returncode: int | None = None
        self._signalled = self._asked = False
        self._why: str | None = None
        self._kill_at: float | None = None
        self._give_up_at: float | None = None

    def __enter__(self) -> NodeCommand:
        return self

    def __exit__(self, *exception: object) -> None:
        self.guardian.close()
        self._log.close()
        if self._passed_on is not None:
            self._passed_on.close()

    @property
    def busy(self) -> bool:
        """Whether anything of a round may still run."""
        return self._command is not None

    def start(self, epoch: int, round_number: int, address: str, port: int) -> None:
        """Start the round's command, with its ranks to meet at `address`:`port`."""
        assert self._command is None
        self.report, self._returncode, self._why = None, None, None
        self._signalled = self._asked = False
        self._kill_at = self._give_up_at = None
        exits = self._directory / "exits"
        self._record = exits / f"{epoch:04d}-{round_number:04d}.node-{self.rank}.told.json"
        self._exit = exits / f"{epoch:04d}-{round_number:04d}.node-{self.rank}.json"
        with contextlib.suppress(OSError):
            exits.mkdir(exist_ok=True)
        values = self._values(round_number, address, port)
        job = self.job
        argv = [fill(word, values) for word in job.command]
        told = {name: self._resolved(fill(text, values)) for name, text in job.environment.items()}
        environment = {**self._environment, **told}
        environment.update(
            NODE_RANK=values["node_rank"],
            NNODES=values["nodes"],
            NPROC_PER_NODE=values["processes_per_node"],
            MASTER_ADDR=address,
            MASTER_PORT=str(port),
        )
        environment[launched.EXIT_RECORD] = str(self._record)
        environment[launched.ROUND] = values["round"]
        environment[launched.SUBMISSION] = self._submission
        self._rank_pipes = self._make_rank_pipes()
        environment[rank_output.PIPES] = "" if self._rank_pipes is None else str(self._rank_pipes.directory)
        self.say(f"round {round_number} of {job.run} on {self.host} (node {self.rank} of {job.nodes}): {argv}")
        reader, writer = os.pipe()
        starter = str(Path(__file__).with_name("exec_command.py"))
        self._command = subprocess.Popen(
            [*_ISOLATED, starter, str(os.getpid()), job.working_directory or "", job.profile_script or "", *argv],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=writer,
            stderr=writer,
            start_new_session=True,
            umask=self._umask,
        )
        os.close(writer)
        self._pump = Pump(reader, self._log, self._passed_on, redactor=self._redactor)

    def _make_rank_pipes(self) -> RankPipes | None:
        if not marks_ranks(self.job.command):
            return None
        try:
            count = self.job.processes_per_node
            return RankPipes(self._directory, self.rank, count, self._log, self._passed_on, self._redactor)
        except OSError as error:
            self.say(f"lines are not marked with their ranks: {error}")
            return None

    def _resolved(self, text: str) -> str:
        """`text` with each `${env:NAME}` that submission knew replaced by its value."""
        return REFERENCE.sub(lambda found: self._secrets.get(found[1], found[0]), text)

    def stop(
        self,
        number: int,
        patience_seconds: float,
        why: str | None = None,
        elsewhere: launched.FailureElsewhere | None = None,
    ) -> None:
        """Send the command a signal, once; what is left of it after the shortest patience of all calls is killed.

        `why`: it is stopped for a fault of its own, this one, and its end is that of a command that failed.
        `elsewhere`: it is stopped for that of another node, and told so.
        """
        if self._command is None:
            return
        if self._returncode is None:
            if not self._signalled:
                self._signalled = True
                if elsewhere is not None:
                    self.say(f"{signal.Signals(number).name} to the command: {elsewhere.reason}")
                    launched.tell_failure_elsewhere(self._record, elsewhere)
                self._command.send_signal(number)
            self._asked = self._asked or why is None
            self._why = self._why or why
        kill_at = time.monotonic() + patience_seconds
        self._kill_at = kill_at if self._kill_at is None else min(self._kill_at, kill_at)

    def kill(self, why: str | None = None) -> None:
        """SIGKILL everything of the round, from now on until nothing is left."""
        if self._command is None:
            return
        self._asked = self._asked or (self._returncode is None and why is None)
        self._why = self._why or (why if self._returncode is None else None)
        self._kill_at = time.monotonic()
        self.tick()

    def end_for(self, why: str) -> None:
        """The command may run no longer, and `why` is told of its end, also where the guardian was quicker."""
        self._why = self._why or why
        self.kill(why)

    def tick(self) -> None:
        """Move on: see whether the command ended, kill what is to be killed, and report when all is over."""
        if self._command is None:
            return
        if self._returncode is None:
            self._returncode = self._command.poll()
        due = self._kill_at is not None and time.monotonic() >= self._kill_at
        if self._returncode is None and not due:
            return
        left = guardian.marked_processes(self.token, AGENT_MARK)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self._returncode is None:
            # It may have cleared its environment.
            self._command.kill()
        if self._give_up_at is None:
            self._give_up_at = time.monotonic() + _SECONDS_TO_END
        given_up = time.monotonic() >= self._give_up_at
        if (left or self._returncode is None) and not given_up:
            return
        self._finish(left)

    def say(self, text: str) -> None:
        """A line of the agent's own, in the node's log."""
        for line in self._redactor.text(text).splitlines():
            self._log.put(records.stamped_line(f"=== {line}"))

    def _finish(self, left: list[int]) -> None:
        assert self._pump is not None
        patience = 0.2 if left else 2.0
        printed = self._pump.finish(patience).decode(errors="replace")
        if self._rank_pipes is not None:
            ranks = [tail.decode(errors="replace") for tail in self._rank_pipes.finish(patience)]
            printed = records.merged_rank_output(printed, ranks, self.rank * self.job.processes_per_node)
        why = self._why
        if left:
            why = f"processes {left} do not end on SIGKILL: they wait in a device call; restart {self.host}"
        returncode = -int(signal.SIGKILL) if self._returncode is None else self._returncode
        told = records.read_json_object(self._record)
        if (safe := self._redactor.tree(told)) != told:
            # A workload wrote it, and may have told what it knows.
            told = safe
            with contextlib.suppress(OSError):
                records.replace_file(self._record, json.dumps(told) + "\n")
        self.report = records.make_report(self.rank, self.host, returncode, told, printed, self._asked, why)
        self.report["left"] = left
        self._command = self._pump = self._rank_pipes = None
        with contextlib.suppress(OSError):
            records.replace_file(self._exit, json.dumps(self.report, indent=2) + "\n")

    def _values(self, round_number: int, address: str, port: int) -> dict[str, str]:
        return {
            "node_rank": str(self.rank),
            "nodes": str(self.job.nodes),
            "processes_per_node": str(self.job.processes_per_node),
            "master_addr": address,
            "master_port": str(port),
            "round": str(round_number),
            "run_directory": self.job.run_directory,
            "launch_directory": self.job.launch_directory,
        }
