"""What lies in `checkpoints/`: which are complete, what is wrong with the others, and which may go. Needs no torch.

A checkpoint is a directory `step-<8 digits>`. It is
- `complete`: its manifest is intact and every file it names is there with the right size;
- `incomplete`: it has no manifest: a save that was interrupted, or a deletion (which takes the manifest first);
- `abandoned`: set aside by a return to an earlier checkpoint;
- `damaged`: it has a manifest, but the manifest or a file is not as written.
Listing reads manifests and sizes (milliseconds); only `verify` and loading read the files and compare checksums.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from drillyard.training.checkpoint.files import file_checksum, sync_directory
from drillyard.training.checkpoint.manifest import ABANDONED_NAME, MANIFEST_NAME, Manifest, ManifestError, read_manifest

CHECKPOINTS_NAME = "checkpoints"
_STEP_DIRECTORY = re.compile(r"step-(\d{8,})\Z")

Status = Literal["complete", "incomplete", "abandoned", "damaged"]
Verdict = Literal["ok", "missing", "wrong size", "wrong checksum", "unreadable", "unexpected"]


@dataclass(frozen=True)
class CheckpointInfo:
    """One checkpoint directory. `manifest` is None where none can be believed; `reason` says what is wrong."""

    path: Path
    step: int
    status: Status
    reason: str
    bytes: int
    manifest: Manifest | None

    @property
    def complete(self) -> bool:
        return self.status == "complete"

    @property
    def metadata(self) -> dict[str, Any]:
        return dict(self.manifest.metadata) if self.manifest else {}

    @property
    def identity(self) -> dict[str, Any]:
        return dict(self.manifest.identity) if self.manifest else {}

    @property
    def created(self) -> str | None:
        """When the manifest was written: UTC, ISO 8601."""
        return self.manifest.created if self.manifest else None

    @property
    def held_out_loss(self) -> float | None:
        """metadata["held_out_loss"] when it is a finite number: what the best checkpoint is chosen by."""
        loss = self.metadata.get("held_out_loss")
        return float(loss) if isinstance(loss, int | float) and math.isfinite(loss) else None


@dataclass(frozen=True)
class FileVerdict:
    """What `verify` found in one file. Only `ok` and `unexpected` (the manifest does not name it) are harmless."""

    name: str
    verdict: Verdict
    detail: str = ""

    @property
    def harmless(self) -> bool:
        return self.verdict in ("ok", "unexpected")


def step_directory_name(step: int) -> str:
    """`step-00000050` for step 50."""
    return f"step-{step:08d}"


def list_checkpoints(run_directory: Path) -> list[CheckpointInfo]:
    """All checkpoints of a run directory, oldest step first. A missing directory holds none. Raises OSError."""
    return list_directory(run_directory / CHECKPOINTS_NAME)


def list_directory(checkpoints: Path) -> list[CheckpointInfo]:
    """As `list_checkpoints`, given the `checkpoints` directory itself."""
    try:
        names = os.listdir(checkpoints)
    except (FileNotFoundError, NotADirectoryError):
        return []
    found = sorted((int(match.group(1)), name) for name in names if (match := _STEP_DIRECTORY.match(name)))
    return [info for _, name in found if (info := inspect(checkpoints / name)) is not None]


def inspect(path: Path) -> CheckpointInfo | None:
    """Look at one checkpoint directory: manifest and sizes. None when it is gone. Raises OSError."""
    match = _STEP_DIRECTORY.match(path.name)
    step = int(match.group(1)) if match else -1
    try:
        sizes = _file_sizes(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    total = sum(sizes.values())

    def info(status: Status, reason: str, manifest: Manifest | None = None) -> CheckpointInfo:
        return CheckpointInfo(path, manifest.step if manifest else step, status, reason, total, manifest)

    if MANIFEST_NAME not in sizes:
        if ABANDONED_NAME in sizes:
            return info("abandoned", "set aside when the run went back to an earlier checkpoint")
        return info("incomplete", "it has no manifest: its save or its deletion was interrupted")
    try:
        manifest = read_manifest(path)
    except (ManifestError, OSError) as error:
        return info("damaged", f"{MANIFEST_NAME}: {_message(error)}")
    if match and manifest.step != step:
        return info("damaged", f"{MANIFEST_NAME} is of step {manifest.step}")
    for name, record in manifest.files.items():
        if name not in sizes:
            return info("damaged", f"{name} is missing", manifest)
        if sizes[name] != record.bytes:
            return info("damaged", f"{name} has {sizes[name]} bytes instead of {record.bytes}", manifest)
    return info("complete", "", manifest)


def verify(info: CheckpointInfo) -> Iterator[FileVerdict]:
    """Compare every file with the manifest, reading all of it; one verdict per file, in order of name."""
    if info.manifest is None:
        verdict: Verdict = "missing" if info.status in ("incomplete", "abandoned") else "wrong checksum"
        yield FileVerdict(MANIFEST_NAME, verdict, info.reason)
        return
    yield FileVerdict(MANIFEST_NAME, "ok")
    for name in sorted(info.manifest.files):
        yield verify_file(info.path, name, info.manifest)
    for name in sorted(_file_sizes(info.path).keys() - info.manifest.files.keys() - {MANIFEST_NAME}):
        yield FileVerdict(name, "unexpected", "the manifest does not name it; nothing reads it")


def verify_file(directory: Path, name: str, manifest: Manifest) -> FileVerdict:
    """Compare one file with the manifest: presence, size, then checksum."""
    record, path = manifest.files[name], directory / name
    try:
        size = path.stat().st_size
        if size != record.bytes:
            return FileVerdict(name, "wrong size", f"{size} bytes instead of {record.bytes}")
        found = file_checksum(path)
    except FileNotFoundError:
        return FileVerdict(name, "missing")
    except OSError as error:
        return FileVerdict(name, "unreadable", _message(error))
    if found != record.xxh3_128:
        return FileVerdict(name, "wrong checksum", f"xxh3_128 {found} instead of {record.xxh3_128}")
    return FileVerdict(name, "ok")


def best(checkpoints: Iterable[CheckpointInfo]) -> CheckpointInfo | None:
    """The complete checkpoint with the lowest held-out loss (the newer of two equal ones); None without any."""
    measured = [info for info in checkpoints if info.complete and info.held_out_loss is not None]
    return min(measured, key=lambda info: (info.held_out_loss, -info.step), default=None)


def prunable(checkpoints: Sequence[CheckpointInfo], keep: int, keep_best: bool) -> list[CheckpointInfo]:
    """Those that may go: complete ones beyond the newest `keep` and (`keep_best`) the best, then also abandoned ones.

    Abandoned ones stay until `keep` complete ones exist, so that going back can be undone for a while. Damaged ones
    are left for a person to look at and never count as kept; so at least one complete checkpoint always remains.
    """
    assert keep >= 1
    complete = sorted((info for info in checkpoints if info.complete), key=lambda info: info.step)
    if len(complete) < keep:
        return []
    kept = {info.path for info in complete[-keep:]}
    if keep_best and (best_one := best(complete)) is not None:
        kept.add(best_one.path)
    return [info for info in checkpoints if info.status == "abandoned" or (info.complete and info.path not in kept)]


def remove_checkpoint(path: Path) -> None:
    """Delete a checkpoint directory, manifest first: stopped anywhere, what remains is incomplete, never damaged.

    Raises OSError when something cannot be deleted; a directory that is gone already is no error.
    """
    for name in (MANIFEST_NAME, ABANDONED_NAME):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            (path / name).unlink()
            sync_directory(path)
    try:
        names = os.listdir(path)
    except FileNotFoundError:
        return
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            (path / name).unlink()
    with contextlib.suppress(FileNotFoundError):
        path.rmdir()


def abandon_checkpoint(path: Path) -> None:
    """Set a checkpoint aside without deleting it: its manifest gets another name. Raises OSError."""
    (path / MANIFEST_NAME).replace(path / ABANDONED_NAME)
    sync_directory(path)


def _file_sizes(path: Path) -> dict[str, int]:
    with os.scandir(path) as entries:
        return {entry.name: entry.stat().st_size for entry in entries if entry.is_file()}


def _message(error: Exception) -> str:
    return f"{error.strerror} (errno {error.errno})" if isinstance(error, OSError) else str(error)
