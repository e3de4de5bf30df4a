"""Command of one node: started once per attempt, stopped in order, and ended together with
everything it has started.

The kernel kills the command when its agent dies (exec_command.py). Everything that the command
starts inherits this agent's mark in its environment, so after each attempt whatever is left is
found in /proc and killed, also what left its session. The reaper, a separate process, does the same
when the agent is gone or has not renewed its lease (fence.py). What SIGKILL does not end within ten
seconds (it waits in a device call) is named and left.

Nothing here waits: call `tick` many times a second.
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

from drillyard import redaction
from drillyard.supervise import launch_contract, reaper
from drillyard.supervise.process_identity import Process
from drillyard.supervise.reaper import AGENT_MARK, RUN_MARK, ParentWatcher, kill_marked_processes

from . import exec_command, exit_report, state_file
from .job import Job, run_token
from .messages import StartMessage, StopMessage
from .output_pump import Pump, RankPipes, SegmentedLog, Sink, open_log, prefixes_ranks, stamped_line

_SECONDS_TO_END = 10.0
_PLACEHOLDER = re.compile(r"\{(\w+)\}")
REFERENCE = re.compile(r"\$\{env:([A-Za-z_][A-Za-z0-9_]*)\}")
"""As configs write them (drillyard.config.environment)."""


def fill(text: str, values: dict[str, str]) -> str:
    """Replace `{name}` in `text` by its value (job.py); any other braces stay."""
    return _PLACEHOLDER.sub(lambda found: values.get(found[1], found[0]), text)


class NodeCommand:
    """The command of node `rank`, attempt after attempt; its ranks meet at `address`. Use it from
    one thread."""

    def __init__(
        self,
        job: Job,
        rank: int,
        me: Process,
        address: str,
        quiet: bool,
        submission: str,
        umask: int,
    ) -> None:
        self.job = job
        self.rank = rank
        self.address = address
        self.host = me.host
        self.token = f"{run_token(job.launch_directory)}-{rank}-{me.pid}-{me.started}"
        self._directory = Path(job.launch_directory)
        self._umask = umask
        self._submission = submission
        self._secrets = state_file.read_secrets(self._directory)
        self._redactor = redaction.Redactor(self._secrets)
        environment = {**os.environ, **self._secrets, RUN_MARK: run_token(job.launch_directory)}
        environment[redaction.GIVEN_NAMES] = ",".join(sorted(self._secrets))
        # The reaper has the run's mark, so that `stop` finds it, but not the mark of the processes
        # that it kills.
        environment.pop(AGENT_MARK, None)
        silence = job.lease_seconds / 2
        self.reaper = ParentWatcher(
            reaper.__file__, self.token, AGENT_MARK, silence, environment=environment
        )
        self._environment = {**environment, AGENT_MARK: self.token}
        log = self._directory / f"node-{rank}.log"
        self._log = SegmentedLog(log) if job.log_parts else open_log(log)
        self._passed_on = None if quiet else Sink(1, f"not shown here; it is in node-{rank}.log")
        self._command: subprocess.Popen[bytes] | None = None
        self._why: str | None = None

    def close(self) -> None:
        """Kill everything that its commands have left, and write the queued lines to the log."""
        self.reaper.close()
        self._log.close()
        if self._passed_on is not None:
            self._passed_on.close()

    @property
    def busy(self) -> bool:
        """Whether anything of an attempt may still run."""
        return self._command is not None

    @property
    def poll_seconds(self) -> float:
        """Seconds to wait at most before the next `tick`."""
        return 0.02 if self.busy and self._kill_at is not None else 0.2

    def start(self, start: StartMessage) -> None:
        assert self._command is None
        self._why = None
        self._asked = False
        self._returncode: int | None = None
        self._kill_at: float | None = None
        self._give_up_at: float | None = None
        exits = self._directory / "exits"
        name = f"{start.epoch:04d}-{start.attempt:04d}.node-{self.rank}"
        self._record, self._exit = exits / f"{name}.record.json", exits / f"{name}.json"
        with contextlib.suppress(OSError):
            state_file.make_directory(exits)
        job = self.job
        values = {
            "node_rank": str(self.rank),
            "nodes": str(job.nodes),
            "processes_per_node": str(job.processes_per_node),
            "master_addr": self.address,
            "master_port": str(start.port),
            "round": str(start.attempt),
            "run_directory": job.run_directory,
            "launch_directory": job.launch_directory,
        }
        argv = [fill(word, values) for word in job.command]
        self._rank_pipes = self._make_rank_pipes()
        environment = {
            **self._environment,
            # With the values that `${env:NAME}` had at submission.
            **{
                name: REFERENCE.sub(
                    lambda found: self._secrets.get(found[1], found[0]), fill(text, values)
                )
                for name, text in job.environment.items()
            },
            "NODE_RANK": values["node_rank"],
            "NNODES": values["nodes"],
            "NPROC_PER_NODE": values["processes_per_node"],
            "MASTER_ADDR": self.address,
            "MASTER_PORT": values["master_port"],
            launch_contract.EXIT_RECORD: str(self._record),
            launch_contract.LAUNCH_ATTEMPT: values["round"],
            launch_contract.SUBMISSION: self._submission,
            launch_contract.STOP_SECONDS: f"{job.stop_seconds:.0f}",
            exec_command.RANK_PIPES: (
                "" if self._rank_pipes is None else str(self._rank_pipes.directory)
            ),
        }
        self.say(
            f"attempt {start.attempt} of {job.run} on {self.host} (node {self.rank} of"
            f" {job.nodes}): {argv}"
        )
        reader, writer = os.pipe()
        script = [
            sys.executable,
            "-I",
            "-S",
            os.path.abspath(exec_command.__file__),
            str(os.getpid()),
        ]
        self._command = subprocess.Popen(
            [*script, job.working_directory or "", job.profile_script or "", *argv],
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
        """Create pipes that prefix lines with ranks; None where the command starts no ranks so, or
        on failure."""
        if not prefixes_ranks(self.job.command):
            return None
        try:
            count = self.job.processes_per_node
            return RankPipes(
                self._directory, self.rank, count, self._log, self._passed_on, self._redactor
            )
        except OSError as error:
            self.say(f"lines are not prefixed with their ranks: {error}")
            return None

    def stop(self, stop: StopMessage) -> None:
        """Send the command a signal, once; kill what is left of it after the shortest grace period
        of all calls.

        `why`: a fault of its own is the reason, and its end counts as a failure of the command.
        `elsewhere`: another node's failure is the reason, which is written next to its exit record.
        """
        if self._command is None:
            return
        if self._returncode is None:
            if self._kill_at is None:
                if stop.elsewhere is not None:
                    self.say(
                        f"{signal.Signals(stop.signal).name} to the command:"
                        f" {stop.elsewhere.reason}"
                    )
                    launch_contract.write_failure_elsewhere(self._record, stop.elsewhere)
                self._command.send_signal(stop.signal)
            self._asked = self._asked or stop.why is None
            self._why = self._why or stop.why
        kill_at = time.monotonic() + stop.grace_seconds
        self._kill_at = kill_at if self._kill_at is None else min(self._kill_at, kill_at)

    def kill(self, why: str | None = None) -> None:
        """SIGKILL everything of the attempt, from the next `tick` on until nothing is left; `why`:
        the reason of its end, also where the reaper was quicker."""
        self.stop(StopMessage(signal.SIGKILL, 0.0, why))
        self._why = self._why or why

    def tick(self) -> list[dict[str, Any]]:
        """Check whether the command ended, and kill what is due; returns the report of its end,
        once, when nothing is left."""
        if self._command is None:
            return []
        self._returncode = self._command.poll()
        due = self._kill_at is not None and time.monotonic() >= self._kill_at
        if self._returncode is None and not due:
            return []
        left = kill_marked_processes(self.token, AGENT_MARK)
        if self._returncode is None:
            # The command may have cleared its environment.
            self._command.kill()
        if self._give_up_at is None:
            self._give_up_at = time.monotonic() + _SECONDS_TO_END
        given_up = time.monotonic() >= self._give_up_at
        if (left or self._returncode is None) and not given_up:
            return []
        return [self._finish(left)]

    def say(self, text: str) -> None:
        """Write one of the agent's own lines to the node's log."""
        for line in self._redactor.text(text).splitlines():
            self._log.put(stamped_line(f"=== {line}"))

    def _finish(self, left: list[int]) -> dict[str, Any]:
        wait_seconds = 0.2 if left else 2.0
        printed = self._pump.finish(wait_seconds).decode(errors="replace")
        if self._rank_pipes is not None:
            ranks = [
                tail.decode(errors="replace") for tail in self._rank_pipes.finish(wait_seconds)
            ]
            printed = exit_report.merged_rank_output(
                printed, ranks, self.rank * self.job.processes_per_node
            )
        why = self._why
        if left:
            why = (
                f"processes {left} do not end on SIGKILL: they wait in a device call; restart"
                f" {self.host}"
            )
        returncode = -int(signal.SIGKILL) if self._returncode is None else self._returncode
        record = state_file.read_json_object(self._record)
        if (safe := self._redactor.tree(record)) != record:
            # The workload wrote it, and may have written secrets.
            record = safe
            with contextlib.suppress(OSError):
                state_file.replace_file(self._record, json.dumps(record) + "\n")
        report = exit_report.make_report(
            self.rank, self.host, returncode, record, printed, self._asked, why
        )
        report["left"] = left
        self._command = None
        with contextlib.suppress(OSError):
            state_file.replace_file(self._exit, json.dumps(report, indent=2) + "\n")
        return report
