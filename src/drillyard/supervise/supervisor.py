"""The ranks of one host, over as many attempts as it takes: `supervise`.

An attempt is all ranks started together on a port of their own. When one fails, all are ended, the cause is reported,
and the next attempt resumes from the newest checkpoint, unless restart_policy.py refuses. Nothing of a failed attempt
is used again: elastic launchers lose time on reviving half-dead process groups.

Exit codes: 0 done (the summary is written, or every rank exited with 0); 2 a user's mistake; 85 stopped on request with
all saved, start it again; 1 stopped on request, and that moment could not be saved; 128 + N ended by signal N, at once
or with an error on the way to a stop; else that of the rank that failed first (1 for an attempt that hung).
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drillyard.errors import UserError
from drillyard.supervise import cause, launch_contract
from drillyard.supervise.attempt import Attempt, AttemptPlan, AttemptResult, GracePeriods, RankExit
from drillyard.supervise.console_output import PlainOutput, TerminalOutput
from drillyard.supervise.launch_contract import EXIT_CHECKPOINTED, EXIT_NOT_SAVED, EXIT_USER_ERROR, record_exit
from drillyard.supervise.rank_process import ONE_NODE, NodePlacement, rank_environments
from drillyard.supervise.reaper import AGENT_MARK, SUPERVISOR_MARK, Reaper, end_marked_processes
from drillyard.supervise.restart_policy import AGAIN, AttemptFailure, RestartCounts, RestartLimits, after_failure
from drillyard.supervise.run_lock import exclusive_run_lock, open_logs
from drillyard.supervise.sockets import free_port
from drillyard.supervise.standby import Standby
from drillyard.supervise.stop_requests import StopRequests

if TYPE_CHECKING:
    from rich.console import Console

OnEvent = Callable[..., None]
_UNSAVED = (
    "error: stopped on request, but that moment could not be saved: earlier checkpoints are whole\n"
    "fix the cause given in checkpoint_failed of events.jsonl, then run the same command again"
)


def supervise(
    command: Sequence[str],
    *,
    num_ranks: int,
    run_directory: Path,
    max_restarts: int,
    environment: Mapping[str, str],
    on_event: OnEvent,
    console: Console,
    total_steps: int | None = None,
    grace: GracePeriods | None = None,
    before_start: Callable[[], bool] | None = None,
    standby: bool = False,
    node: NodePlacement = ONE_NODE,
) -> int:
    """Run `command` (an argv list) as `num_ranks` ranks on this host until the run is done or cannot
    continue; returns the exit code.

    Each rank gets this process's environment, `environment`, its place (RANK, WORLD_SIZE, LOCAL_RANK and
    LOCAL_WORLD_SIZE), a rendezvous (MASTER_ADDR, MASTER_PORT, new in each attempt), DRILLYARD_ROUND (the attempt: 0, 1,
    ...; from a launcher's number on where there is one) and DRILLYARD_SUPERVISED=1. `on_event(name, **fields)` gets the
    supervisor's events of telemetry/events.py. `before_start` is called once no other supervisor can be active in the
    run directory; when it returns False there is nothing to do, and the exit code is 0. With `standby`, `command` must
    call `standby.await_turn`, and the ranks of a further attempt are ready before it is needed. `node`: this host is
    one of several; `max_restarts` is 0 then. Call `supervise` from the main thread: signals are read there, and ranks
    end with the thread that started them.

    Raises UserError when the run directory cannot be written, another run is active in it, or `command` cannot start.
    """
    assert node.count == 1 or (max_restarts == 0 and node.master_port is not None)
    with contextlib.ExitStack() as stack:
        lock = stack.enter_context(exclusive_run_lock(run_directory) if node.is_first else open_logs(run_directory))
        if before_start is not None and not before_start():
            return 0
        token = f"{os.getpid()}-{time.time_ns()}"
        if AGENT_MARK not in os.environ:
            # Else the agent's reaper reaches these processes too.
            stack.enter_context(Reaper(token, SUPERVISOR_MARK, keep_open=[lock]))
        requests = stack.enter_context(StopRequests())
        output: PlainOutput = (
            TerminalOutput(console, run_directory.name, total_steps)
            if console.is_terminal
            else PlainOutput(console.file)
        )
        stack.callback(output.close)
        limits = RestartLimits(max_restarts, option="--max-restarts")
        run = _Run(run_directory, on_event if node.is_first else None, output, limits, node.count > 1)
        used_ports: set[int] = set()
        shared = {**os.environ, **environment, SUPERVISOR_MARK: token}
        ready = Standby(command, rank_environments(shared, num_ranks, 0, node)) if standby else None
        if ready is not None:
            stack.enter_context(ready)
        launch = {} if (submission := launch_contract.submission()) is None else {"launch": submission}
        run.event("run_start", world_size=num_ranks * node.count, **launch)
        while True:
            shared["MASTER_PORT"] = str(node.master_port or _fresh_port(used_ports))
            plan = AttemptPlan(
                run.attempt,
                list(command),
                rank_environments(shared, num_ranks, run.attempt, node),
                run_directory,
                grace or GracePeriods(),
                first_rank=node.rank * num_ranks,
                standby=ready,
            )
            result = Attempt(plan, output, requests, on_stop=run.asked_to_stop).run()
            end_marked_processes(token, SUPERVISOR_MARK, spare=[] if ready is None else ready.pids)
            requests.take()
            code = run.after(result, requests.first)
            if code is not None:
                return code


def _fresh_port(used: set[int]) -> int:
    try:
        return free_port(used)
    except OSError as error:
        raise UserError(str(error)) from None


@dataclass(frozen=True)
class FailureCause:
    """Why an attempt failed: the rank that did first, how, and its last lines. `rank` is None when the attempt hung."""

    rank: int | None
    exit_code: int
    reason: str
    words: list[str]
    own_fault: bool = True
    """Whether it is no mere effect of another rank's end, on whichever node."""


def _unhandled_signal(failures: Sequence[RankExit]) -> signal.Signals | None:
    """The stop signal that ended a rank which did not handle it, or had handled one before; None without such."""
    asked = (end.returncode for end in failures if cause.was_asked_to_stop(end.returncode))
    code = next(asked, None)
    return None if code is None else signal.Signals(cause.exit_status(code) - 128)


@dataclass
class _Run:
    """The state of a run over its attempts, its events and its messages."""

    _directory: Path
    _on_event: OnEvent | None
    _output: PlainOutput
    _limits: RestartLimits
    _one_of_several: bool
    attempt: int = field(default_factory=launch_contract.first_attempt)
    _counts: RestartCounts = field(default_factory=RestartCounts)
    _oom_kills: int = field(default_factory=cause.oom_kills)
    _elsewhere: launch_contract.FailureElsewhere | None = None

    def event(self, name: str, **fields: Any) -> None:
        """Write an event, on node 0. A full or read-only disk is reported and never ends the run."""
        if self._on_event is None:
            return
        try:
            self._on_event(name, round=self.attempt, **fields)
        except UserError as error:
            self._output.say(str(error))

    def asked_to_stop(self, number: signal.Signals) -> None:
        """A stop signal has come: of a person or scheduler, or of a launcher because another node has failed."""
        self._elsewhere = other = launch_contract.failure_elsewhere()
        if other is None:
            self.event("signal", signal=number.name)
            return
        self.event("failure", reason=other.reason, failed_rank=other.rank, exit_code=other.exit_code)
        self._output.say(f"another node ends this attempt: {other.reason}")

    def after(self, result: AttemptResult, late_signal: signal.Signals | None) -> int | None:
        """The exit code of the run after this attempt; None: another one follows, and `attempt` is its number."""
        for line in result.left_behind:
            self._output.say(line)
        if result.summary_written:
            return 0
        if result.forced:
            assert result.stop_signal is not None
            return self._end("interrupted", "ended at once, as asked", 128 + result.stop_signal)
        if not result.left_behind and all(end.returncode == 0 for end in result.exits):
            return 0
        if any(end.returncode == EXIT_USER_ERROR for end in result.exits):
            return self._user_error(result)
        failures = [end for end in result.exits if end.returncode != 0 and not end.asked]
        stop = result.stop_signal or late_signal or _unhandled_signal(failures)
        unsaved = next((end for end in failures if end.returncode == EXIT_NOT_SAVED), None)
        if unsaved is not None:
            # Its message may be missing on the very disk that took no checkpoint.
            self._output.error(cause.user_message(result.log_of(unsaved.rank)) or _UNSAVED)
            self.event("end", status="interrupted" if self._elsewhere is None else "failed", exit_code=1)
            return 1
        if failures and failures[0].returncode == EXIT_CHECKPOINTED:
            where = " from the newest checkpoint" if result.last_step is not None else ""
            text = f"stopped on request; the same command goes on{where} (exit code 85)"
            return self._end("interrupted", text, EXIT_CHECKPOINTED)
        if stop is not None:
            return self._stopped(stop, result, failures)
        return self._after_failure(result, self._why(result, failures))

    def _stopped(self, stop: signal.Signals, result: AttemptResult, failures: Sequence[RankExit]) -> int:
        """The ranks were asked to stop, and not all of them have reported a checkpoint."""
        if result.stop_signal is None:
            self.asked_to_stop(stop)
        if result.last_step is None:
            text = "stopped before the first step of this attempt: nothing is lost, the same command starts again"
            return self._end("interrupted", f"{text} (exit code 85)", EXIT_CHECKPOINTED)
        if result.hung or any(not cause.was_asked_to_stop(end.returncode) for end in failures):
            self._report_failure(result, self._why(result, failures))
        text = f"stopped by {stop.name} without a checkpoint of this moment"
        return self._end("interrupted", text, 128 + stop)

    def _after_failure(self, result: AttemptResult, why: FailureCause) -> int | None:
        self._report_failure(result, why)
        failure = AttemptFailure(why.exit_code, result.last_step, cause.error_line(why.words))
        decision = after_failure(failure, self._counts, self._limits)
        self._counts = decision.counts
        if decision.what != AGAIN or result.left_behind:
            further = f"no further attempt: {decision.reason}"
            if result.left_behind:
                # It still holds its device, and what it waits for (a disk, a driver) would hold the next one as well.
                further = f"no further attempt: {result.left_behind[0]}; fix what it waits for, or restart this host"
            elif self._one_of_several:
                further = "this node's part ends: whatever started the nodes must start all of them again"
            return self._end("failed", f"{further}. All output is in {self._directory / 'logs'}", why.exit_code)
        self.attempt += 1
        self.event("restart", reason=why.reason)
        self._oom_kills = cause.oom_kills()
        self._output.say(
            f"all ranks ended within {result.seconds_to_end:.1f} s; attempt {self.attempt} starts "
            f"({self._counts.failures} of {self._limits.max_failures} restarts used)"
        )
        return None

    def _report_failure(self, result: AttemptResult, why: FailureCause) -> None:
        if self._elsewhere is None or why.own_fault:
            # Else it is the effect of a failure that has its event already.
            about = {"reason": why.reason, "failed_rank": why.rank, "exit_code": why.exit_code}
            self.event("failure", step=result.last_step, **about)
        where = "before its first step" if result.last_step is None else f"after step {result.last_step}"
        self._output.say(f"attempt {self.attempt} failed {where}: {why.reason}")
        record_exit(
            rank=why.rank,
            exit_code=why.exit_code,
            reason=why.reason,
            lines=why.words,
            lost_peer=not why.own_fault,
            step=result.last_step,
        )
        for line in [*why.words, *self._stacks(result)]:
            self._output.say(f"  {line}")

    def _end(self, status: str, text: str, code: int) -> int:
        if self._elsewhere is not None:
            status, text = "failed", f"this node's part ended with exit code {code}, as another node had failed"
        self._output.say(text)
        self.event("end", status=status, exit_code=code)
        return code

    def _user_error(self, result: AttemptResult) -> int:
        """Show a rank's message to the user once, whichever and however many ranks it comes from."""
        mistaken = [end for end in result.exits if end.returncode == EXIT_USER_ERROR]
        texts = [result.log_of(end.rank) for end in mistaken]
        message = next((found for text in texts if (found := cause.user_message(text))), None)
        message = message or "\n".join(cause.last_words(texts[0]))
        self._output.error(message)
        reason = message.partition("\n")[0].removeprefix("error: ") or "refused"
        record_exit(rank=mistaken[0].rank, exit_code=EXIT_USER_ERROR, reason=reason, lines=message.splitlines())
        self.event("end", status="failed", exit_code=EXIT_USER_ERROR)
        return EXIT_USER_ERROR

    def _why(self, result: AttemptResult, failures: Sequence[RankExit]) -> FailureCause:
        """The first failed rank in time that does not merely report another's end; else the first.

        A rank that got SIGTERM meanwhile may still have died of its own error, where its code is not a signal's.
        """
        if result.hung:
            reason = f"no progress on any rank within the watchdog's time; stacks are in {self._directory / 'logs'}"
            return FailureCause(None, 1, reason, [])
        suspects = [*failures, *(end for end in result.exits if end.asked and 0 < end.returncode < 128)]
        ends = [(end, cause.last_words(result.log_of(end.rank))) for end in suspects]
        own_fault = [
            (end, words)
            for end, words in ends
            if cause.was_killed(end.returncode) or not cause.speaks_of_lost_peer(words)
        ]
        end, words = (own_fault or ends)[0]
        reason = f"rank {end.rank}: {cause.describe_exit(end.returncode)}"
        if cause.was_killed(end.returncode):
            # What it printed before was about its work.
            return FailureCause(end.rank, 137, f"{reason}; {cause.memory_verdict(end.pid, self._oom_kills)}", [])
        if line := cause.error_line(words):
            reason += f"; {line}"
        if advice := cause.memory_advice(words):
            reason += f"; {advice}"
        if result.silent:
            reason += f"; it waited for {result.silent[0]}"
        return FailureCause(end.rank, cause.exit_status(end.returncode), reason, words, bool(own_fault))

    def _stacks(self, result: AttemptResult) -> list[str]:
        """A line per rank that was silent when the attempt was given up: its state, and the line of code it was at."""
        lines = []
        for line in result.silent:
            frame = cause.innermost_frame(result.log_of(int(line.split()[1].rstrip(":"))))
            lines.append(f"{line}; at {frame}" if frame else line)
        return lines
