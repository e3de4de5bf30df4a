"""Supervisor of one host's ranks over all attempts: `supervise`, and `supervise_training` for a run
config.

An attempt is all ranks started together on a port of their own. When one fails, all are ended, the
cause is reported, and the next attempt resumes from the newest checkpoint, unless restart_policy.py
refuses. Nothing of a failed attempt is reused: elastic launchers lose time on reviving half-dead
process groups.

Exit codes: 0 done (the summary is written, or every rank exited with 0); 2 a user's mistake; 85
stopped on request with all saved, start it again; 1 stopped on request, and that moment could not
be saved; 128 + N ended by signal N, at once or with an error on the way to a stop; else that of the
rank that failed first (1 for an attempt that hung).
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drillyard.errors import UserError
from drillyard.reporting.summary import required_failure
from drillyard.supervise import cause, launch_contract, reaper
from drillyard.supervise.attempt import (
    Attempt,
    AttemptResult,
    GracePeriods,
    RankExit,
    rank_environments,
)
from drillyard.supervise.console_output import MESSAGES, PlainOutput, TerminalOutput
from drillyard.supervise.launch_contract import (
    EXIT_CHECKPOINTED,
    EXIT_NOT_SAVED,
    EXIT_USER_ERROR,
    ExitRecord,
)
from drillyard.supervise.rank_process import ONE_NODE, NodePlacement, Standby
from drillyard.supervise.reaper import (
    AGENT_MARK,
    SUPERVISOR_MARK,
    ParentWatcher,
    end_marked_processes,
)
from drillyard.supervise.restart_policy import (
    AGAIN,
    AttemptFailure,
    RestartCounts,
    RestartLimits,
    after_failure,
)
from drillyard.supervise.scheduler_restarts import reason_to_end
from drillyard.supervise.sockets import free_port
from drillyard.supervise.stop_requests import SECONDS_OF_ONE_REQUEST, StopRequests
from drillyard.telemetry.events import EventName, append_event, read_events

if TYPE_CHECKING:
    from rich.console import Console

    from drillyard.config.run import RunConfig

CORES_FOR_STANDBY = 4
"""Cores per rank of a host with which a process that imports meanwhile does not slow a rank
down."""

_UNSAVED = (
    "error: stopped on request, but that moment could not be saved: earlier checkpoints are whole\n"
    "fix the cause given in checkpoint_failed of events.jsonl, then run the same command again"
)


def supervise_training(
    command: Sequence[str],
    run: RunConfig,
    *,
    num_ranks: int,
    lock: int,
    max_restarts: int,
    standby: bool | None = None,
    node: NodePlacement = ONE_NODE,
) -> int:
    """Train `run` with `num_ranks` processes of `command` on this host; returns the exit code of
    `supervise`.

    `lock`, `node`: see `supervise`. `standby`: keep ranks ready for a restart; None: where the host
    is the only one and has `CORES_FOR_STANDBY` cores per rank. Raises UserError.
    """
    from drillyard.console import SafeConsole

    if standby is None:
        standby = node.count == 1 and (os.cpu_count() or 1) >= CORES_FOR_STANDBY * num_ranks
    return supervise(
        command,
        num_ranks=num_ranks,
        run_directory=Path(run.output) / run.name,
        lock=lock,
        max_restarts=max_restarts,
        environment={"OMP_NUM_THREADS": str(threads_per_rank(run, num_ranks))},
        console=SafeConsole(),
        total_steps=run.training.steps,
        grace=GracePeriods(watchdog=run.timeouts.watchdog_seconds or None),
        standby=standby,
        node=node,
    )


def required_metrics_code(run: RunConfig) -> int:
    """Return a completed run's exit code: 1, with the failure reported, if a required metric is
    missing; else 0."""
    if (
        not run.evaluation.required
        or (failure := required_failure(Path(run.output) / run.name)) is None
    ):
        return 0
    MESSAGES.error(f"error: {failure}")
    # The model is complete: a restart would not measure it.
    lines = failure.splitlines()
    ExitRecord(None, 1, lines[0], lines, final=True).write()
    return 1


def is_started(run_directory: Path) -> bool:
    """Whether the submission that started this process has begun the run in a directory: attempts
    and requeues of one submission are one run, as a supervisor's own attempts are."""
    submission = launch_contract.submission()
    return submission is not None and any(
        event["event"] == "run_start" and event.get("launch") == submission
        for event in read_events(run_directory)
    )


def threads_per_rank(run: RunConfig, num_ranks: int) -> int:
    """CPU threads of each rank: as configured, or the host's cores shared among its ranks."""
    return run.training.threads_per_rank or max(1, (os.cpu_count() or 1) // num_ranks)


def supervise(
    command: Sequence[str],
    *,
    num_ranks: int,
    run_directory: Path,
    lock: int,
    max_restarts: int,
    environment: Mapping[str, str],
    console: Console,
    total_steps: int | None = None,
    grace: GracePeriods | None = None,
    standby: bool = False,
    node: NodePlacement = ONE_NODE,
    trains: bool = True,
) -> int:
    """Run `command` (an argv list) as `num_ranks` ranks on this host until the run is done or
    cannot continue; returns the exit code. Call it from the main thread: signals are read there,
    and ranks end with the thread that starts them.

    `lock`: a descriptor on which the caller holds the run lock (on nodes after the first, the lock
    of the run's logs/); the reaper inherits it. Each rank gets this process's environment,
    `environment`, and the variables of `rank_environments`. With `standby`, the ranks of a further
    attempt are ready before it is needed; their `command` must call `rank_process.await_turn`.
    `node`: this host is one of several; `max_restarts` is 0 then. Without `trains`, as for `eval`
    and `bench`, no events are written, and ranks that are stopped save nothing.

    Raises UserError when the run directory cannot be written or `command` cannot start.
    """
    assert node.count == 1 or (max_restarts == 0 and node.master_port is not None)
    with contextlib.ExitStack() as stack:
        token = f"{os.getpid()}-{time.time_ns()}"
        if AGENT_MARK not in os.environ:
            # Else the agent's reaper reaches these processes too.
            stack.callback(
                ParentWatcher(reaper.__file__, token, SUPERVISOR_MARK, keep_open=[lock]).close
            )
        requests = stack.enter_context(StopRequests())
        output: PlainOutput = (
            TerminalOutput(console, run_directory.name, total_steps)
            if console.is_terminal
            else PlainOutput(console.file)
        )
        stack.callback(output.close)
        limits = RestartLimits(max_restarts, option="--max-restarts")
        run = _Run(run_directory, trains and node.is_first, output, limits, node.count > 1, trains)
        used_ports: set[int] = set()
        shared = {**os.environ, **environment, SUPERVISOR_MARK: token}
        environments = rank_environments(shared, num_ranks, 0, node)
        ready = stack.enter_context(Standby(command, environments)) if standby else None
        run.event(
            "run_start", world_size=num_ranks * node.count, launch=launch_contract.submission()
        )
        while True:
            try:
                shared["MASTER_PORT"] = str(node.master_port or free_port(used_ports))
            except OSError as error:
                raise UserError(str(error)) from None
            attempt = Attempt(
                number=run.attempt,
                command=command,
                num_ranks=num_ranks,
                environment=shared,
                node=node,
                run_directory=run_directory,
                grace=grace or GracePeriods(),
                standby=ready,
                output=output,
                requests=requests,
                on_stop=run.asked_to_stop,
            )
            result = attempt.run()
            end_marked_processes(token, SUPERVISOR_MARK, spare=[] if ready is None else ready.pids)
            requests.take()
            if (code := run.after(result, requests.first)) is not None:
                return code


@dataclass
class _Run:
    """The state of a run over its attempts, its events and its messages."""

    _directory: Path
    _writes_events: bool
    _output: PlainOutput
    _limits: RestartLimits
    _one_of_several: bool
    _trains: bool = True
    attempt: int = field(default_factory=launch_contract.first_attempt)
    _counts: RestartCounts = field(default_factory=RestartCounts)
    _oom_kills: int = field(default_factory=cause.oom_kills)
    _elsewhere: launch_contract.FailureElsewhere | None = None

    def event(self, name: EventName, **fields: Any) -> None:
        """Write an event, on node 0, while this start has the run directory. A full or read-only
        disk is reported and never ends the run."""
        if self._writes_events and (reason := reason_to_end(self._directory)) is not None:
            self._writes_events = False
            self._output.say(reason)
        try:
            if self._writes_events:
                append_event(self._directory, name, round=self.attempt, **fields)
        except UserError as error:
            self._output.say(str(error))

    def asked_to_stop(self, number: signal.Signals) -> None:
        """Record a stop signal, and say what the ranks do now."""
        self._record_stop(number)
        will = "finish their step, save and stop" if self._trains else "stop"
        self._output.say(
            f"{number.name}: the ranks will {will}; another signal, {SECONDS_OF_ONE_REQUEST:.0f} s"
            " from now or later, ends them at once"
        )

    def _record_stop(self, number: signal.Signals) -> None:
        """Record a stop signal: of a person or scheduler, or of a launcher because another node has
        failed."""
        self._elsewhere = other = launch_contract.failure_elsewhere()
        if other is None:
            self.event("signal", signal=number.name)
            return
        self.event(
            "failure", reason=other.reason, failed_rank=other.rank, exit_code=other.exit_code
        )
        self._output.say(f"another node ends this attempt: {other.reason}")

    def after(self, result: AttemptResult, late_signal: signal.Signals | None) -> int | None:
        """Return the run's exit code after this attempt; None: another one follows, and `attempt`
        is its number."""
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
        unhandled = filter(None, (cause.stop_signal(end.returncode) for end in failures))
        stop = result.stop_signal or late_signal or next(unhandled, None)
        unsaved = next((end for end in failures if end.returncode == EXIT_NOT_SAVED), None)
        if unsaved is not None:
            # Its message may be missing on the disk that took no checkpoint.
            self._output.error(cause.user_message(result.log_of(unsaved.rank)) or _UNSAVED)
            self.event(
                "end", status="interrupted" if self._elsewhere is None else "failed", exit_code=1
            )
            return 1
        if failures and failures[0].returncode == EXIT_CHECKPOINTED:
            where = " from the newest checkpoint" if result.last_step is not None else ""
            text = f"stopped on request; the same command goes on{where} (exit code 85)"
            return self._end("interrupted", text, EXIT_CHECKPOINTED)
        if stop is not None:
            return self._stopped(stop, result, failures)
        return self._after_failure(result, self._why(result, failures))

    def _stopped(
        self, stop: signal.Signals, result: AttemptResult, failures: Sequence[RankExit]
    ) -> int:
        """End a run whose ranks were asked to stop and have not all reported a checkpoint."""
        if result.stop_signal is None:
            self._record_stop(stop)
        if not self._trains:
            return self._end("interrupted", f"stopped by {stop.name}", 128 + stop)
        if result.last_step is None:
            text = (
                "stopped before the first step of this attempt: nothing is lost, the same command"
                " starts again"
            )
            return self._end("interrupted", f"{text} (exit code 85)", EXIT_CHECKPOINTED)
        if result.hung or any(cause.stop_signal(end.returncode) is None for end in failures):
            self._report_failure(result, self._why(result, failures))
        text = f"stopped by {stop.name} without a checkpoint of this moment"
        return self._end("interrupted", text, 128 + stop)

    def _after_failure(self, result: AttemptResult, why: ExitRecord) -> int | None:
        self._report_failure(result, why)
        failure = AttemptFailure(why.exit_code, why.step, cause.error_line(why.lines))
        decision = after_failure(failure, self._counts, self._limits)
        self._counts = decision.counts
        if decision.what != AGAIN or result.left_behind:
            further = f"no further attempt: {decision.reason}"
            if result.left_behind:
                # It still holds its device, and what it waits for (a disk, a driver) would block
                # the next one too.
                further = (
                    f"no further attempt: {result.left_behind[0]}; fix what it waits for, or"
                    " restart this host"
                )
            elif self._one_of_several:
                further = (
                    "this node's part ends: whatever started the nodes must start all of them again"
                )
            return self._end(
                "failed", f"{further}. All output is in {self._directory / 'logs'}", why.exit_code
            )
        self.attempt += 1
        self.event("restart", reason=why.reason)
        self._oom_kills = cause.oom_kills()
        self._output.say(
            f"all ranks ended within {result.seconds_to_end:.1f} s; attempt {self.attempt} starts "
            f"({self._counts.failures} of {self._limits.max_failures} restarts used)"
        )
        return None

    def _report_failure(self, result: AttemptResult, why: ExitRecord) -> None:
        if self._elsewhere is None or not why.lost_peer:
            # Else it is the effect of a failure that already has its event.
            self.event(
                "failure",
                step=why.step,
                reason=why.reason,
                failed_rank=why.rank,
                exit_code=why.exit_code,
            )
        where = "before its first step" if why.step is None else f"after step {why.step}"
        self._output.say(f"attempt {self.attempt} failed {where}: {why.reason}")
        why.write()
        for line in why.lines:
            self._output.say(f"  {line}")
        for rank, line in result.silent.items():
            frame = cause.innermost_frame(result.log_of(rank))
            self._output.say(f"  {line}; at {frame}" if frame else f"  {line}")

    def _end(self, status: str, text: str, code: int) -> int:
        if self._elsewhere is not None:
            status, text = (
                "failed",
                f"this node's part ended with exit code {code}, as another node had failed",
            )
        self._output.say(text)
        self.event("end", status=status, exit_code=code)
        return code

    def _user_error(self, result: AttemptResult) -> int:
        """Show a rank's message to the user once, however many ranks it comes from."""
        mistaken = [end for end in result.exits if end.returncode == EXIT_USER_ERROR]
        texts = [result.log_of(end.rank) for end in mistaken]
        message = next(filter(None, map(cause.user_message, texts)), None) or "\n".join(
            cause.last_words(texts[0])
        )
        self._output.error(message)
        reason = message.partition("\n")[0].removeprefix("error: ") or "refused"
        ExitRecord(mistaken[0].rank, EXIT_USER_ERROR, reason, message.splitlines()).write()
        self.event("end", status="failed", exit_code=EXIT_USER_ERROR)
        return EXIT_USER_ERROR

    def _why(self, result: AttemptResult, failures: Sequence[RankExit]) -> ExitRecord:
        """Choose the first failed rank in time that does not merely report another's end; else the
        first.

        A rank that got SIGTERM meanwhile may still have died of its own error, where its code is
        not a signal's.
        """
        if result.hung:
            reason = (
                "no progress on any rank within the watchdog's time; stacks are in"
                f" {self._directory / 'logs'}"
            )
            return ExitRecord(None, 1, reason, step=result.last_step)
        suspects = [
            *failures,
            *(end for end in result.exits if end.asked and 0 < end.returncode < 128),
        ]
        ends = [(end, cause.last_words(result.log_of(end.rank))) for end in suspects]
        own_fault = [
            (end, words)
            for end, words in ends
            if cause.was_killed(end.returncode) or not cause.speaks_of_lost_peer(words)
        ]
        end, words = (own_fault or ends)[0]
        reason = cause.exit_reason(end.rank, end.returncode, words)
        if cause.was_killed(end.returncode):
            reason += f"; {cause.memory_verdict(self._oom_kills)}"
            return ExitRecord(end.rank, 137, reason, step=result.last_step)
        if advice := cause.memory_advice(words):
            reason += f"; {advice}"
        if result.silent:
            reason += f"; it waited for {next(iter(result.silent.values()))}"
        code = cause.exit_status(end.returncode)
        return ExitRecord(
            end.rank, code, reason, words, lost_peer=not own_fault, step=result.last_step
        )
