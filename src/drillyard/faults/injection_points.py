"""Where faults strike: functions of the trainer that a rank replaces by its own before it begins.

Each place wraps the function whose work it means, and strikes from inside: before it, after it, or in the middle of
its own system calls. A function that is not there any more is an error at once (`replace`), so a place cannot silently
cease to exist. A mark is written before every strike; a fault without its mark counts as not hit.

    place            replaced                              the process is struck
    step, resume     Trainer.train_step, run.run_rank      by a timer, at a drawn part of the median step or second
    shards           _HashingStream._write_now             with half of a shard's bytes written
    before-manifest  storage.write_manifest                with all shards durable
    manifest         manifest.write_durably                with half of the manifest's bytes written
    deletion         checkpointer.remove_checkpoint        with the manifest and a drawn part of the files deleted
    cache            cache._PartWriter, _write_manifest    with the cache built in part, or without its manifest
    export           export._finish, _publish              with the weights written, or all of it but not in place

Where another process than this one is struck, this one goes no further, so that the run dies at the place and not
somewhat later.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from drillyard.faults.disturbed_run import MARK_VARIABLE, is_marked
from drillyard.faults.full_disk import fill_disk
from drillyard.faults.mark_files import FaultSettings, MarkFiles
from drillyard.faults.monkeypatch import patch_function, step_of
from drillyard.faults.plan import Fault
from drillyard.training.checkpoint.inventory import CheckpointInfo, list_checkpoints_in
from drillyard.training.checkpoint.manifest import MANIFEST_NAME

_SIGNALS = {"kill": signal.SIGKILL, "flip": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM}
_CHECKPOINT = "drillyard.training.checkpoint"


def install_faults(marks: MarkFiles, rank: int) -> None:
    """Replace what this rank's faults of this round need. Raises AttributeError where a place has ceased to exist."""
    marks.put_pid(rank)
    armed = RankFaults(marks, marks.orders(), rank)
    armed.follow_steps()
    if rank == 0:
        armed.flip_between_rounds()
    for fault in marks.pending(armed.orders.case):
        if fault.actor == rank:
            armed.place(fault)


def _send(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process of this very start; ProcessLookupError when the id is another process's by now."""
    descriptor = os.pidfd_open(pid)
    try:
        if not is_marked(pid, os.environ[MARK_VARIABLE]):
            raise ProcessLookupError(f"process {pid} is not of this run")
        signal.pidfd_send_signal(descriptor, number)
    finally:
        os.close(descriptor)


class RankFaults:
    """This rank's faults of this round, and what it takes to strike."""

    def __init__(self, marks: MarkFiles, orders: FaultSettings, rank: int) -> None:
        self.marks = marks
        self.orders = orders
        self.rank = rank
        self.step = 0
        self.supervisor = os.getppid()
        self._begun: set[tuple[int, str]] = set()
        self._lock = threading.Lock()

    # -- striking ------------------------------------------------------------------------------------------------------

    def due(self, fault: Fault) -> bool:
        """Whether it is this fault's turn: its step reached, all earlier ones struck, its checkpoints there."""
        if self.step < fault.step and fault.place not in ("cache", "export"):
            return False
        earlier = self.orders.case.faults[: self.orders.case.faults.index(fault)]
        if not all(self.marks.struck(other) for other in earlier):
            return False
        return len(self.complete()) >= fault.checkpoints_needed

    def begin(self, fault: Fault, phase: str = "hit") -> bool:
        """Claim a phase of a fault; only once per process."""
        with self._lock:
            new = (fault.number, phase) not in self._begun
            self._begun.add((fault.number, phase))
            return new

    def strike(self, fault: Fault, phase: str = "hit", **detail: Any) -> None:
        """Mark and strike. Returns only when the run is to go on from here (SIGTERM)."""
        if not self.begin(fault, phase):
            return
        self.mark(fault, phase, **detail)
        if fault.target is None:
            victim = self.supervisor
        else:
            victim = os.getpid() if fault.target == self.rank else self.marks.pid(fault.target)
        number = _SIGNALS[fault.kind]
        _send(victim, number)
        while number != signal.SIGTERM:
            time.sleep(1)

    def mark(self, fault: Fault, phase: str, **detail: Any) -> None:
        """Note that a phase is reached, at which step, and which checkpoints were complete."""
        complete = [info.step for info in self.complete()]
        self.marks.put(fault, phase, step=self.step, complete=complete, detail=detail or None)

    def later(self, seconds: float, fault: Fault, phase: str = "hit") -> None:
        """Strike after a time, wherever the process is then."""
        timer = threading.Timer(seconds, self.strike, (fault, phase))
        timer.daemon = True
        timer.start()

    def complete(self) -> list[CheckpointInfo]:
        """The complete checkpoints now."""
        return [info for info in list_checkpoints_in(self.orders.checkpoints) if info.complete]

    # -- places --------------------------------------------------------------------------------------------------------

    def place(self, fault: Fault) -> None:
        """Replace what `fault` needs."""
        if fault.kind == "disk-full":
            fill_disk(self, fault)
        elif fault.place == "resume" and self.marks.get(fault, "hit") is not None:
            self._in_first_second(fault)
        elif fault.place in ("step", "resume"):
            self._in_step(fault)
        else:
            getattr(self, "_in_" + fault.place.replace("-", "_"))(fault)

    def follow_steps(self) -> None:
        """Know the step that is being done."""

        def make(train_step: Any) -> Any:
            def followed(trainer: Any, step: int, *arguments: Any) -> Any:
                self.step = step + 1
                return train_step(trainer, step, *arguments)

            return followed

        patch_function("drillyard.training.trainer", "Trainer.train_step", make)

    def _in_step(self, fault: Fault) -> None:
        timed = False

        def make(train_step: Any) -> Any:
            def struck(trainer: Any, step: int, *arguments: Any) -> Any:
                nonlocal timed
                self.step = step + 1
                if not timed and self.due(fault):
                    timed = True
                    self.later(fault.fraction * self.orders.step_seconds, fault)
                return train_step(trainer, step, *arguments)

            return struck

        patch_function("drillyard.training.trainer", "Trainer.train_step", make)

    def _in_first_second(self, fault: Fault) -> None:
        def make(run_rank: Any) -> Any:
            def struck(*arguments: Any) -> Any:
                self.later(fault.fraction, fault, "again")
                return run_rank(*arguments)

            return struck

        patch_function("drillyard.training.run", "run_rank", make)

    def _in_shards(self, fault: Fault) -> None:
        def make(write_now: Any) -> Any:
            def half_written(stream: Any, view: memoryview) -> None:
                path = Path(stream._file.name)
                if path.suffix == ".distcp" and view and self.due(fault):
                    stream._file.write(view[: len(view) // 2])
                    self.strike(fault, save=step_of(path.parent))
                write_now(stream, view)

            return half_written

        # After SIGTERM the save goes on and its digest must see every byte: that one strikes before the write.
        whole = self._before(fault, lambda stream: Path(stream._file.name).parent) if fault.kind == "term" else make
        patch_function(f"{_CHECKPOINT}.dcp_storage", "_HashingStream._write_now", whole)

    def _in_before_manifest(self, fault: Fault) -> None:
        patch_function(f"{_CHECKPOINT}.dcp_storage", "write_manifest", self._before(fault, lambda directory: directory))

    def _in_manifest(self, fault: Fault) -> None:
        def make(write_durably: Any) -> Any:
            def half_written(path: Path, data: bytes) -> None:
                if not self.due(fault):
                    write_durably(path, data)
                    return
                open_file = Path.open

                def opened(self_: Path, *arguments: Any, **options: Any) -> Any:
                    file = open_file(self_, *arguments, **options)
                    if self_.parent != path.parent:
                        return file
                    return _HalfWritten(file, lambda: self.strike(fault, save=step_of(path.parent)))

                Path.open = opened  # type: ignore[assignment, method-assign]
                write_durably(path, data)

            return half_written

        patch_function(f"{_CHECKPOINT}.manifest", "write_durably", make)

    def _in_deletion(self, fault: Fault) -> None:
        def make(remove_checkpoint: Any) -> Any:
            def half_deleted(path: Path) -> None:
                if not self.due(fault) or not (path / MANIFEST_NAME).exists():
                    remove_checkpoint(path)
                    return
                left = 1 + int(fault.fraction * (len(os.listdir(path)) - 1))
                unlink = os.unlink

                def counted(*arguments: Any, **options: Any) -> None:
                    nonlocal left
                    unlink(*arguments, **options)
                    left -= 1
                    if left == 0:
                        self.strike(fault, save=step_of(path))

                os.unlink = counted
                remove_checkpoint(path)

            return half_deleted

        patch_function(f"{_CHECKPOINT}.checkpointer", "remove_checkpoint", make)

    def _in_cache(self, fault: Fault) -> None:
        if fault.fraction < 0.5:
            patch_function("drillyard.data.token_cache", "_PartWriter.finish", self._before(fault))
        else:
            patch_function("drillyard.data.token_cache", "_write_manifest", self._before(fault))

    def _in_export(self, fault: Fault) -> None:
        patch_function(
            "drillyard.models.export", "_finish" if fault.fraction < 0.5 else "_publish", self._before(fault)
        )

    def _before(self, fault: Fault, checkpoint: Callable[[Any], Path] | None = None) -> Callable[[Any], Any]:
        """Strike when the function is called, before it does anything; `checkpoint` finds it in the first argument."""

        def make(function: Any) -> Any:
            def struck(*arguments: Any, **options: Any) -> Any:
                if self.due(fault):
                    self.strike(fault, save=None if checkpoint is None else step_of(checkpoint(arguments[0])))
                return function(*arguments, **options)

            return struck

        return make

    # -- between rounds ------------------------------------------------------------------------------------------------

    def flip_between_rounds(self) -> None:
        """Flip one bit of the newest complete checkpoint, where the round before was killed for that."""
        for fault in self.orders.case.faults:
            if fault.kind != "flip" or self.marks.get(fault, "hit") is None or self.marks.get(fault, "flipped"):
                continue
            newest = self.complete()[-1]
            assert newest.manifest is not None
            names = [MANIFEST_NAME, *sorted(newest.manifest.files)]
            path = newest.path / names[int(fault.fraction * len(names))]
            offset = int((fault.fraction * 997) % 1 * path.stat().st_size)
            with path.open("r+b") as file:
                file.seek(offset)
                byte = file.read(1)
                file.seek(offset)
                file.write(bytes([byte[0] ^ 1]))
            self.marks.put(fault, "flipped", checkpoint=newest.step, file=path.name, offset=offset)


class _HalfWritten:
    """A file of which only half of what is written arrives before `strike`."""

    def __init__(self, file: Any, strike: Callable[[], None]) -> None:
        self._file = file
        self._strike = strike

    def __enter__(self) -> _HalfWritten:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()

    def write(self, data: bytes) -> None:
        self._file.write(data[: len(data) // 2])
        self._file.flush()
        self._strike()
