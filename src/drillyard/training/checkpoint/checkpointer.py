"""The trainer's checkpoints: `save` while training goes on, `load` the newest good one, keep the
newest N and the best.

A save is three parts. Training waits only for the first: the state is copied into kept CPU buffers
(`planning.Staging`). Then a thread of its own writes the copy through torch.distributed.checkpoint
over a gloo group of its own (collectives of two threads on one group would mix), and at last the
coordinator, rank 0, deletes what is no longer kept. One save is in flight at a time; the next one
waits for it.

A save that fails on any rank (disk full, I/O error) fails on all and is an event, and training
continues with the earlier checkpoints untouched: nothing is deleted before the new checkpoint is
complete. One process writes a run directory at a time; who else might is for the caller to rule
out.

Events (`on_event(name, **fields)`, called from the saving thread, on rank 0): `checkpoint` (step,
path, bytes, blocking_seconds, seconds), `checkpoint_failed` (step, path, reason),
`checkpoint_damaged` and `checkpoint_incomplete` (passed over by a load: step, path, reason),
`checkpoint_abandoned`, `checkpoint_removed` (step, path) and `checkpoint_not_removed` (step, path,
reason). A rank that loses its connection to the others writes `checkpoint_failed` itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save as save_state_dict

from drillyard.errors import UserError
from drillyard.parallel.collectives import from_first_rank, own_cpu_group
from drillyard.safe_files import NO_ROOM, describe_os_error
from drillyard.training.checkpoint.dcp_planners import (
    RepeatedSavePlanner,
    StagedState,
    StagingBuffers,
    flatten,
)
from drillyard.training.checkpoint.dcp_storage import CheckpointWriter, DamagedCheckpoint
from drillyard.training.checkpoint.inventory import (
    HELD_OUT_NAME,
    CheckpointInfo,
    later_format_error,
    list_checkpoints_in,
    lost_checkpoints,
    prunable,
    remove_checkpoint,
    set_aside_checkpoint,
    step_directory_name,
    write_held_out_loss,
)
from drillyard.training.checkpoint.loading import (
    AcceptMetadata,
    LoadedCheckpoint,
    StateSource,
    failure_text,
    load_checkpoint,
    read,
)
from drillyard.training.checkpoint.manifest import MANIFEST_NAME, FileRecord, Manifest, json_value

OnEvent = Callable[..., None]


@dataclass
class _Save:
    """One save on its way: what is written where, and what it has cost so far."""

    step: int
    path: Path
    flat: dict[str, Any]
    staged: StagedState
    metadata: Any
    blocking_seconds: float


class Checkpointer:
    """Saves and loads the checkpoints in `directory` (`RUN_DIR/checkpoints`). All ranks make one
    and call it alike.

    `keep`: newest checkpoints kept; `keep_best`: also the one with the lowest held-out loss, given
    to `record_held_out_loss` or as metadata["held_out_loss"]. `asynchronous`: write while training
    continues, at the price of a copy of the rank's state in host memory. `identity`: what the run
    is, written into each manifest. `timeout`: how long a rank waits for the slowest to have
    written. `before_write`: called on each rank before it writes its file of a checkpoint, and on
    rank 0 before each manifest and before it deletes, renames or adds to one.
    """

    def __init__(
        self,
        directory: Path,
        *,
        keep: int,
        keep_best: bool,
        asynchronous: bool,
        identity: Mapping[str, Any],
        on_event: OnEvent,
        timeout: timedelta = timedelta(minutes=30),
        before_write: Callable[[], None] = lambda: None,
    ) -> None:
        self.directory = directory
        self._before_write = before_write
        self.keep = keep
        self.keep_best = keep_best
        self.asynchronous = asynchronous
        self.identity = json_value(identity)
        self.saves_failed = 0
        self.step_on_disk: int | None = None
        """The step that was saved, or loaded from here, last. A save in flight does not count."""
        self._on_event = on_event
        self._group = own_cpu_group(timeout) if dist.is_initialized() else None
        self._world_size = dist.get_world_size(self._group) if self._group is not None else 1
        self._is_coordinator = self._group is None or dist.get_rank(self._group) == 0
        self._staging = StagingBuffers()
        self._planner = RepeatedSavePlanner()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._in_flight: Future[bool] | None = None
        self._leftovers_removed = False
        self._group_is_lost = False
        self._is_closed = False
        self._damaged: set[Path] = set()
        """Paths that a load passed over as damaged, also where the sizes are right: they do not
        count as kept."""

    # -- saving
    # ----------------------------------------------------------------------------------------------

    def save(
        self, step: int, state: dict[str, Any], *, metadata: Mapping[str, Any], wait: bool = False
    ) -> None:
        """Save the state after `step` steps. Collective.

        `state`: nested dictionary of DTensors, tensors and small objects; keys that only one rank
        has are fine, a key that several ranks have names the same value on all of them. The state
        may change as soon as this returns. `metadata`: JSON values. With `wait`, or when not
        asynchronous, it returns when the save has ended, well or not. A step that is on disk
        already (loaded from here, or saved before) is not saved again.
        """
        started = time.perf_counter()
        self.wait()
        if self._group_is_lost:
            # gloo closes a group in which a collective has failed: no save of this attempt could
            # work any more.
            raise RuntimeError(
                "an earlier save lost the other ranks: this attempt ends, as it could not save any"
                " more"
            )
        if step == self.step_on_disk:
            return
        flat = flatten(state)
        copies = self.asynchronous and not wait
        staged = self._staging.stage(flat, copies=copies)
        path = self.directory / step_directory_name(step)
        save = _Save(step, path, flat, staged, json_value(metadata), time.perf_counter() - started)
        self._in_flight = self._thread.submit(self._write, save)
        if not copies:
            self.wait()

    def prepare(self, state: dict[str, Any]) -> None:
        """Allocate the buffers for saving such a state, so that the first save need not: worth a
        call before step 1."""
        if self.asynchronous:
            self._staging.stage(flatten(state), copies=True).wait()

    def wait(self) -> bool:
        """Wait for the save in flight; True when it (or, with none in flight, nothing) has gone
        well."""
        if self._in_flight is None:
            return True
        in_flight, self._in_flight = self._in_flight, None
        return in_flight.result()

    def close(self) -> None:
        """Wait for the save in flight and end the thread and the process group. Collective."""
        self.wait()
        self._thread.shutdown()
        self._is_closed = True
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None

    def _write(self, save: _Save) -> bool:
        """The saving thread: write, then tidy up."""
        started = time.perf_counter()
        if self._is_coordinator:
            self._before_write()
        if not self._leftovers_removed:
            self._remove_leftovers()
        writer = CheckpointWriter(
            save.path, lambda files: self._manifest(save, files), self._before_write
        )
        self._planner.staged = save.staged
        try:
            save.staged.wait()
            with torch.no_grad():
                save_state_dict(
                    save.flat,
                    storage_writer=writer,
                    planner=self._planner,
                    process_group=self._group,
                    no_dist=self._group is None,
                )
        except CheckpointException as failure:
            advice = self._advice([failure.failures[rank][0] for rank in sorted(failure.failures)])
            self._failed(save, failure_text(failure.failures) + advice)
            return False
        except RuntimeError as failure:
            # A rank that is lost after the manifest was written takes nothing from the checkpoint.
            if writer.manifest is None:
                self._group_is_lost = True
                self._failed(save, f"lost the other ranks: {failure}")
                return False
        finally:
            self._planner.staged = None
        self.step_on_disk = save.step
        self._damaged.discard(save.path)
        if self._is_coordinator:
            assert writer.manifest is not None
            size = sum(record.bytes for record in writer.manifest.files.values())
            self._event(
                "checkpoint",
                save.step,
                save.path,
                bytes=size,
                blocking_seconds=save.blocking_seconds,
                seconds=time.perf_counter() - started,
            )
            self._tidy_up(save.step)
        return True

    def _manifest(self, save: _Save, files: dict[str, FileRecord]) -> Manifest:
        self._before_write()
        return Manifest(
            step=save.step,
            world_size=self._world_size,
            torch_version=str(torch.__version__),
            created=datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            files=files,
            identity=self.identity,
            metadata=save.metadata,
        )

    def _failed(self, save: _Save, reason: str) -> None:
        """Forget the plans, which may differ between ranks now, and remove what was written of this
        save.

        At once, as it may fill the disk; where that fails too (the mount is gone), before the next
        save.
        """
        self.saves_failed += 1
        self._planner = RepeatedSavePlanner()
        self._leftovers_removed = False
        if self._is_coordinator or self._group_is_lost:
            self._event("checkpoint_failed", save.step, save.path, reason=reason)
        if self._is_coordinator:
            self._remove(save.step, save.path, report=False)

    def _advice(self, errors: list[BaseException]) -> str:
        """Advise on the first error of a file system; empty when there is none."""
        error = next((error for error in errors if isinstance(error, OSError)), None)
        if error is None or error.strerror is None:
            return ""
        text = describe_os_error(error).removeprefix(error.strerror).removeprefix(": ")
        if error.errno in NO_ROOM:
            kept = self.keep + self.keep_best
            text += (
                f": old checkpoints go when the new one is complete, so keeping {kept} needs room"
                f" for {kept + 1}"
            )
        parts = [
            part for part in (text, "training goes on, earlier checkpoints are untouched") if part
        ]
        return f" ({'; '.join(parts)})"

    # -- keeping
    # ----------------------------------------------------------------------------------------------

    def record_held_out_loss(self, step: int, loss: float) -> None:
        """Put what was measured at `step` beside its checkpoint, if there is one, and keep the best
        accordingly.

        A save comes before the measurement, so that an evaluation that ends the process costs no
        step.
        """
        if self._is_closed:
            self._record_held_out_loss(step, loss)
        else:
            self._thread.submit(self._record_held_out_loss, step, loss)

    def _record_held_out_loss(self, step: int, loss: float) -> None:
        if not self._is_coordinator or self.step_on_disk != step:
            return
        path = self.directory / step_directory_name(step)
        self._before_write()
        try:
            write_held_out_loss(path, loss)
        except OSError as error:
            self._on_event(
                "warning", text=f"{path / HELD_OUT_NAME}: not written: {describe_os_error(error)}"
            )
        else:
            self._tidy_up(step)

    def end_at(self, step: int) -> None:
        """Set aside what lies ahead of the run's last step: one that went back to it had nothing to
        save."""
        if self._is_coordinator and self.step_on_disk == step:
            self._tidy_up(step)

    def _tidy_up(self, step: int) -> None:
        """After a save: set aside what lies ahead of it (the run went back), then delete what is no
        longer kept."""
        try:
            for info in list_checkpoints_in(self.directory):
                if info.complete and info.step > step:
                    self._before_write()
                    set_aside_checkpoint(info.path)
                    self._event("checkpoint_abandoned", info.step, info.path)
            checkpoints = [
                info
                for info in list_checkpoints_in(self.directory)
                if info.path not in self._damaged
            ]
        except OSError as error:
            self._event("checkpoint_not_removed", step, self.directory, reason=str(error))
            return
        for info in prunable(checkpoints, self.keep, self.keep_best):
            self._remove(info.step, info.path, report=True)

    def remove_leftovers(self) -> None:
        """Begin to delete what interrupted saves and deletions left behind, which may be what fills
        a disk.

        For the one run that writes here, once it has loaded the checkpoint that it continues from.
        """
        self._thread.submit(self._remove_leftovers)

    def _remove_leftovers(self) -> None:
        self._leftovers_removed = True
        if not self._is_coordinator:
            return
        try:
            checkpoints = list_checkpoints_in(self.directory)
        except OSError as error:
            self._event("checkpoint_not_removed", None, self.directory, reason=str(error))
            return
        for info in checkpoints:
            if info.status == "incomplete":
                self._remove(info.step, info.path, report=True)

    def _remove(self, step: int, path: Path, *, report: bool) -> None:
        self._before_write()
        try:
            remove_checkpoint(path)
        except OSError as error:
            self._leftovers_removed = False
            self._event("checkpoint_not_removed", step, path, reason=str(error))
        else:
            if report:
                self._event("checkpoint_removed", step, path)

    def _event(self, event: str, step: int | None, path: Path, **fields: Any) -> None:
        self._on_event(event, step=step, path=str(path), **fields)

    # -- loading
    # ----------------------------------------------------------------------------------------------

    def latest(self) -> CheckpointInfo | None:
        """The newest complete checkpoint, judged by manifest and sizes; None when there is none.
        Collective."""
        return next((info for info in reversed(self._all()) if info.complete), None)

    def load(
        self,
        state: StateSource,
        source: Path | None = None,
        *,
        accept: AcceptMetadata | None = None,
    ) -> LoadedCheckpoint | None:
        """Fill `state` from a checkpoint: the newest good one, or with `source` the one at that
        path. Collective.

        Without `source` a damaged checkpoint is passed over for the next older one, with an event
        that names the file; None when nothing was ever completely saved. `state` may be a function
        of the checkpoint's metadata, and `accept(metadata)` may raise to refuse it. Raises
        UserError when the one asked for is unusable, every one is damaged, or the next in line was
        written by a later program.
        """
        self.wait()
        if source is not None:
            try:
                loaded = load_checkpoint(source, state, process_group=self._group, accept=accept)
            except DamagedCheckpoint as damage:
                raise UserError(
                    f"the checkpoint is damaged: {damage}; name an older one, or use resume: auto"
                ) from damage
            return self._loaded(loaded)
        damage_seen: list[str] = []
        found = self._all()
        for info in reversed(found):
            reason = f"{info.path}: {info.reason}"
            if info.status == "later-format":
                raise later_format_error(info)
            if info.complete:
                try:
                    return self._loaded(read(info, state, self._group, accept))
                except DamagedCheckpoint as damage:
                    reason = str(damage)
            if info.status in ("complete", "damaged"):
                damage_seen.append(reason)
                self._damaged.add(info.path)
                self._passed_over("checkpoint_damaged", info, reason)
            elif info.status == "incomplete":
                self._passed_over("checkpoint_incomplete", info, reason)
        # Those whose manifest is lost are asked for when nothing can be loaded; the answer is the
        # same on all ranks.
        lost = from_first_rank(lambda: lost_checkpoints(found, self.directory.parent), self._group)
        damage_seen += [
            f"{info.path}: its {MANIFEST_NAME} is gone, and events.jsonl says that it was complete"
            for info in lost
        ]
        if damage_seen:
            raise UserError(
                f"{self.directory}: none of its {len(damage_seen)} checkpoints can be used"
                f" ({damage_seen[0]}); restore one from a copy, or move the directory away to start"
                " from step 0"
            )
        return None

    def _passed_over(self, event: str, info: CheckpointInfo, reason: str) -> None:
        if self._is_coordinator:
            self._event(event, info.step, info.path, reason=reason)

    def _all(self) -> list[CheckpointInfo]:
        try:
            return from_first_rank(lambda: list_checkpoints_in(self.directory), self._group)
        except OSError as error:
            raise UserError(
                f"{self.directory}: cannot be read: {error.strerror}; check its storage and rights"
            ) from error

    def _loaded(self, loaded: LoadedCheckpoint) -> LoadedCheckpoint:
        if loaded.info.path.resolve().parent == self.directory.resolve():
            self.step_on_disk = loaded.step
        return loaded
