"""A rank's watch over itself: heartbeats for work done alone, and its own end where no supervisor watches.

A rank spends three kinds of time:

- strict: training. Only steps and forwards count; a rank that waits in a collective has no heartbeat;
- working: what takes long without steps (imports, tokenising, loading, compiling, saving, exporting). The process's
  own work counts: a twentieth of a core, or 1 MB/s read or written, since the last look. (A GPU rank may spin in a
  collective; there the collective timeout is the limit.)
- waiting: for another rank, which is watched itself.

Under a supervisor this thread only sends heartbeats (attempt.py). Without one, as under torchrun, a rank without
progress for `watchdog_seconds` writes the stacks of its threads to logs/rank-N.log and exits with 1, so that its
launcher restarts all ranks. One that is asked to stop, as another gave up waiting for it, writes its stacks too. Should
a thread hold the interpreter's lock, another process ends the rank (watchdog_process.py). Time in which the rank was
suspended does not count.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Literal

from drillyard.supervise import watchdog_process
from drillyard.supervise.heartbeat import HeartbeatWriter

Kind = Literal["strict", "working", "waiting"]

_LEAST_CORES = 0.05
_LEAST_BYTES_PER_SECOND = 1e6
_LONGEST_TICK_SECONDS = 5.0
_SECONDS_TO_STOP = 5.0
"""Without progress for so long after a stop signal, a rank without a supervisor writes its stacks."""


class ProgressMonitor:
    """What this rank is doing, and whether it makes progress. `judge_seconds`: end it after this long; 0: never."""

    def __init__(
        self, signs: HeartbeatWriter, tick_seconds: float, judge_seconds: float, on_hang: Callable[[str, bool], IO[str]]
    ):
        """`on_hang(message, ends)` reports a hang, which may end this rank, and returns the file for its stacks."""
        self.signs = signs
        self._kind: Kind = "working"
        self._tick_seconds = tick_seconds
        self._judge_seconds = judge_seconds
        self._on_hang = on_hang
        self._asked_at: float | None = None
        self._watchdog = _Watchdog(judge_seconds + 10 * tick_seconds, tick_seconds) if judge_seconds else None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    def begin(self, phase: str, kind: Kind) -> None:
        """A new phase begins and lasts until the next."""
        self._kind = kind
        self.signs.begin(phase)

    @contextlib.contextmanager
    def during(self, phase: str, kind: Kind = "working") -> Iterator[None]:
        """A phase within another, which continues afterwards."""
        outer, outer_kind = self.signs.last().phase, self._kind
        self.begin(phase, kind)
        try:
            yield
        finally:
            self.begin(outer, outer_kind)

    def asked_to_stop(self) -> None:
        """A stop signal was noted: this rank should now finish its step."""
        self._asked_at = time.monotonic()

    def close(self) -> None:
        """Stop watching: the rank is about to exit."""
        self._closed.set()
        self._thread.join()
        if self._watchdog is not None:
            self._watchdog.close()

    def _run(self) -> None:
        looked = time.monotonic()
        work = work_done()
        while not self._closed.wait(self._tick_seconds):
            now = time.monotonic()
            if now - looked > 3 * self._tick_seconds + 1:
                # This process was stopped meanwhile, or starved: that it did no work says nothing.
                self.signs.show()
            elif self._kind == "working":
                before, work = work, work_done()
                if did_work(before, work, now - looked):
                    self.signs.show()
            looked = now
            if self._watchdog is not None:
                self._watchdog.notify()
                self._judge(now)

    def _judge(self, now: float) -> None:
        last = self.signs.last()
        where = f"({last.phase}, after step {last.step or 0})"
        if self._asked_at is not None and now - max(self._asked_at, last.at) > _SECONDS_TO_STOP:
            self._asked_at = None
            self._write_stacks(f"asked to stop, and no progress {where}: this is where the rank is", ends=False)
        if self._kind != "waiting" and now - last.at > self._judge_seconds:
            self._write_stacks(
                f"watchdog: no progress for {now - last.at:.0f} s {where}: this rank ends; the limit is "
                "timeouts.watchdog_seconds",
                ends=True,
            )
            os._exit(1)

    def _write_stacks(self, message: str, *, ends: bool) -> None:
        file = self._on_hang(message, ends)
        faulthandler.dump_traceback(file=file, all_threads=True)
        file.flush()


class _Watchdog:
    """The process that ends this one after `limit_seconds` without a `notify`."""

    def __init__(self, limit_seconds: float, tick_seconds: float) -> None:
        read_end, self._write_end = os.pipe()
        os.set_blocking(self._write_end, False)
        script = str(Path(watchdog_process.__file__))
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", script, str(os.getpid()), str(limit_seconds), str(tick_seconds)],
            stdin=read_end,
            stdout=subprocess.DEVNULL,
        )
        os.close(read_end)

    def notify(self) -> None:
        """This process runs Python."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            os.write(self._write_end, b".")

    def close(self) -> None:
        """End it."""
        os.close(self._write_end)
        self._process.kill()
        self._process.wait()


def work_done() -> tuple[float, int]:
    """CPU seconds of this process and its ended children, and bytes that it has read and written, files or sockets."""
    times = os.times()
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return sum(times[:4]), int(counts["rchar"]) + int(counts["wchar"])


def did_work(before: tuple[float, int], after: tuple[float, int], seconds: float) -> bool:
    """Whether a process worked between two looks at `work_done`, `seconds` apart."""
    cores = (after[0] - before[0]) / seconds
    return cores >= _LEAST_CORES or (after[1] - before[1]) / seconds >= _LEAST_BYTES_PER_SECOND


def tick_seconds(watchdog_seconds: float) -> float:
    """How often a rank checks itself: 20 times within the limit, and at least every 5 s."""
    return min(_LONGEST_TICK_SECONDS, max(0.05, watchdog_seconds / 20)) if watchdog_seconds else _LONGEST_TICK_SECONDS


def stacks_file(run_directory: Path, rank: int, message: str) -> IO[str]:
    """Where a rank without a supervisor puts its stacks: logs/rank-N.log, or standard error if that cannot be."""
    print(f"[rank {rank}] {message}", file=sys.stderr, flush=True)
    path = run_directory / "logs" / f"rank-{rank}.log"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(path, "a", encoding="utf-8")  # noqa: SIM115 (the process ends with it)
        file.write(f"{message}\n")
        file.flush()
    except OSError:
        return sys.stderr
    print(f"[rank {rank}] watchdog: stacks are in {path}", file=sys.stderr, flush=True)
    return file
