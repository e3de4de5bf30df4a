"""`drillyard checkpoint`: find what a path means, verify checkpoints by every byte, and plan
deletions. Needs no torch.

`verify` reads every file, compares it with the manifest, and checks the pickles of files that are
as written (archive_check.py). `mark_unsafe` checks the index and the plain values alone, in
milliseconds.

A checkpoint counts as good only when all its bytes have just been read and are as written; size and
manifest are not enough to delete another one for. So `plan_prune` reads the checkpoints that it
keeps, newest first, until it has found as many good ones as are to be kept, and only older ones may
go. A damaged one is neither counted nor deleted: it may be all that is left of a step. Without a
good one nothing is deleted. Where nothing could be deleted anyway, nothing is read. The cost is one
read of what is kept.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from drillyard.errors import NotFoundError, UserError
from drillyard.training.checkpoint.archive_check import require_plain, unsafe_files
from drillyard.training.checkpoint.index_reader import UnsafeCheckpoint
from drillyard.training.checkpoint.inventory import (
    CHECKPOINTS_NAME,
    HELD_OUT_NAME,
    LINK_OUTSIDE,
    CheckpointInfo,
    Status,
    best_checkpoint,
    error_text,
    inspect,
    kind_of_file,
    leads_outside,
    list_checkpoints_in,
    prunable,
    scan_files,
    step_of,
)
from drillyard.training.checkpoint.manifest import (
    MANIFEST_NAME,
    Manifest,
    file_checksum,
    is_file_name,
)

# Files read side by side by `verify`: one stream does not saturate network or RAID storage, and
# hashing drops the GIL.
VERIFY_THREADS = 8

Verdict = Literal[
    "ok",
    "missing",
    "wrong size",
    "wrong checksum",
    "unreadable",
    "unexpected",
    "damaged",
    "later-format",
    "refused",
]
# Called with the number of bytes just read, from several threads.
OnRead = Callable[[int], None]
LEFTOVER_STATUSES = ("incomplete", "abandoned")
# What is wrong with a complete checkpoint, found by reading it; None when it is good.
FindProblem = Callable[[CheckpointInfo], str | None]


@dataclass(frozen=True)
class FileVerdict:
    """Result of `verify` for one file. Only `ok` and `unexpected` (the manifest does not name it)
    are harmless."""

    name: str
    verdict: Verdict
    detail: str = ""

    @property
    def harmless(self) -> bool:
        return self.verdict in ("ok", "unexpected")


@dataclass(frozen=True)
class VerifiedCheckpoint:
    """The verdicts on the files of one checkpoint."""

    info: CheckpointInfo
    files: list[FileVerdict]

    @property
    def good(self) -> bool:
        """Whether it can be loaded, every byte of it as written."""
        return self.info.complete and all(file.harmless for file in self.files)

    @property
    def problem(self) -> str | None:
        """The first thing that is wrong, in words; None when it is good."""
        bad = next((file for file in self.files if not file.harmless), None)
        if bad is None:
            return None
        return f"{bad.name}: {bad.verdict}" + (f" ({bad.detail})" if bad.detail else "")


def verify_all_files(info: CheckpointInfo, on_read: OnRead | None = None) -> VerifiedCheckpoint:
    """Read all of one checkpoint."""
    return VerifiedCheckpoint(info, list(verify(info, on_read)))


def mark_unsafe(checkpoints: Sequence[CheckpointInfo]) -> list[CheckpointInfo]:
    """The same, with the status `refused` for complete ones whose index or values are not plain.
    Reads those."""
    return [_with_refusal(info) if info.complete else info for info in checkpoints]


def _with_refusal(info: CheckpointInfo) -> CheckpointInfo:
    assert info.manifest is not None
    try:
        require_plain(info.path, info.manifest)
    except UnsafeCheckpoint as refusal:
        return replace(info, status="refused", reason=str(refusal))
    except OSError as error:
        return replace(info, status="damaged", reason=f"it cannot be read: {error.strerror}")
    return info


def verify(info: CheckpointInfo, on_read: OnRead | None = None) -> Iterator[FileVerdict]:
    """Compare every file with the manifest, reading all of it; one verdict per file, in order of
    name.

    Where all are as written, their pickles are checked without loading them: see archive_check.py.
    """
    manifest = info.manifest
    if manifest is None:
        absent: dict[Status, Verdict] = {
            "incomplete": "missing",
            "abandoned": "missing",
            "later-format": "later-format",
        }
        yield FileVerdict(MANIFEST_NAME, absent.get(info.status, "damaged"), info.reason)
        return
    yield FileVerdict(MANIFEST_NAME, "ok")
    with ThreadPoolExecutor(VERIFY_THREADS) as threads:
        verdicts = list(
            threads.map(
                lambda name: verify_file(info.path, name, manifest, on_read), sorted(manifest.files)
            )
        )
    refused = (
        unsafe_files(info.path, manifest) if all(verdict.harmless for verdict in verdicts) else {}
    )
    yield from (
        (
            FileVerdict(verdict.name, "refused", refused[verdict.name])
            if verdict.name in refused
            else verdict
        )
        for verdict in verdicts
    )
    try:
        sizes, odd = scan_files(info.path)
    except OSError as error:
        yield FileVerdict(".", "unreadable", error_text(error))
        return
    for name in sorted({*sizes, *odd} - manifest.files.keys() - {MANIFEST_NAME, HELD_OUT_NAME}):
        yield FileVerdict(name, "unexpected", "the manifest does not name it; nothing reads it")


def verify_file(
    directory: Path, name: str, manifest: Manifest, on_read: OnRead | None = None
) -> FileVerdict:
    """Compare one file with the manifest: presence, size, then checksum."""
    record, path = manifest.files[name], directory / name
    assert is_file_name(name), name
    try:
        if leads_outside(path):
            return FileVerdict(name, "unreadable", LINK_OUTSIDE)
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # a pipe, say, would be waited for without end
            return FileVerdict(name, "unreadable", kind_of_file(status.st_mode))
        if status.st_size != record.bytes:
            return FileVerdict(
                name, "wrong size", f"{status.st_size} bytes instead of {record.bytes}"
            )
        found = file_checksum(path, on_read)
    except FileNotFoundError:
        return FileVerdict(name, "missing", "a link to nothing" if path.is_symlink() else "")
    except OSError as error:
        return FileVerdict(name, "unreadable", error_text(error))
    if found != record.xxh3_128:
        return FileVerdict(name, "wrong checksum", f"xxh3_128 {found} instead of {record.xxh3_128}")
    return FileVerdict(name, "ok")


@dataclass(frozen=True)
class CheckpointSelection:
    """Selection by a path on the command line: a `checkpoints` directory, and the one checkpoint
    that the path names.

    `run_directory` is None where the directory is a copy outside of a run.
    """

    directory: Path
    run_directory: Path | None
    checkpoints: list[CheckpointInfo]
    one: CheckpointInfo | None = None


@dataclass
class PrunePlan:
    """Checkpoints to keep, read and found good; to remove, in this order; and damaged ones, with
    the reason."""

    keep: list[CheckpointInfo] = field(default_factory=list)
    remove: list[CheckpointInfo] = field(default_factory=list)
    damaged: list[tuple[CheckpointInfo, str]] = field(default_factory=list)


def select_checkpoints(path: Path) -> CheckpointSelection:
    """Find the checkpoints of `path`: a run directory, its `checkpoints`, or one checkpoint.

    Raises UserError when it is none of them or cannot be read.
    """
    path = Path(os.path.abspath(path))
    try:
        if step_of(path) is not None and (one := inspect(path)) is not None:
            return CheckpointSelection(path.parent, _run_directory_of(path.parent), [one], one)
        directory = path / CHECKPOINTS_NAME if (path / CHECKPOINTS_NAME).is_dir() else path
        checkpoints = list_checkpoints_in(directory)
    except OSError as error:
        raise UserError(
            f"{path}: cannot be read: {error.strerror}; check its storage and rights"
        ) from None
    if directory.name != CHECKPOINTS_NAME and not checkpoints:
        raise UserError(
            f"{path}: there are no checkpoints; give a run directory (it holds"
            f" `{CHECKPOINTS_NAME}`)"
        )
    return CheckpointSelection(directory, _run_directory_of(directory), checkpoints)


def choose_step(target: CheckpointSelection, step: int) -> CheckpointInfo:
    """The checkpoint of `step`. Raises UserError, naming the steps there are, when there is
    none."""
    for info in target.checkpoints:
        if step_of(info.path) == step:
            return info
    there = ", ".join(str(info.step) for info in target.checkpoints) or "none"
    raise NotFoundError(
        f"{target.directory}: there is no checkpoint of step {step}; there are: {there}"
    )


def plan_prune(
    checkpoints: Sequence[CheckpointInfo],
    keep: int,
    keep_best: bool,
    *,
    left_overs: bool,
    problem_with: FindProblem,
) -> PrunePlan:
    """Keep the newest `keep` good checkpoints and (`keep_best`) the good one with the lowest
    held-out loss.

    Older complete ones go, and with `left_overs` also incomplete and abandoned ones. `problem_with`
    reads a checkpoint; it is asked only for those that would be kept, and only when something could
    go.
    """
    assert keep >= 1
    complete = sorted(
        (info for info in checkpoints if info.complete), key=lambda info: info.step, reverse=True
    )
    remains = [info for info in checkpoints if left_overs and info.status in LEFTOVER_STATUSES]
    if not prunable(complete, keep, keep_best) and not remains:
        return PrunePlan(keep=complete)
    plan = PrunePlan()

    def keep_if_good(info: CheckpointInfo) -> None:
        if (problem := problem_with(info)) is not None:
            plan.damaged.append((info, problem))
        else:
            plan.keep.append(info)

    rest = list(complete)
    while rest and len(plan.keep) < keep:
        keep_if_good(rest.pop(0))
    while keep_best and (winner := best_checkpoint([*plan.keep, *rest])) in rest:
        assert winner is not None
        rest.remove(winner)
        keep_if_good(winner)
    if plan.keep:
        plan.remove = [*reversed(rest), *remains]
    return plan


def _run_directory_of(directory: Path) -> Path | None:
    return directory.parent if directory.name == CHECKPOINTS_NAME else None
