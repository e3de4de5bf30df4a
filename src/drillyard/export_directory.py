"""The directory of an exported model: which files an export wrote, and how new files replace them.

An export keeps a record in its directory, `.drillyard-export.json`: name, size and checksum of each
file that it wrote. It writes to a missing or empty directory, or replaces an earlier export if the
record accounts for everything in the directory. So it never deletes or replaces a file that an
export did not write, or that was changed since.

New files are written beside the old ones as NAME.incomplete; the record lists them first. When all
are complete, config.json (of an adapter adapter_config.json) is deleted, the other files are moved
into place, and the new one comes last: without it, no program takes the directory for a model. The
next export finishes one that was killed at any point. Needs no torch.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath

import xxhash

from drillyard.errors import UserError
from drillyard.guarded_files import open_unbuffered, read_json
from drillyard.safe_files import FileChecksum, flush, replace_file

RECORD = ".drillyard-export.json"
CONFIGS = ("config.json", "adapter_config.json")
"""What makes a directory a model, or an adapter."""
EARLIER_EXPORT = "has an earlier export"
"""The reason of `reason_to_refuse` that `overwrite` removes."""
_INCOMPLETE = ".incomplete"
_VERSION = 1
_NAMES_SHOWN = 3


@dataclass(frozen=True)
class ExportRecord:
    """The files that exports wrote into a directory, by relative path.

    `files`: the checksum of each file; two while it is being replaced. `writing`: the files of an
    export that is running, or was interrupted.
    """

    files: dict[str, list[FileChecksum]] = field(default_factory=dict)
    writing: list[str] = field(default_factory=list)

    def accounts_for(self, name: str, size: int | None) -> bool:
        """Whether an export wrote the file `name` of `size` bytes, or the empty directory `name`
        (size None)."""
        if size is None:
            return any(
                PurePosixPath(name) in PurePosixPath(file).parents
                for file in [*self.files, *self.writing]
            )
        if name in (RECORD, f"{RECORD}{_INCOMPLETE}"):
            return True
        if name.endswith(_INCOMPLETE) and name.removesuffix(_INCOMPLETE) in self.writing:
            return True
        return any(content.bytes == size for content in self.files.get(name, []))


def incomplete(directory: Path, name: str) -> Path:
    """The path of the file `name` until it is complete."""
    return directory / f"{name}{_INCOMPLETE}"


def holds_model(directory: Path) -> bool:
    """Whether a complete model or adapter is in the directory."""
    return any((directory / name).is_file() for name in CONFIGS)


def reason_to_refuse(directory: Path, *, overwrite: bool) -> str | None:
    """Reason why an export to `directory` is refused by names and sizes, or None if it is allowed.
    Raises OSError."""
    if not os.path.lexists(directory):
        return None
    if not directory.is_dir():
        return "is not a directory"
    entries = dict(_entries(directory, ""))
    record = read_record(directory)
    if foreign := [name for name, size in entries.items() if not record.accounts_for(name, size)]:
        more = f" and {len(foreign) - _NAMES_SHOWN} more" if len(foreign) > _NAMES_SHOWN else ""
        return (
            f"has {', '.join(sorted(foreign)[:_NAMES_SHOWN])}{more}, not written by an export or"
            " changed since"
        )
    return EARLIER_EXPORT if record.files and not overwrite else None


def first_changed(directory: Path, share: int = 0, num_shares: int = 1) -> str | None:
    """The first recorded file that was changed since the export, as a reason to refuse, or None.
    Raises OSError.

    Reads every `num_shares`-th file, from number `share` on: ranks do this together.
    """
    for name, contents in sorted(read_record(directory).files.items())[share::num_shares]:
        path = directory / name
        if path.is_file() and _content_of(path) not in contents:
            return f"has {name}, which was changed since it was exported"
    return None


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Lock a directory against other exports, where its file system has locks. UserError if one is
    running."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"{directory}: another export is writing it; wait for its end"
            ) from None
        except OSError:
            pass
        yield
    finally:
        os.close(descriptor)


def begin(directory: Path, names: list[str]) -> None:
    """Record that the files `names` will be written; delete files of an interrupted export. Raises
    OSError."""
    record = read_record(directory)
    _delete_incomplete(directory, record)
    there = {
        name: contents for name, contents in record.files.items() if (directory / name).is_file()
    }
    _write_record(directory, ExportRecord(there, names))


def cancel(directory: Path) -> None:
    """Delete the files written since `begin`; an earlier export stays intact. Raises OSError."""
    record = read_record(directory)
    _delete_incomplete(directory, record)
    if record.files:
        _write_record(directory, ExportRecord(record.files))
    else:
        (directory / RECORD).unlink(missing_ok=True)


def complete(directory: Path, contents: Mapping[str, FileChecksum]) -> None:
    """Record the checksums of all files that `begin` listed; then `put_in_place` may run. Raises
    OSError."""
    old = read_record(directory).files
    both = {name: [*old.get(name, []), content] for name, content in contents.items()}
    _write_record(directory, ExportRecord({**old, **both}, list(contents)))


def put_in_place(directory: Path, contents: Mapping[str, FileChecksum]) -> None:
    """Replace the files of an earlier export by the complete ones. Raises OSError; the next export
    repeats it."""
    # Delete the config first: without it the old export is not a model, even if this is
    # interrupted.
    for name in sorted(read_record(directory).files, key=lambda name: name not in CONFIGS):
        if name in CONFIGS or name not in contents:
            (directory / name).unlink(missing_ok=True)
            _remove_empty_parents(directory, name)
    for name in sorted(contents, key=lambda name: name in CONFIGS):
        incomplete(directory, name).replace(directory / name)
    _write_record(directory, ExportRecord({name: [content] for name, content in contents.items()}))
    flush(directory)


def read_record(directory: Path) -> ExportRecord:
    """The record of a directory; empty if it is missing or cannot be read."""
    try:
        content = read_json(directory / RECORD)
        files = {
            name: [FileChecksum(**entry) for entry in entries]
            for name, entries in content["files"].items()
        }
        record = ExportRecord(files, list(content["writing"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return ExportRecord()
    names = [*record.files, *record.writing]
    is_inside = all(
        name and not name.startswith("/") and ".." not in PurePosixPath(name).parts
        for name in names
    )
    return record if is_inside and content.get("version") == _VERSION else ExportRecord()


def _content_of(path: Path) -> FileChecksum:
    with open_unbuffered(path) as file:
        return FileChecksum(
            os.fstat(file.fileno()).st_size, hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()
        )


def _write_record(directory: Path, record: ExportRecord) -> None:
    text = json.dumps({"version": _VERSION, **asdict(record)}, indent=1, sort_keys=True)
    replace_file(
        directory / RECORD, text.encode(), draft=incomplete(directory, RECORD), durable=True
    )


def _delete_incomplete(directory: Path, record: ExportRecord) -> None:
    for name in record.writing:
        incomplete(directory, name).unlink(missing_ok=True)
        _remove_empty_parents(directory, name)


def _remove_empty_parents(directory: Path, name: str) -> None:
    for parent in PurePosixPath(name).parents[:-1]:
        with contextlib.suppress(OSError):
            (directory / parent).rmdir()


def _entries(directory: Path, prefix: str) -> Iterator[tuple[str, int | None]]:
    """(relative path, bytes) of all entries below a directory; None for an empty directory, -1 for
    a device or a pipe."""
    with os.scandir(directory) as found:
        for entry in found:
            name = f"{prefix}{entry.name}"
            if entry.is_dir(follow_symlinks=False):
                yield from list(_entries(directory / entry.name, f"{name}/")) or [(name, None)]
            elif entry.is_file(follow_symlinks=False):
                yield name, entry.stat(follow_symlinks=False).st_size
            else:
                yield name, -1
