"""Injection points of faults: functions of the trainer that a rank replaces before it starts.

    python -m drillyard.faults.injection_points DIRECTORY -- train run.yaml

The supervisor starts its ranks in the same way; a rank installs the faults of this attempt and then
runs as usual. Each injection point wraps one function, and `patch_function` raises if that has been
renamed. A phase is written before every strike; a fault without one counts as not hit. A rank that
strikes another process stops there.

    point            replaced                              when it strikes
    step, resume     Trainer.train_step, run.run_rank      after a drawn part of the median step, or
                                                           of a second
    shards           _HashingStream._write_now             with half of a shard's bytes written
    before-manifest  dcp_storage.write_manifest            with all shards durable
    manifest         manifest.write_durably                with half of the manifest's bytes written
    deletion         checkpointer.remove_checkpoint        with the manifest and a drawn part of the
                                                           files deleted
    cache            _PartWriter, _write_manifest          with part of the cache built, or all but
                                                           its manifest
    export           export._finish, put_in_place          with the weights written, or before the
                                                           export is published
"""

from __future__ import annotations

import errno
import functools
import importlib
import os
import resource
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from drillyard.faults.disturbed_run import MARK_VARIABLE, FaultSettings, PhaseFiles, is_marked
from drillyard.faults.plan import Fault
from drillyard.training.checkpoint.inventory import CheckpointInfo, list_checkpoints_in
from drillyard.training.checkpoint.manifest import MANIFEST_NAME
from drillyard.training.checkpoint.verification import verify

_SIGNALS = {
    "kill": signal.SIGKILL,
    "flip": signal.SIGKILL,
    "stop": signal.SIGSTOP,
    "term": signal.SIGTERM,
}
_CHECKPOINTER = "drillyard.training.checkpoint.checkpointer"
_STORAGE = "drillyard.training.checkpoint.dcp_storage"
_LEFT_BYTES = 4096
"""Bytes that a full disk still accepts while shards are written."""


def main(arguments: Sequence[str]) -> None:
    """Install the faults of this process, then run the command."""
    directory, separator, *drillyard_command = arguments
    assert separator == "--"

    def start_ranks_here(
        original: Any, command: Sequence[str], *arguments: Any, **options: Any
    ) -> int:
        """Instead of `drillyard train ...` the supervisor starts this module."""
        python, dash_m, package, *rest = command
        assert (dash_m, package) == (
            "-m",
            "drillyard",
        ), f"the ranks' command has changed: {command}"
        here = [python, "-m", "drillyard.faults.injection_points", directory, "--", *rest]
        return int(original(here, *arguments, **options))

    if "RANK" in os.environ:
        install_faults(PhaseFiles(Path(directory)), int(os.environ["RANK"]))
    else:
        patch_function("drillyard.supervise.supervisor", "supervise_training", start_ranks_here)
    from drillyard.cli.main import main as drillyard

    drillyard(drillyard_command)


def find_attribute(module: str, name: str) -> tuple[Any, str, Any]:
    """Owner, last part of the name, and value of `name` (or `Class.name`) of a module;
    AttributeError if missing."""
    *parents, last = name.split(".")
    try:
        owner = functools.reduce(getattr, parents, importlib.import_module(module))
        return owner, last, getattr(owner, last)
    except AttributeError:
        raise AttributeError(
            f"fault injection replaces {module}.{name}, which does not exist any more"
        ) from None


def patch_function(module: str, name: str, wrapper: Callable[..., Any]) -> None:
    """Make calls of a function or method call `wrapper(original, *arguments)` instead."""
    owner, last, original = find_attribute(module, name)

    def replacement(*arguments: Any, **options: Any) -> Any:
        return wrapper(original, *arguments, **options)

    setattr(owner, last, replacement)


def step_of(checkpoint: Path) -> int:
    """The step in the name of a checkpoint's directory."""
    return int(checkpoint.name.rpartition("-")[2])


def install_faults(phases: PhaseFiles, rank: int) -> None:
    """Patch the functions in which this rank strikes during this attempt. AttributeError if one
    does not exist."""
    phases.put_pid(rank)
    faults = RankFaults(phases, phases.settings(), rank)
    faults.track_steps()
    if rank == 0:
        faults.flip_bits()
    for fault in phases.pending(faults.settings.planned):
        if fault.actor == rank:
            faults.install(fault)


def _send(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process of this run; ProcessLookupError if the id belongs to another
    process by now."""
    descriptor = os.pidfd_open(pid)
    try:
        if not is_marked(pid, os.environ[MARK_VARIABLE]):
            raise ProcessLookupError(f"process {pid} is not part of this run")
        signal.pidfd_send_signal(descriptor, number)
    finally:
        os.close(descriptor)


class RankFaults:
    """The faults of one rank in this attempt."""

    def __init__(self, phases: PhaseFiles, settings: FaultSettings, rank: int) -> None:
        self.phases = phases
        self.settings = settings
        self.rank = rank
        self.step = 0
        self.supervisor = os.getppid()
        self._in_steps: list[Fault] = []
        self._begun: set[tuple[int, str]] = set()
        self._lock = threading.Lock()
        self._filled_by: Fault | None = None
        """The fault that has filled the disk."""
        self._soft_limit = 0

    def is_due(self, fault: Fault) -> bool:
        """Whether `fault` is next: its step reached, earlier faults complete, its checkpoints
        saved."""
        if self.step < fault.step and fault.place not in ("cache", "export"):
            return False
        faults = self.settings.planned.faults
        earlier = faults[: faults.index(fault)]
        return (
            all(map(self.phases.is_complete, earlier))
            and len(self.complete()) >= fault.checkpoints_needed
        )

    def begin(self, fault: Fault, phase: str = "hit") -> bool:
        """Whether this is the first call for this phase of the fault in this process."""
        with self._lock:
            is_new = (fault.number, phase) not in self._begun
            self._begun.add((fault.number, phase))
            return is_new

    def strike(self, fault: Fault, phase: str = "hit", **detail: Any) -> None:
        """Record the phase and send the signal. Returns only if the run continues from here
        (SIGTERM)."""
        if not self.begin(fault, phase):
            return
        self.record(fault, phase, **detail)
        if fault.target is None:
            victim = self.supervisor
        else:
            victim = os.getpid() if fault.target == self.rank else self.phases.pid(fault.target)
        _send(victim, _SIGNALS[fault.kind])
        while fault.kind != "term":
            time.sleep(1)

    def strike_after(self, seconds: float, fault: Fault, phase: str = "hit") -> None:
        """Strike after a delay, wherever the process is then."""
        timer = threading.Timer(seconds, self.strike, (fault, phase))
        timer.daemon = True
        timer.start()

    def record(self, fault: Fault, phase: str, **detail: Any) -> None:
        """Record that a phase is reached, at which step, and which checkpoints are complete."""
        complete = [info.step for info in self.complete()]
        self.phases.put(fault, phase, step=self.step, complete=complete, detail=detail or None)

    def complete(self) -> list[CheckpointInfo]:
        """The complete checkpoints now."""
        return [info for info in list_checkpoints_in(self.settings.checkpoints) if info.complete]

    def install(self, fault: Fault) -> None:
        """Patch what `fault` needs."""
        first_half = fault.fraction < 0.5
        if fault.kind == "disk-full":
            self._in_save_on_full_disk(fault)
        elif fault.place == "resume" and self.phases.get(fault, "hit") is not None:
            self._in_first_second(fault)
        elif fault.place in ("step", "resume"):
            self._in_steps.append(fault)
        elif fault.place == "shards":
            self._in_shards(fault)
        elif fault.place == "before-manifest":
            patch_function(_STORAGE, "write_manifest", self._before(fault, step_of))
        elif fault.place == "manifest":
            self._in_manifest(fault)
        elif fault.place == "deletion":
            self._in_deletion(fault)
        elif fault.place == "cache":
            name = "_PartWriter.finish" if first_half else "_write_manifest"
            patch_function("drillyard.data.token_cache", name, self._before(fault))
        else:
            name = "_finish" if first_half else "export_directory.put_in_place"
            patch_function("drillyard.models.export", name, self._before(fault))

    def _before(
        self, fault: Fault, saved: Callable[[Any], int] | None = None
    ) -> Callable[..., Any]:
        """A wrapper that strikes before it calls the function; `saved` gives the saved step by the
        first argument."""

        def wrapper(original: Any, *arguments: Any, **options: Any) -> Any:
            if self.is_due(fault):
                self.strike(fault, save=None if saved is None else saved(arguments[0]))
            return original(*arguments, **options)

        return wrapper

    def track_steps(self) -> None:
        """Record the step in progress, and strike in it if a fault is due."""

        def train_step(original: Any, trainer: Any, step: int, *arguments: Any) -> Any:
            self.step = step + 1
            for fault in filter(self.is_due, list(self._in_steps)):
                self._in_steps.remove(fault)
                self.strike_after(fault.fraction * self.settings.step_seconds, fault)
            return original(trainer, step, *arguments)

        patch_function("drillyard.training.trainer", "Trainer.train_step", train_step)

    def _in_first_second(self, fault: Fault) -> None:
        def run_rank(original: Any, *arguments: Any) -> Any:
            self.strike_after(fault.fraction, fault, "again")
            return original(*arguments)

        patch_function("drillyard.training.run", "run_rank", run_rank)

    def _in_shards(self, fault: Fault) -> None:
        def write_now(original: Any, stream: Any, view: memoryview) -> None:
            path = Path(stream._file.name)
            if path.suffix == ".distcp" and view and self.is_due(fault):
                # After SIGTERM the save continues and its digest must see every byte, so strike
                # before the write.
                if fault.kind != "term":
                    stream._file.write(view[: len(view) // 2])
                self.strike(fault, save=step_of(path.parent))
            original(stream, view)

        patch_function(_STORAGE, "_HashingStream._write_now", write_now)

    def _in_manifest(self, fault: Fault) -> None:
        def write_durably(original: Any, path: Path, data: bytes) -> None:
            if self.is_due(fault):
                path.with_name(f"{path.name}.tmp").write_bytes(data[: len(data) // 2])
                self.strike(fault, save=step_of(path.parent))
            original(path, data)

        patch_function("drillyard.training.checkpoint.manifest", "write_durably", write_durably)

    def _in_deletion(self, fault: Fault) -> None:
        def remove_checkpoint(original: Any, path: Path) -> None:
            if self.is_due(fault) and (path / MANIFEST_NAME).exists():
                left = 1 + int(fault.fraction * (len(os.listdir(path)) - 1))

                def unlink(delete: Any, *arguments: Any, **options: Any) -> None:
                    nonlocal left
                    delete(*arguments, **options)
                    left -= 1
                    if left == 0:
                        self.strike(fault, save=step_of(path))

                patch_function("os", "unlink", unlink)
            original(path)

        patch_function(_CHECKPOINTER, "remove_checkpoint", remove_checkpoint)

    def _in_save_on_full_disk(self, fault: Fault) -> None:
        """Fill the disk before the shards or the manifest are written, and free it when the save
        has failed.

        Without a small disk (no right to mount), the kernel refuses this process files longer than
        half of its shard: another error (EFBIG), handled by the same code.
        """
        is_manifest = fault.place == "manifest"

        def write(original: Any, target: Any, *arguments: Any) -> Any:
            if self._filled_by is None and self.is_due(fault) and self.begin(fault):
                self.record(fault, "hit", save=step_of(target if is_manifest else target.directory))
                self._filled_by = fault
                self._fill_disk(0 if is_manifest else _LEFT_BYTES)
            return original(target, *arguments)

        def failed(original: Any, *arguments: Any, **options: Any) -> None:
            original(*arguments, **options)
            # Several such faults wrap this function.
            if self._filled_by is fault:
                self._free_disk()
                newest = self.complete()[-1]
                damaged = [problem.name for problem in verify(newest) if not problem.harmless]
                self.phases.put(fault, "after", newest=newest.step, damaged=damaged)

        patch_function(
            _STORAGE, "write_manifest" if is_manifest else "CheckpointWriter.write_data", write
        )
        patch_function(_CHECKPOINTER, "Checkpointer._failed", failed)

    def _fill_disk(self, left: int) -> None:
        ballast = self.settings.ballast
        if ballast is None:
            self._soft_limit, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.settings.shard_bytes // 2, hard))
            return
        with ballast.open("wb") as file:
            size = 0
            while (room := shutil.disk_usage(ballast.parent).free) > left:
                try:
                    os.posix_fallocate(file.fileno(), size, room - left)
                    size += room - left
                except OSError as error:
                    # Another rank has taken some of the room in the meantime.
                    if error.errno != errno.ENOSPC:
                        raise

    def _free_disk(self) -> None:
        self._filled_by = None
        if self.settings.ballast is None:
            hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
            resource.setrlimit(resource.RLIMIT_FSIZE, (self._soft_limit, hard))
        else:
            self.settings.ballast.unlink()

    def flip_bits(self) -> None:
        """Flip one bit of the newest complete checkpoint if a flip fault killed the previous
        attempt."""
        for fault in self.settings.planned.faults:
            if (
                fault.kind != "flip"
                or self.phases.get(fault, "hit") is None
                or self.phases.get(fault, "flipped")
            ):
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
            self.phases.put(fault, "flipped", checkpoint=newest.step, file=path.name, offset=offset)


if __name__ == "__main__":
    main(sys.argv[1:])
