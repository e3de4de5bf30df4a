"""Inventory of `checkpoints/`: which are complete, what is wrong with the others, and which may go.
Needs no torch.

A checkpoint is a directory `step-<8 digits>`. It is
- `complete`: its manifest is intact and every file it names is there with the right size;
- `incomplete`: it has no manifest: a save that was interrupted, or a deletion (which takes the
  manifest first);
- `abandoned`: set aside by a return to an earlier checkpoint;
- `later-format`: intact as far as this program can see, but written by a later one;
- `damaged`: it has a manifest, but the manifest or a file is not as written;
- `refused`: as written, but it contains code or other unexpected content; `mark_unsafe` in
  verification.py looks for that.

Listing reads manifests and sizes (milliseconds); only verification.py and loading.py read the files
and compare checksums. A checkpoint's directory may be a link; deleting it deletes the link alone. A
file in it that is a link to a place outside of it is never opened: in a checkpoint from elsewhere
it could lead to any file of this host.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from drillyard.errors import UserError
from drillyard.guarded_files import read_json
from drillyard.training.checkpoint.index_reader import UnsafeCheckpoint
from drillyard.training.checkpoint.manifest import (
    ABANDONED_NAME,
    MANIFEST_NAME,
    LaterFormat,
    Manifest,
    ManifestError,
    read_manifest,
    sync_directory,
)

CHECKPOINTS_NAME = "checkpoints"
HELD_OUT_NAME = "held_out.json"
"""Beside the manifest, which is complete before anything is measured at its step: {"held_out_loss":
1.25}."""
_LARGEST_HELD_OUT_BYTES = 4096  # it holds one number
LINK_OUTSIDE = (
    "is a link to a place outside of the checkpoint, which is never read: put the file itself here"
)
_STEP_DIRECTORY = re.compile(r"step-(\d{8,})\Z")

Status = Literal["complete", "incomplete", "abandoned", "damaged", "later-format", "refused"]


@dataclass(frozen=True)
class CheckpointInfo:
    """One checkpoint directory. `manifest` is None where it is missing or damaged; `reason` says
    what is wrong.

    `measured_loss`: what `held_out.json` says.
    """

    path: Path
    step: int
    status: Status
    reason: str
    bytes: int
    manifest: Manifest | None
    measured_loss: float | None = None

    @property
    def complete(self) -> bool:
        return self.status == "complete"

    @property
    def metadata(self) -> dict[str, Any]:
        return dict(self.manifest.metadata) if self.manifest else {}

    @property
    def created(self) -> str | None:
        """Time at which the manifest was written: UTC, ISO 8601."""
        return self.manifest.created if self.manifest else None

    @property
    def held_out_loss(self) -> float | None:
        """The figure that the best checkpoint is chosen by: what was measured after the save, else
        metadata["held_out_loss"], where it is finite."""
        loss = (
            self.metadata.get("held_out_loss") if self.measured_loss is None else self.measured_loss
        )
        try:
            return float(loss) if isinstance(loss, int | float) and math.isfinite(loss) else None
        except OverflowError:
            return None


def step_directory_name(step: int) -> str:
    """`step-00000050` for step 50."""
    return f"step-{step:08d}"


def step_of(path: Path) -> int | None:
    """The step in a checkpoint directory's name; None for other names."""
    match = _STEP_DIRECTORY.match(path.name)
    return int(match.group(1)) if match else None


def list_checkpoints(run_directory: Path) -> list[CheckpointInfo]:
    """All checkpoints of a run directory, oldest step first. A missing directory holds none. Raises
    OSError."""
    return list_checkpoints_in(run_directory / CHECKPOINTS_NAME)


def list_checkpoints_in(checkpoints: Path) -> list[CheckpointInfo]:
    """As `list_checkpoints`, given the `checkpoints` directory itself."""
    try:
        names = os.listdir(checkpoints)
    except (FileNotFoundError, NotADirectoryError):
        return []
    found = sorted((step, name) for name in names if (step := step_of(Path(name))) is not None)
    return [info for _, name in found if (info := inspect(checkpoints / name)) is not None]


def inspect(path: Path) -> CheckpointInfo | None:
    """Look at one checkpoint directory: manifest and sizes. None when it is gone.

    One that cannot be looked at (an I/O error, a file or a dangling link of that name) is damaged,
    not gone.
    """
    named = step_of(path)
    step = -1 if named is None else named
    try:
        sizes, odd = scan_files(path)
    except (FileNotFoundError, NotADirectoryError) as error:
        if not os.path.lexists(path):
            return None
        reason = (
            "a link to nothing"
            if isinstance(error, FileNotFoundError)
            else "a file, not a directory"
        )
        return CheckpointInfo(path, step, "damaged", f"it is {reason}", 0, None)
    except OSError as error:
        return CheckpointInfo(
            path, step, "damaged", f"it cannot be read: {error_text(error)}", 0, None
        )
    status, reason, manifest = _judge(path, named, sizes, odd)
    measured = read_held_out_loss(path) if HELD_OUT_NAME in {*sizes, *odd} else None
    size = sum(sizes.values())
    return CheckpointInfo(
        path, manifest.step if manifest else step, status, reason, size, manifest, measured
    )


def incomplete_error(info: CheckpointInfo) -> UserError:
    """The refusal of a named checkpoint that cannot be loaded."""
    return UserError(f"{info.path}: not a complete checkpoint: {info.reason}; name another one")


def write_held_out_loss(path: Path, loss: float) -> None:
    """Record what was measured at the step of the checkpoint at `path`. Raises OSError."""
    (path / HELD_OUT_NAME).write_text(json.dumps({"held_out_loss": loss}) + "\n", encoding="utf-8")


def read_held_out_loss(path: Path) -> float | None:
    """Read what `write_held_out_loss` recorded; None where it cannot be read. UnsafeFileError where
    something else is in its place: `keep_best` must not go by the rest."""
    try:
        loss = read_json(path / HELD_OUT_NAME, _LARGEST_HELD_OUT_BYTES)["held_out_loss"]
        return float(loss) if isinstance(loss, int | float) else None
    except (OSError, ValueError, LookupError, TypeError, OverflowError, RecursionError):
        return None


def _judge(
    path: Path, step: int | None, sizes: dict[str, int], odd: dict[str, str]
) -> tuple[Status, str, Manifest | None]:
    """Status, reason and manifest (where it can be believed), given what `_scan` found; `step` is
    the directory's."""
    if MANIFEST_NAME in odd:
        return "damaged", f"{MANIFEST_NAME} {odd[MANIFEST_NAME]}", None
    if MANIFEST_NAME not in sizes:
        if ABANDONED_NAME in sizes:
            return "abandoned", "set aside when the run went back to an earlier checkpoint", None
        return (
            "incomplete",
            f"it has no {MANIFEST_NAME}: its save or its deletion was interrupted",
            None,
        )
    try:
        manifest = read_manifest(path)
    except LaterFormat as error:
        return "later-format", f"{MANIFEST_NAME}: {error}", None
    except (ManifestError, OSError) as error:
        return "damaged", f"{MANIFEST_NAME}: {error_text(error)}", None
    if step is not None and manifest.step != step:
        return "damaged", f"{MANIFEST_NAME} is of step {manifest.step}", None
    for name, record in manifest.files.items():
        if name not in sizes:
            return "damaged", f"{name} {odd.get(name, 'is missing')}", manifest
        if sizes[name] != record.bytes:
            return "damaged", f"{name} has {sizes[name]} bytes instead of {record.bytes}", manifest
    return "complete", "", manifest


def completed_steps(run_directory: Path) -> set[int]:
    """Steps whose checkpoint was completed and neither set aside nor deleted since, according to
    events.jsonl."""
    # Imported only where a manifest is missing: telemetry imports pydantic, and listing stays fast.
    from drillyard.telemetry.events import read_events

    steps: set[int] = set()
    for event in read_events(run_directory):
        step = event.get("step")
        if event["event"] == "checkpoint" and isinstance(step, int):
            steps.add(step)
        elif event["event"] in ("checkpoint_abandoned", "checkpoint_removed"):
            steps -= {step}
    return steps


def lost_checkpoints(
    checkpoints: Iterable[CheckpointInfo], run_directory: Path
) -> list[CheckpointInfo]:
    """The incomplete ones that were complete once, according to the run's events, so not those of
    interrupted saves.

    Where nothing else can be loaded, a start from step 0 would lose them.
    """
    incomplete = [info for info in checkpoints if info.status == "incomplete"]
    completed = completed_steps(run_directory) if incomplete else set()
    return [info for info in incomplete if info.step in completed]


def newest_usable(checkpoints: Iterable[CheckpointInfo]) -> CheckpointInfo | None:
    """The newest complete one: what a start with `resume: auto` tries first. None without any.

    Raises UserError when a newer one is of a later format (to pass it over would repeat steps of a
    later program and set its checkpoint aside) or refused.
    """
    for info in sorted(checkpoints, key=lambda info: info.step, reverse=True):
        if info.status == "later-format":
            raise later_format_error(info)
        if info.status == "refused":
            raise UnsafeCheckpoint(info.reason)
        if info.complete:
            return info
    return None


def later_format_error(info: CheckpointInfo) -> UserError:
    """The refusal of a checkpoint that only a later program can read."""
    return UserError(f"{info.path}: {info.reason}; or name an older checkpoint to go on from")


def best_checkpoint(checkpoints: Iterable[CheckpointInfo]) -> CheckpointInfo | None:
    """The complete checkpoint with the lowest held-out loss (the newer of two equal ones); None
    without any."""
    measured = [info for info in checkpoints if info.complete and info.held_out_loss is not None]
    return min(measured, key=lambda info: (info.held_out_loss, -info.step), default=None)


def prunable(
    checkpoints: Sequence[CheckpointInfo], keep: int, keep_best: bool
) -> list[CheckpointInfo]:
    """Those that may go: complete ones beyond the newest `keep` and (`keep_best`) the best, then
    also abandoned ones.

    Abandoned ones stay until `keep` complete ones exist, so that going back can be undone for a
    while. Damaged ones stay for a person to look at and never count as kept, so at least one
    complete checkpoint always remains.
    """
    assert keep >= 1
    complete = sorted((info for info in checkpoints if info.complete), key=lambda info: info.step)
    if len(complete) < keep:
        return []
    kept = {info.path for info in complete[-keep:]}
    if keep_best and (best_one := best_checkpoint(complete)) is not None:
        kept.add(best_one.path)
    return [
        info
        for info in checkpoints
        if info.status == "abandoned" or (info.complete and info.path not in kept)
    ]


def remove_checkpoint(path: Path) -> None:
    """Delete a checkpoint directory, manifest first: stopped anywhere, what remains is incomplete,
    never damaged.

    Raises OSError when something cannot be deleted; a directory that is gone already is no error.
    """
    if path.is_symlink():
        path.unlink()
        return
    for name in (MANIFEST_NAME, ABANDONED_NAME):
        with contextlib.suppress(FileNotFoundError):
            _remove_entry(path / name)
            sync_directory(path)
    try:
        names = os.listdir(path)
    except FileNotFoundError:
        return
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            _remove_entry(path / name)
    with contextlib.suppress(FileNotFoundError):
        path.rmdir()


def set_aside_checkpoint(path: Path) -> None:
    """Set a checkpoint aside without deleting it: its manifest gets another name. Raises OSError.

    Of one that is a link only the link goes: what it leads to may be another run's.
    """
    if path.is_symlink():
        path.unlink()
        return
    (path / MANIFEST_NAME).replace(path / ABANDONED_NAME)
    sync_directory(path)


def _remove_entry(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def scan_files(path: Path) -> tuple[dict[str, int], dict[str, str]]:
    """Sizes of the regular files by name, and what the other entries are. Raises OSError."""
    sizes: dict[str, int] = {}
    odd: dict[str, str] = {}
    with os.scandir(path) as entries:
        for entry in entries:
            try:
                status = entry.stat()
            except FileNotFoundError:
                if entry.is_symlink():  # else it was deleted a moment ago
                    odd[entry.name] = "is a link to nothing"
            except OSError as error:
                odd[entry.name] = f"cannot be read: {error_text(error)}"
            else:
                if entry.is_symlink() and leads_outside(path / entry.name):
                    odd[entry.name] = LINK_OUTSIDE
                elif stat.S_ISREG(status.st_mode):
                    sizes[entry.name] = status.st_size
                else:
                    odd[entry.name] = f"is {kind_of_file(status.st_mode)}"
    return sizes, odd


def leads_outside(path: Path) -> bool:
    """Whether a file of a checkpoint is a link to a file outside of the checkpoint's directory."""
    return path.is_symlink() and path.exists() and path.resolve().parent != path.parent.resolve()


def kind_of_file(mode: int) -> str:
    return "a directory" if stat.S_ISDIR(mode) else "not a regular file"


def error_text(error: Exception) -> str:
    return f"{error.strerror} (errno {error.errno})" if isinstance(error, OSError) else str(error)
