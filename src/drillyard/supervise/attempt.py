"""One attempt: start the ranks, sleep until something happens, end them, and report how it went.

It sleeps in one `select` on the ranks' process descriptors, rank 0's output and the supervisor's
signals. The next delayed action is a single pending transition with its time; each new one replaces
the last:

    a rank fails         -> a moment for its peers' own errors -> SIGTERM to the rest -> SIGKILL to
                         all groups
    a rank ends well     -> the others finish; once the run has ended (summary, exit 85), within
                         `finish` -> SIGKILL
    a stop signal        -> forwarded, the ranks save and exit; a second request -> SIGKILL
    no heartbeat         -> request stack dumps, also of stopped ranks -> once more -> SIGTERM ->
                         SIGKILL
    SIGKILL              -> a rank that survives it, in a kernel call, is reported and left behind

When a rank exits with 85, the others are asked to stop as well. When a rank times out in a
collective, record what the others do, and request their stacks: one of them is the rank that it
waited for.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import selectors
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from drillyard.safe_files import close_quietly
from drillyard.supervise import cause
from drillyard.supervise.console_output import (
    LineForwarder,
    PlainOutput,
    attempt_header,
    log_path,
    open_log,
)
from drillyard.supervise.heartbeat import HeartbeatBoard
from drillyard.supervise.launch_contract import EXIT_CHECKPOINTED, EXIT_NOT_SAVED
from drillyard.supervise.rank_process import NodePlacement, Rank, Standby, silence, unkillable
from drillyard.supervise.stop_requests import (
    FORWARDED_AS,
    INSISTING_STACKS_SIGNAL,
    STACKS_SIGNAL,
    StopRequests,
)

_PIPE_BYTES = 1 << 20
_READ_PAUSE_SECONDS = 0.02
_STANDBY_LOOK_SECONDS = 1.0


@dataclass(frozen=True)
class GracePeriods:
    """Longest durations of the waits, in seconds."""

    settle: float = 0.2
    """After a rank's own error, before its peers are ended: one of them may report the cause
    better."""
    terminate: float = 0.5
    """From SIGTERM to SIGKILL after a crash. Nothing that a survivor could still do helps the next
    attempt."""
    finish: float = 60.0
    """For the other ranks once one has ended the run successfully."""
    watchdog: float | None = None
    """Without progress on any rank (heartbeat.py), an attempt counts as hung after this; None:
    never."""
    kill: float = 30.0
    """From SIGKILL until a remaining rank counts as unkillable. Freeing many GiB of memory takes
    seconds."""
    stacks: float = 1.0
    """For the stack dumps of a hung attempt; as long again for those of ranks that were asked
    twice."""


@dataclass(frozen=True)
class RankExit:
    """The end of one rank: its code (negative: a signal), and whether the supervisor had asked it
    to end."""

    rank: int
    returncode: int
    asked: bool


@dataclass
class AttemptResult:
    """Result of an attempt. `exits` are in order of time; `log_offsets`: where each rank's log of
    it begins."""

    run_directory: Path
    exits: list[RankExit] = field(default_factory=list)
    log_offsets: dict[int, int] = field(default_factory=dict)
    last_step: int | None = None
    summary_written: bool = False
    hung: bool = False
    silent: dict[int, str] = field(default_factory=dict)
    """Activity, in words, of each rank that others waited for when the attempt was given up."""
    left_behind: list[str] = field(default_factory=list)
    """Each rank that SIGKILL did not end, in words: a process in a kernel call ends only when the
    call returns."""
    stop_signal: signal.Signals | None = None
    forced: bool = False
    seconds_to_end: float = 0.0

    def log_of(self, rank: int) -> str:
        """The end of a rank's log of this attempt."""
        return cause.read_from(log_path(self.run_directory, rank), self.log_offsets[rank])


def rank_environments(
    shared: Mapping[str, str], num_ranks: int, attempt: int, node: NodePlacement
) -> list[dict[str, str]]:
    """The environment of each of a node's ranks, lowest rank first; `shared` has MASTER_PORT, one
    per attempt.

    `attempt`: 0, 1, ...; from a launcher's number on where there is one.
    """
    common = {
        **shared,
        "WORLD_SIZE": str(node.count * num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": node.master_addr,
        "DRILLYARD_ROUND": str(attempt),
        "DRILLYARD_SUPERVISED": "1",
        # Lines reach the log when they are printed, also the last ones before a rank is killed.
        "PYTHONUNBUFFERED": "1",
    }
    first = node.rank * num_ranks
    return [
        {**common, "RANK": str(first + local), "LOCAL_RANK": str(local)}
        for local in range(num_ranks)
    ]


@dataclass(kw_only=True)
class Attempt:
    """One attempt: `command` as `num_ranks` ranks, the lowest first; `run` returns when no rank is
    left.

    `environment`: shared by all ranks, see `rank_environments`. `standby`: processes that may be
    started ahead for this attempt; those for the next one start once it trains. `on_stop` is called
    at the first stop signal.
    """

    number: int
    command: Sequence[str]
    num_ranks: int
    environment: Mapping[str, str]
    node: NodePlacement
    run_directory: Path
    grace: GracePeriods
    standby: Standby | None
    output: PlainOutput
    requests: StopRequests
    on_stop: Callable[[signal.Signals], None]

    def __post_init__(self) -> None:
        self._result = AttemptResult(self.run_directory)
        self._ranks: list[Rank] = []
        self._selector = selectors.DefaultSelector()
        self._pending: tuple[float, Callable[[], None]] | None = None
        self._asked_to_end = False
        self._first_end: float | None = None
        self._resume_reading: float | None = None
        self._silent_since = time.monotonic()
        self._summary = self.run_directory / "summary.json"
        self._summary_before = file_stamp(self._summary)

    def run(self) -> AttemptResult:
        """Start the ranks and watch them until all have ended. Raises UserError when they cannot be
        started."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._selector.close)
            self._board = stack.enter_context(HeartbeatBoard(self.num_ranks))
            self._selector.register(self.requests, selectors.EVENT_READ, self._on_signal)
            try:
                self._start(stack)
                while self._running():
                    happened = self._sleep()
                    for action in happened:
                        if not isinstance(action, Rank):
                            action()
                    self._reap([rank for rank in happened if isinstance(rank, Rank)])
                    self._on_time()
            finally:
                for rank in self._running():
                    rank.kill_group()
                    rank.reap()
            self._drain()
            self.output.refresh(self._board.read()[0])
            trained = (
                beat.step for beat in self._board.read() if beat.trained and beat.step is not None
            )
            self._result.last_step = max(trained, default=None)
        self._result.summary_written = self._summary_written()
        if self._first_end is not None:
            self._result.seconds_to_end = time.monotonic() - self._first_end
        return self._result

    def _start(self, stack: contextlib.ExitStack) -> None:
        self._pipe, write_end = os.pipe()
        stack.callback(os.close, self._pipe)
        os.set_blocking(self._pipe, False)
        with contextlib.suppress(OSError):
            # Beyond this user's limit for pipes the default size works too, with more wake-ups.
            fcntl.fcntl(self._pipe, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        with contextlib.ExitStack() as ours:
            ours.callback(os.close, write_end)
            for environment in rank_environments(
                self.environment, self.num_ranks, self.number, self.node
            ):
                number, is_first = int(environment["RANK"]), not self._ranks
                header = attempt_header(self.number, number, int(environment["WORLD_SIZE"]))
                log, offset = open_log(log_path(self.run_directory, number), header)
                self._result.log_offsets[number] = offset
                if is_first:
                    stack.callback(close_quietly, log)
                    self._forwarder = LineForwarder(log, self.output)
                else:
                    ours.callback(close_quietly, log)
                complete = {**environment, **self._board.environment}
                rank = Rank(
                    self.command, complete, write_end if is_first else log, log, self.standby
                )
                self._ranks.append(rank)
                self._selector.register(rank.pidfd, selectors.EVENT_READ, rank)
        self._selector.register(self._pipe, selectors.EVENT_READ, self._on_output)

    def _summary_written(self) -> bool:
        """Whether this attempt wrote summary.json, the last thing that a run does."""
        return file_stamp(self._summary) not in (None, self._summary_before)

    def _sleep(self) -> list[Callable[[], None] | Rank]:
        """Wait for the next event or due time; returns the actions to call and the ranks that have
        ended."""
        started, wait = time.monotonic(), self._seconds_to_wait()
        happened = [key.data for key, _ in self._selector.select(wait)]
        watchdog = self.grace.watchdog
        if (
            watchdog is not None
            and wait is not None
            and time.monotonic() - started > wait + watchdog / 2
        ):
            # The supervisor itself was stopped, perhaps with the whole job: start counting silence
            # again.
            self._silent_since = time.monotonic()
        return happened

    def _hung_at(self) -> float | None:
        """Time at which the attempt will count as hung, unless a heartbeat comes before; None:
        never."""
        if self.grace.watchdog is None or self._asked_to_end:
            return None
        return (
            max([self._silent_since, *(heartbeat.at for heartbeat in self._board.read())])
            + self.grace.watchdog
        )

    def _seconds_to_wait(self) -> float | None:
        now, refresh_seconds = time.monotonic(), self.output.refresh_seconds
        moments = (
            None if self._pending is None else self._pending[0],
            self._resume_reading,
            self._hung_at(),
            None if refresh_seconds is None else now + refresh_seconds,
            None if self.standby is None else now + _STANDBY_LOOK_SECONDS,
        )
        first = min((moment for moment in moments if moment is not None), default=None)
        return None if first is None else max(0.0, first - now)

    def _on_time(self) -> None:
        now = time.monotonic()
        self.output.refresh(self._board.read()[0])
        if self._resume_reading is not None and now >= self._resume_reading:
            self._resume_reading = None
            self._selector.register(self._pipe, selectors.EVENT_READ, self._on_output)
        if self._pending is not None and now >= self._pending[0]:
            action, self._pending = self._pending[1], None
            action()
        if (hung_at := self._hung_at()) is not None and now >= hung_at:
            self._result.hung = True
            self._first_end = self._first_end or time.monotonic()
            self._ask_for_stacks()
        if (
            self.standby is not None
            and not self._asked_to_end
            and all(beat.trained for beat in self._board.read())
        ):
            if (reason := self.standby.start()) is not None:
                self.output.say(f"no standby ranks for a restart: {reason}")
            self.standby = None

    def _later(self, seconds: float, action: Callable[[], None]) -> None:
        self._pending = (time.monotonic() + seconds, action)

    def _reap(self, ended: list[Rank]) -> None:
        """Reap ranks that have ended. Of several at once, those ended by a signal count as first:
        the others follow."""
        exits = []
        for rank in ended:
            self._selector.unregister(rank.pidfd)
            exits.append(RankExit(rank.number, rank.reap(), self._asked_to_end))
        for end in sorted(exits, key=lambda end: (end.returncode >= 0, end.rank)):
            self._first_end = self._first_end or time.monotonic()
            self._result.exits.append(end)
            self._after_exit(end)

    def _after_exit(self, end: RankExit) -> None:
        if self._asked_to_end:
            return
        stopped = end.returncode in (EXIT_CHECKPOINTED, EXIT_NOT_SAVED)
        if stopped or self._summary_written():
            if self._pending is None:
                if stopped and self._result.stop_signal is None:
                    self._send(signal.SIGTERM)
                self._later(self.grace.finish, self._kill)
        elif end.returncode < 0 and not (
            end.returncode == -signal.SIGABRT and self._gave_up_waiting(end)
        ):
            self._terminate()
        elif end.returncode != 0 and self._pending is None:
            if self._gave_up_waiting(end):
                self._ask_for_stacks()
            else:
                self._later(self.grace.settle, self._terminate)

    def _gave_up_waiting(self, end: RankExit) -> bool:
        return cause.speaks_of_timeout(cause.last_words(self._result.log_of(end.rank)))

    def _running(self) -> list[Rank]:
        return [rank for rank in self._ranks if rank.returncode is None]

    def _send(self, number: signal.Signals) -> None:
        for rank in self._running():
            rank.send(number)

    def _terminate(self) -> None:
        self._asked_to_end = True
        self._send(signal.SIGTERM)
        self._later(self.grace.terminate, self._kill)

    def _kill(self) -> None:
        self._asked_to_end = True
        for rank in self._running():
            rank.kill_group()
        self._later(self.grace.kill, self._leave_behind)

    def _leave_behind(self) -> None:
        """Stop waiting for ranks that SIGKILL does not end: only the end of their kernel call could
        end them."""
        for rank in self._running():
            self._ranks.remove(rank)
            self._selector.unregister(rank.pidfd)
            self._result.left_behind.append(unkillable(rank.number, rank.pid))

    def _ask_for_stacks(self) -> None:
        """Record what the remaining ranks do, let them write their stacks, and then end them."""
        now, heartbeats = time.monotonic(), self._board.read()
        self._asked_to_end = True
        for rank in self._running():
            heartbeat = heartbeats[rank.number - self.node.rank * self.num_ranks]
            self._result.silent[rank.number] = silence(rank.number, rank.pid, heartbeat, now)
        self._send(STACKS_SIGNAL)
        # A stopped rank runs its handler only once it continues.
        self._send(signal.SIGCONT)
        self._later(self.grace.stacks, self._insist_on_stacks)

    def _insist_on_stacks(self) -> None:
        """Request stacks again from ranks that have not written them, in a way that does not need
        their interpreter."""
        silent = [
            rank
            for rank in self._running()
            if cause.innermost_frame(self._result.log_of(rank.number)) is None
        ]
        for rank in silent:
            rank.send(INSISTING_STACKS_SIGNAL)
        if silent:
            self._later(self.grace.stacks, self._terminate)
        else:
            self._terminate()

    def _on_signal(self) -> None:
        for number in self.requests.take():
            if self.requests.insisted:
                self._result.forced = True
                self._kill()
            elif self._result.stop_signal is None:
                self._result.stop_signal = number
                # Signal the ranks first: the terminal that gets the messages may be gone.
                self._send(FORWARDED_AS.get(number, number))
                self.on_stop(number)

    def _on_output(self) -> None:
        try:
            chunk = os.read(self._pipe, _PIPE_BYTES)
        except BlockingIOError:
            return
        if not chunk:
            self._selector.unregister(self._pipe)
            return
        self._forwarder.feed(chunk)
        if len(chunk) < _PIPE_BYTES // 2:
            # Let lines gather instead of waking up for each. A sleep would lose the order in which
            # ranks exit.
            self._selector.unregister(self._pipe)
            self._resume_reading = time.monotonic() + _READ_PAUSE_SECONDS

    def _drain(self) -> None:
        """Read what rank 0 wrote before its end, without waiting for others that may still hold its
        pipe."""
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(self._pipe, _PIPE_BYTES):
                self._forwarder.feed(chunk)
        self._forwarder.finish()


def file_stamp(path: Path) -> tuple[int, int, int] | None:
    """Return values that change with each version of a file; None without it. This host's clock is
    no substitute: on a network file system the times of files are another machine's."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size
