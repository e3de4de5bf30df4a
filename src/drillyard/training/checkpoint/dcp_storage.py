"""Storage for torch.distributed.checkpoint that takes checksums while writing and verifies them
before use.

Writing: every byte passes an XXH3-128 digest on its way to the file. Once the file is durable, the
rank reads it back (from the storage, not from the kernel's copy) and compares: a checkpoint that is
complete was good when it was completed, so older ones may be deleted on its account. That costs the
saving thread one read of the rank's own file. The records of a rank's files travel to the
coordinator among its write results. `finish` runs on the coordinator once every rank has done so:
it writes `.metadata`, checks that it sees every file, and writes the manifest last. Reading: each
rank hashes every file that its plan reads from, and does so while planning, before any tensor is
touched; an error there reaches all ranks, so all of them turn to the same older checkpoint. Nothing
is unpickled that `contents` has not found to be plain.

Built on the public FileSystemWriter, FileSystemReader and FileSystem, and on these parts of them
that torch documents only in their source: the attribute `fs`, and the storage data
(`_StorageInfo`). One thread writes: with more, FileSystemWriter loses the exceptions of its
threads.
"""

from __future__ import annotations

import errno
import io
import os
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import xxhash
from torch.distributed.checkpoint.filesystem import (
    FileSystem,
    FileSystemReader,
    FileSystemWriter,
    _StorageInfo,
)
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from drillyard.errors import UserError
from drillyard.guarded_files import open_regular
from drillyard.safe_files import VISIBLE_WITHIN_SECONDS, make_directory
from drillyard.training.checkpoint.archive_check import check_archive
from drillyard.training.checkpoint.index_reader import (
    METADATA_NAME,
    ArchiveLocation,
    CheckpointIndex,
)
from drillyard.training.checkpoint.inventory import remove_checkpoint
from drillyard.training.checkpoint.manifest import (
    MANIFEST_NAME,
    FileRecord,
    Manifest,
    checksum,
    encode,
    file_checksum,
    forget_cached,
    sync_directory,
    write_manifest,
)
from drillyard.training.checkpoint.verification import verify_file

WRITE_BUFFER_BYTES = 1024 * 1024


class DamagedCheckpoint(Exception):
    """A file of a checkpoint is not as it was written, or cannot be read; the text names it."""


@dataclass(frozen=True)
class FileWritten(WriteResult):
    """Not a tensor but a whole file that a rank wrote: `storage_data` is its FileRecord,
    `index.fqn` its name."""


class _HashingStream(io.RawIOBase):
    """A file opened for writing that takes the digest of what passes, in blocks of
    `WRITE_BUFFER_BYTES` or more.

    A failed write is remembered and raised by `flush` and `close`, not by `write`: torch.save calls
    `write` from C++, where an exception would lose its errno, and a writer that is torn down
    halfway may end the process.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._file = io.FileIO(path, "wb")
        self._pending = bytearray()
        self._digest = xxhash.xxh3_128()
        self._bytes = 0
        self._error: OSError | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._bytes += view.nbytes
        if len(self._pending) + view.nbytes < WRITE_BUFFER_BYTES:
            self._pending += view
        else:
            self._write_pending()
            self._write_now(view)
        return view.nbytes

    def tell(self) -> int:
        return self._bytes

    def fileno(self) -> int:
        """The descriptor, with everything written: the caller is about to sync the file."""
        self._write_pending()
        return self._file.fileno()

    def flush(self) -> None:
        self._write_pending()
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Close the file; the error to raise is the first one there was."""
        if self.closed:
            return
        self._write_pending()
        try:
            self._file.close()
        except OSError as error:
            self._error = self._error or error
        first_error, self._error = self._error, None
        super().close()
        if first_error is not None:
            raise first_error

    def _write_pending(self) -> None:
        pending, self._pending = self._pending, bytearray()
        self._write_now(memoryview(pending))

    def _write_now(self, view: memoryview) -> None:
        if self._error is not None:
            return
        self._digest.update(view)
        try:
            while view:
                view = view[self._file.write(view) :]
        except OSError as error:
            self._error = error

    @property
    def record(self) -> FileRecord:
        return FileRecord(self._bytes, self._digest.hexdigest())


class HashingFileSystem(FileSystem):
    """torch's local file system, keeping a FileRecord of every file written through it, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.written: dict[str, FileRecord] = {}

    @contextmanager
    def create_stream(
        self, path: str | os.PathLike[str], mode: str
    ) -> Generator[io.IOBase, None, None]:
        if mode != "wb":
            with open_regular(path) as plain:
                yield cast("io.IOBase", plain)
            return
        stream = _HashingStream(Path(path))
        try:
            yield stream
        except BaseException:
            # The writer's own failure is the one to report.
            with suppress(OSError):
                stream.close()
            raise
        stream.close()
        self.written[Path(path).name] = stream.record

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.written[Path(new_path).name] = self.written.pop(Path(path).name)


class CheckpointWriter(FileSystemWriter):
    """Writes one checkpoint directory. `make_manifest(files)` gives the manifest once all files are
    known; `before_write` is called on each rank before it writes its file."""

    def __init__(
        self,
        path: Path,
        make_manifest: Callable[[dict[str, FileRecord]], Manifest],
        before_write: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(
            path,
            single_file_per_rank=True,
            sync_files=True,
            thread_count=1,
            per_thread_copy_ahead=0,
        )
        self._make_manifest = make_manifest
        self._before_write = before_write
        self.fs: HashingFileSystem = HashingFileSystem()
        self.manifest: Manifest | None = None
        """Of the complete checkpoint, on the coordinator."""

    @property
    def directory(self) -> Path:
        return Path(self.path)

    def storage_meta(self) -> StorageMeta | None:
        """None: a checkpoint can be moved, so it does not record where it was written."""
        return None

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On the coordinator, before any rank writes: an empty directory, whatever an earlier
        attempt left in it."""
        remove_checkpoint(self.directory)
        # Not their parents: where the mount of the run directory is gone, these would be made on
        # the disk below it.
        make_directory(self.directory.parent)
        make_directory(self.directory)
        sync_directory(self.directory.parent)
        return list(super().prepare_global_plan(plans))

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file, durably. A rank with nothing to write (a replica) writes none."""
        results: list[WriteResult] = []
        if plan.items:
            self._before_write()
            # Made by the coordinator; made here too where hosts do not share it, so that `finish`
            # can say so.
            make_directory(self.directory, parents=True)
            results = list(super().write_data(plan, planner).value())
            sync_directory(self.directory)
            for name, record in self.fs.written.items():
                _require_readable(self.directory / name, record)
        results += [
            FileWritten(index=MetadataIndex(name), size_in_bytes=record.bytes, storage_data=record)
            for name, record in self.fs.written.items()
        ]
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator: `.metadata`, then the manifest. From here on the checkpoint exists.

        Raises OSError when one of the two cannot be written, or does not read back as written.
        """
        files = {
            r.index.fqn: r.storage_data
            for rank in results
            for r in rank
            if isinstance(r, FileWritten)
        }
        super().finish(
            metadata, [[r for r in rank if not isinstance(r, FileWritten)] for rank in results]
        )
        files[METADATA_NAME] = self.fs.written[METADATA_NAME]
        _require_readable(self.directory / METADATA_NAME, files[METADATA_NAME])
        _require_visible(self.directory, files)
        manifest = self._make_manifest(files)
        sync_directory(self.directory)
        write_manifest(self.directory, manifest)
        raw = encode(manifest)
        _require_readable(self.directory / MANIFEST_NAME, FileRecord(len(raw), checksum(raw)))
        self.manifest = manifest


class CheckpointReader(FileSystemReader):
    """Reads one checkpoint directory; no byte of a file is used before the whole file's checksum is
    right.

    `index` stands for `.metadata`, which FileSystemReader would unpickle. Planning raises
    UnsafeCheckpoint for an archive that is not plain.
    """

    def __init__(self, path: Path, manifest: Manifest, index: Metadata) -> None:
        super().__init__(path)
        self._manifest = manifest
        self._index = index

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return self._index

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        entries = [self.storage_data[item.storage_index] for item in plan.items]
        for name in sorted({entry.relative_path for entry in entries}):
            require_undamaged(Path(self.path), name, self._manifest)
        for entry in entries:
            check_archive(
                Path(self.path), ArchiveLocation(entry.relative_path, entry.offset, entry.length)
            )
        return plan


def metadata_of(index: CheckpointIndex, manifest: Manifest) -> Metadata:
    """The index as torch's own objects. Raises UserError for a dtype that this torch does not
    have."""
    stored: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    for name, tensor in index.tensors.items():
        dtype = getattr(torch, tensor.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise UserError(
                f"{name}: torch {torch.__version__} has no dtype {tensor.dtype}, and the checkpoint"
                f" was written with torch {manifest.torch_version}; use torch"
                f" {manifest.torch_version.partition('+')[0]} or later"
            )
        pieces = [
            ChunkStorageMetadata(torch.Size(offset), torch.Size(shape))
            for offset, shape in tensor.pieces
        ]
        stored[name] = TensorStorageMetadata(
            TensorProperties(dtype=dtype), torch.Size(tensor.shape), pieces
        )
    stored |= {name: BytesStorageMetadata() for name in index.values}
    places = {
        MetadataIndex(name, offset): _StorageInfo(place.name, place.start, place.bytes)
        for (name, offset), place in index.places.items()
    }
    return Metadata(stored, storage_data=places, storage_meta=StorageMeta())


def require_undamaged(directory: Path, name: str, manifest: Manifest) -> None:
    """Raise DamagedCheckpoint unless the file is as the manifest says."""
    if name not in manifest.files:
        raise DamagedCheckpoint(f"{directory / name}: the manifest does not name it")
    verdict = verify_file(directory, name, manifest)
    if verdict.verdict != "ok":
        raise DamagedCheckpoint(
            f"{directory / name}: {verdict.verdict}"
            + (f" ({verdict.detail})" if verdict.detail else "")
        )


def _require_readable(path: Path, record: FileRecord) -> None:
    """Raise OSError unless a durable file reads back as it was written."""
    forget_cached(path)
    if file_checksum(path) != record.xxh3_128:
        raise OSError(errno.EIO, "what was written reads back with other bytes", str(path))


def _require_visible(directory: Path, files: dict[str, FileRecord]) -> None:
    """Raise OSError unless this rank sees all ranks' files: it does not when hosts write to disks
    of their own."""
    waiting = dict(files)
    end = time.monotonic() + VISIBLE_WITHIN_SECONDS
    while True:
        waiting = {
            name: record
            for name, record in waiting.items()
            if not _has_size(directory / name, record.bytes)
        }
        if not waiting:
            return
        if time.monotonic() > end:
            raise OSError(
                f"{len(waiting)} of {len(files)} files are not visible to the rank that completes"
                f" the checkpoint ({sorted(waiting)[0]} in {directory}): the run directory must be"
                " on storage that all hosts share"
            )
        time.sleep(0.1)


def _has_size(path: Path, size: int) -> bool:
    try:
        return path.stat().st_size == size
    except FileNotFoundError:
        return False
