"""The tokenised cache: built once, complete or absent, read by every rank through memory maps.

    <cache>/tokenized/<key>/                   key: content of the source, tokenizer, format,
                                               settings, version
        train.tokens train.loss ...            flat files (see mapped_sequences.py)
        held_out.tokens ...
        manifest.json                          sizes and xxh3-128 of every file, counts, own
                                               checksum; written last

A cache is built in a temporary directory and renamed into place, so a reader sees all of it or
nothing; if two processes build the same cache, the second uses the first one's. A damaged cache is
reported and rebuilt. Verification:

- every rank, at every opening: the manifest and the size of every file;
- the rank that prepares: the checksums of the index (32 bytes per sequence), and of every file if
  the cache is small (`VERIFIED_WHOLE_BYTES`, at most a second) or a reader has marked it as
  damaged;
- the rank that reads a sequence: the checksum of that sequence (see mapped_sequences.py).

So opening a cache of 500 GB in sequences of 4,096 tokens costs as much as reading 2 GB.

Directories of dead builders are removed if they are certainly dead (same boot and process
namespace, no such process) or a day old.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from drillyard.config.environment import OPENING
from drillyard.config.fetch_limits import is_withheld, withheld_error
from drillyard.config.run_data import DataConfig
from drillyard.data.encoder import HELD_OUT, TRAIN, Encoded, EncodedPart
from drillyard.data.mapped_sequences import BULK, DAMAGED_FILE, FILES, ORIGINS, row_checksum
from drillyard.data.raw_batches import NUMBER_BITS, Origin, hash_bytes_of, json_digest
from drillyard.data.sequence_packing import PackedSequences, Packer, padded
from drillyard.errors import UserError
from drillyard.guarded_files import LARGEST_MODEL_DOCUMENT_BYTES, read_json
from drillyard.safe_files import ChecksummedFile, flush, make_directory, publish_directory

ENCODING_VERSIONS = {"chat": 4, "function-calling": 2, "no start token": 2}
"""Raised when the same source gives other sequences: then runs cannot continue in the same sample
order. 1 for documents not named here."""
FORMAT_VERSION = 3
"""Raised when the layout on disk changes: then caches are rebuilt, and runs continue."""
PART_NAMES = {TRAIN: "train", HELD_OUT: "held_out"}
MANIFEST = "manifest.json"
STALE_SECONDS = 24 * 3600
VERIFIED_WHOLE_BYTES = 1 << 30
Verify = Literal["sizes", "start", "all"]
"""Manifest and sizes; what the rank that prepares verifies; every byte."""
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def cache_root(data: DataConfig) -> Path:
    """The cache directory: `data.cache_directory`, $DRILLYARD_CACHE or ~/.cache/drillyard. Created
    if missing."""
    if (named := data.cache_directory) is not None and OPENING in named and is_withheld(named):
        raise withheld_error(f"data.cache_directory: {named}")
    root = Path(
        data.cache_directory or os.environ.get("DRILLYARD_CACHE") or "~/.cache/drillyard"
    ).expanduser()
    try:
        for name in ("tokenized", "tokenizers", "hashes"):
            make_directory(root / name, parents=True)
    except OSError as error:
        raise UserError(
            f"{root}: the cache directory cannot be created ({error.strerror}). Set"
            " data.cache_directory."
        ) from None
    return root


class DamagedCache(Exception):
    """A cache directory differs from its manifest; the text names the first difference."""


@dataclass(frozen=True)
class PartSettings:
    """Settings, besides the pieces, on which the files of a part depend."""

    sequence_length: int
    packing: bool
    pad_id: int
    token_dtype: np.dtype[Any]
    covers_text: (
        bool  # the counted bytes of an uncut document are those of the tokens that carry loss
    )


class _PartWriter:
    """Packs the pieces of one part and appends the sequences to its files."""

    def __init__(self, directory: Path, part: str, settings: PartSettings) -> None:
        self.part, self.settings = part, settings
        self.packer = Packer(settings.sequence_length, settings.packing)
        self.files = {
            name: ChecksummedFile(directory / f"{part}.{name}") for name in (*FILES, ORIGINS)
        }
        self.counts: Counter[str] = Counter()
        self.firsts: dict[str, tuple[str, str, int]] = {}
        self.first_fault = ""
        self.origins: dict[Origin, int] = {}
        self.num_sequences = self.num_tokens = self.num_pieces = self.position = 0

    def add(self, encoded: Encoded, part: EncodedPart) -> None:
        self.counts.update(part.counts)
        self.first_fault = self.first_fault or part.first_fault
        for what, place in part.firsts.items():
            name, unit = encoded.origins[place >> NUMBER_BITS]
            self.firsts.setdefault(what, (name, unit, place & (1 << NUMBER_BITS) - 1))
        if (pieces := part.pieces) is not None:
            self.counts["pieces"] += len(pieces.lengths)
            pieces.places = self._numbered(pieces.places, encoded.origins)
            documents = np.array(part.documents, np.uint64)
            documents[:, 1] = self._numbered(documents[:, 1], encoded.origins)
            self.files["documents"].write(documents.tobytes())
            for packed in self.packer.add(pieces):
                self._append(packed)

    def _numbered(
        self, places: npt.NDArray[np.uint64], origins: tuple[Origin, ...]
    ) -> npt.NDArray[np.uint64]:
        """Places with the cache's numbers of origins instead of the raw batch's."""
        numbers = np.array(
            [self.origins.setdefault(origin, len(self.origins)) for origin in origins], np.uint64
        )
        origin, line = np.divmod(places, np.uint64(1 << NUMBER_BITS))
        return np.asarray(
            numbers[origin.astype(np.int64)] << np.uint64(NUMBER_BITS) | line, np.uint64
        )

    def _append(self, packed: PackedSequences) -> None:
        loss, starts = np.packbits(packed.loss), np.packbits(packed.starts)
        room = padded(packed.lengths)
        ends = np.cumsum(room)
        checksums = [
            row_checksum(
                packed.tokens[begin:end], loss[begin >> 3 : end >> 3], starts[begin >> 3 : end >> 3]
            )
            for begin, end in zip((ends - room).tolist(), ends.tolist(), strict=True)
        ]
        for name, array in {
            "tokens": packed.tokens,
            "loss": loss,
            "starts": starts,
            "lengths": packed.lengths,
            "valid_tokens": packed.valid_tokens,
            "offsets": self.position + ends - room,
            "checksums": np.array(checksums, np.uint64),
            "first_piece": self.num_pieces + np.cumsum(packed.pieces) - packed.pieces,
            "places": packed.places,
        }.items():
            self.files[name].write(array.tobytes())
        self.num_pieces += len(packed.places)
        self.position += int(room.sum())
        self.num_sequences += len(packed.lengths)
        self.num_tokens += int(packed.lengths.sum(dtype=np.int64))

    def discard(self) -> None:
        """Close files, whose last bytes a full disk may refuse."""
        for file in self.files.values():
            with contextlib.suppress(OSError):
                file.stream.close()

    def finish(self) -> dict[str, Any]:
        for packed in self.packer.finish():
            self._append(packed)
        self.files[ORIGINS].write(json.dumps(list(self.origins)).encode())
        exact = (
            self.settings.covers_text
            and not self.counts["truncated"]
            and not self.counts["pieces_without_loss"]
        )
        return {
            "files": {
                f"{self.part}.{name}": asdict(file.close()) for name, file in self.files.items()
            },
            "num_sequences": self.num_sequences,
            "num_tokens": self.num_tokens,
            "sequence_length": self.settings.sequence_length,
            "pad_id": self.settings.pad_id,
            "token_dtype": self.settings.token_dtype.name,
            "document_bytes": self.counts["bytes"] if exact else None,
            "counts": dict(sorted(self.counts.items())),
            "firsts": self.firsts,
            **({"first_fault": self.first_fault} if self.first_fault else {}),
        }


def open_cache(directory: Path, verify: Verify) -> dict[str, Any]:
    """The manifest of a complete cache. DamagedCache if it is not complete; FileNotFoundError if
    there is none."""
    if not directory.is_dir():
        raise FileNotFoundError(directory)
    try:
        manifest = read_json(directory / MANIFEST, LARGEST_MODEL_DOCUMENT_BYTES)
        checksum = manifest.pop("checksum")
    except FileNotFoundError:
        raise DamagedCache("there is no manifest: the cache is incomplete") from None
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        raise DamagedCache("the manifest cannot be read") from None
    if checksum != json_digest(manifest) or manifest["format_version"] != FORMAT_VERSION:
        raise DamagedCache("the manifest's own checksum does not match")
    files = {
        name: entry for part in manifest["parts"].values() for name, entry in part["files"].items()
    }
    for name, entry in files.items():
        path = directory / name
        found = path.stat().st_size if path.is_file() else None
        if found != entry["bytes"]:
            raise DamagedCache(f"{name} has {found} bytes, not {entry['bytes']}")
    damaged = directory / DAMAGED_FILE
    if verify != "sizes":
        small = sum(entry["bytes"] for entry in files.values()) <= VERIFIED_WHOLE_BYTES
        whole = verify == "all" or small or damaged.exists()
        _verify_checksums(
            directory, {n: e for n, e in files.items() if whole or n.rpartition(".")[2] not in BULK}
        )
        if damaged.exists():
            with contextlib.suppress(OSError):  # a read-only mount
                damaged.unlink()  # the damage was not on the disk: memory, or a cable
    return dict(manifest)


def _verify_checksums(directory: Path, files: dict[str, Any]) -> None:
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        hashes = pool.map(hash_bytes_of, [directory / name for name in files])
        for (name, entry), value in zip(files.items(), hashes, strict=True):
            if value != entry["xxh3_128"]:
                raise DamagedCache(f"the checksum of {name} does not match")


def build_cache(
    directory: Path,
    encoded: Callable[[], Iterable[Encoded]],
    parts: list[int],
    settings: PartSettings,
    note: Callable[[str], None],
) -> dict[str, Any]:
    """Build the cache at `directory` from `Encoded` items; returns its manifest. Nothing is left on
    failure."""
    remove_leftovers(directory.parent)
    temporary = directory.with_name(f"{directory.name}.building-{_builder_identity()}")
    writers: dict[int, _PartWriter] = {}
    try:
        temporary.mkdir(parents=True)
        writers |= {part: _PartWriter(temporary, PART_NAMES[part], settings) for part in parts}
        for item in encoded():
            for part, writer in writers.items():
                writer.add(item, item.parts[part])
        manifest = {
            "format_version": FORMAT_VERSION,
            "parts": {PART_NAMES[part]: writer.finish() for part, writer in writers.items()},
        }
        _write_manifest(temporary, manifest)
        return _publish(temporary, directory, manifest, note)
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise UserError(
                f"{directory.parent}: no room left for the tokenised cache ({error.strerror}); the"
                " incomplete cache was removed. Free space, or set data.cache_directory to another"
                " disk."
            ) from None
        raise UserError(
            f"{directory.parent}: the cache cannot be written ({error.strerror}). Set"
            " data.cache_directory."
        ) from error
    finally:
        for writer in writers.values():
            writer.discard()
        shutil.rmtree(temporary, ignore_errors=True)


def _write_manifest(directory: Path, manifest: dict[str, Any]) -> None:
    with (directory / MANIFEST).open("w") as stream:
        json.dump({**manifest, "checksum": json_digest(manifest)}, stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())
    flush(directory)


def _publish(
    temporary: Path, directory: Path, manifest: dict[str, Any], note: Callable[[str], None]
) -> dict[str, Any]:
    """Rename into place; if another builder was first and its cache is intact, use that one."""
    while True:
        try:
            publish_directory(temporary, directory, last=MANIFEST)
            flush(directory.parent)
            return manifest
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        try:
            theirs = open_cache(directory, "all")
        except FileNotFoundError:
            continue
        except DamagedCache:
            remove_cache(directory)
            continue
        note(f"another run built the same cache at the same time; it is used ({directory})")
        return theirs


def remove_cache(directory: Path) -> None:
    """Rename a cache, then delete it: no reader sees part of it."""
    doomed = directory.with_name(f"{directory.name}.building-{_builder_identity()}-removed")
    try:
        publish_directory(directory, doomed, last=MANIFEST)
    except FileNotFoundError:
        return  # another process removed it first
    shutil.rmtree(doomed, ignore_errors=True)


_BUILDER = re.compile(r"\.building-([0-9a-f]{16}\d+)-(\d+)-(\d+|None)-\d+(?:-removed)?$")
"""The end of the name of a directory: a `_builder_identity`."""


def remove_leftovers(root: Path) -> None:
    """Delete directories of dead builders, never one that a live or remote builder may still write
    to."""
    if not root.is_dir():
        return
    here = _builder_identity().rsplit("-", 3)[0]
    for path in root.glob("*.building-*"):
        builder = _BUILDER.search(path.name)
        if builder is None:
            continue  # not a builder's: the directory of caches may have other entries
        host, pid, started = builder.groups()
        dead = host == here and _process_start(int(pid)) != started
        if dead or _idle_seconds(path) > STALE_SECONDS:
            shutil.rmtree(path, ignore_errors=True)


def _idle_seconds(path: Path) -> float:
    """Seconds since anything in a directory was written."""
    try:
        newest = max(entry.stat().st_mtime for entry in (path, *path.iterdir()))
    except FileNotFoundError:
        return 0.0  # its builder renames or deletes it right now
    return time.time() - newest


def _builder_identity() -> str:
    """Boot, process namespace, pid, start time and the current moment: identifies a live builder to
    others."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")
    namespace = os.stat("/proc/self/ns/pid").st_ino
    return (
        f"{boot[:16]}{namespace}-{os.getpid()}-{_process_start(os.getpid())}-{time.monotonic_ns()}"
    )


def _process_start(pid: int) -> str | None:
    """Start time of a process in clock ticks since boot, or None when there is no such process, or
    only a dead one whose parent has not reaped it."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else fields[19]
