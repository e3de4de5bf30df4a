"""Sources of documents: files, directories, Hugging Face data sets and the built-in sets, behind
one interface.

A `DataSource` has raw batches in a fixed order and a key of its content. The key of files is the
xxh3-128 of their bytes, hashed in threads (xxhash releases the interpreter lock). Hashes are cached
per file with its size, inode and change times, so that a restart does not read terabytes again.
Like git's index, the cache skips a file that changed within the last two seconds, because a later
change may leave the same times.

Data sets of the Hugging Face `datasets` library are hub ids, downloaded and memory-mapped or
streamed with `options: {streaming: true}`, and directories made by `save_to_disk`; `options: {name:
...}` selects a configuration and `options: {revision: ...}` a commit. The library is imported only
when such a source is read. The content key of a hub data set is the hash that the library derives
from its commit; that of a saved one is the hashes of its files.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import os
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from drillyard.config.data_checks import normalized_sources
from drillyard.config.environment import OPENING
from drillyard.config.fetch_limits import is_withheld, withheld_error
from drillyard.config.problems import HUB_ID, refused_address, remote_scheme, shown_address
from drillyard.config.run_data import SourceConfig
from drillyard.data.file_readers import (
    COMPRESSIONS,
    SourceFile,
    arrow_batches,
    kind_of,
    read_files,
    size_of,
)
from drillyard.data.megatron.indexed_file import pair_of
from drillyard.data.raw_batches import (
    BATCH_BYTES,
    RawBatch,
    batched_rows,
    first_batches,
    first_rows,
    hash_bytes_of,
    json_digest,
)
from drillyard.data.remote_objects import RemoteObject, list_objects
from drillyard.errors import MissingExtraError, UserError
from drillyard.guarded_files import read_json
from drillyard.redaction import redact
from drillyard.safe_files import replace_file

BUILTIN = "builtin:"
_HUB_OPTIONS = ("name", "revision", "streaming")
REMOTE_KINDS = ".jsonl, .parquet, .csv, .txt and other plain text, also with .gz or .zst"
KINDS = f"{REMOTE_KINDS}; and Megatron data, a .bin with its .idx"


@dataclass(frozen=True)
class SourceContents:
    """The content of a source: a key that changes with it, and the hash of each file by its name
    below the source."""

    key: str
    files: dict[str, str]


@dataclass(frozen=True)
class DataSource:
    """Files (already listed), one part of a built-in set, or a data set of the Hugging Face
    library.

    `missing`: the recorded contents of a source that does not exist any more; it can be opened from
    a cache only. `first_bytes`: of a sample, which reads about so much from the begin and looks at
    nothing else.
    """

    name: str
    weight: float
    config: SourceConfig
    files: tuple[SourceFile, ...] = ()
    builtin_part: str = "train"
    missing: SourceContents | None = None
    first_bytes: int | None = None

    @property
    def builtin(self) -> str | None:
        """Name of the built-in set, or None."""
        return (
            self.config.path.removeprefix(BUILTIN) if self.config.path.startswith(BUILTIN) else None
        )

    @property
    def is_megatron(self) -> bool:
        """Whether the files are Megatron's .bin and .idx: tokens already, without rows."""
        return (
            bool(self.files) and isinstance(self.files[0], Path) and self.files[0].suffix == ".bin"
        )

    @property
    def nbytes(self) -> int | None:
        """Bytes to read, or None if not known in advance."""
        if not self.files or any(
            file.suffix.lower() in (*COMPRESSIONS, ".parquet") for file in self.files
        ):
            return None
        return sum(map(size_of, self.files))

    @property
    def kind_of_file(self) -> str:
        """The format of a source that is one file, by its suffixes (`-json`, `-csv.gz`); empty for
        other sources.

        The content key of a single file does not include its name; that of several files does.
        """
        names = (
            self.missing.files
            if self.missing is not None
            else map(self.name_of, map(str, self.files))
        )
        if list(names) != [""]:
            return ""
        path = Path(shown_address(self.config.path))
        return (
            f"-{kind_of(path)}{path.suffix.lower() if path.suffix.lower() in COMPRESSIONS else ''}"
        )

    def batches(self) -> Iterator[RawBatch]:
        """Raw batches in a fixed order, up to `max_samples` rows."""
        batches = self._all_batches()
        if self.first_bytes is not None:
            batches = first_batches(batches, self.first_bytes)
        return (
            batches
            if self.config.max_samples is None
            else first_rows(batches, self.config.max_samples)
        )

    def _all_batches(self) -> Iterator[RawBatch]:
        if self.missing is not None:
            if is_source_withheld(self.config):
                raise withheld_error(f"data.source: {self.config.path}", is_data=True)
            raise UserError(
                f"data.source {self.name}: {self.config.path} or files of it are missing, and so is"
                " their tokenised cache. Restore them."
            )
        if self.is_megatron:
            raise UserError(
                f"data.source {self.name}: {self.config.path} holds tokens and no text, so its rows"
                " cannot be read. Set data.tokenizer to the one they were made with, and"
                " evaluation.metrics: [loss]."
            )
        if self.files:
            return read_files(list(self.files))
        if self.builtin is not None:
            from drillyard.data import builtin

            rows = builtin.documents(self.builtin, self.config.options, part=self.builtin_part)
            return batched_rows(
                f"{self.config.path} ({self.builtin_part})", "row", enumerate(rows, 1)
            )
        return _hub_batches(self.config)

    def contents(self, memo: Path) -> SourceContents:
        """The contents now; `memo` is the directory of cached hashes of files."""
        if self.missing is not None:
            return self.missing
        if self.first_bytes is not None:
            sample = [self.config.path, self.builtin_part, self.first_bytes]
            return SourceContents(json_digest(sample), {})
        if remote_scheme(self.config.path) is not None:
            now = {
                self.name_of(str(file)): [file.size, file.tag]
                for file in _objects_of(self.config.path)
            }
            key = json_digest(["remote", self.config.path, list(now.items())])
            return SourceContents(
                key, {name: f"{size} bytes, {tag}" for name, (size, tag) in now.items()}
            )
        if paths := [file for file in self.files if isinstance(file, Path)]:
            with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
                hashes = list(pool.map(lambda file: file_hash(file, memo), paths))
            named = dict(zip(map(self.name_of, map(str, paths)), hashes, strict=True))
            return SourceContents(
                json_digest(["files", [[name, value] for name, value in named.items()]]), named
            )
        if self.builtin is not None:
            from drillyard.data import builtin

            key = builtin.content_key(self.builtin, self.config.options)
            return SourceContents(
                json_digest(["builtin", self.builtin, self.builtin_part, key]), {}
            )
        return SourceContents(json_digest(["hub", _hub_key(self.config)]), {})

    def name_of(self, origin: str) -> str:
        """The name of a raw batch's origin within this source: its path below the directory, or ""
        for a single file.

        So a cache is the same wherever the source is.
        """
        if not self.files:
            return origin
        if self.is_megatron:
            return Path(origin).suffix
        if remote_scheme(self.config.path) is not None:
            return origin.removeprefix(shown_address(self.config.path)).lstrip("/")
        root = Path(self.config.path).expanduser()
        return Path(origin).relative_to(root).as_posix() if root.is_dir() else ""


def resolve_source(
    config: SourceConfig, recorded: Mapping[str, SourceContents] | None = None
) -> DataSource:
    """The source at a path. UserError if it cannot be read.

    `recorded`: contents of sources at the beginning of the run; a source that had files and does
    not exist now, or may not be fetched (`fetch_limits.py`), is `missing`. WithheldError where it
    has no such contents.
    """
    is_remote = remote_scheme(config.path) is not None
    if not is_remote and (refused := refused_address(config.path)):
        raise UserError(f"data.source: {refused}")
    # Part of the names of files, metrics and events.
    name = redact(config.name or _default_name(config.path))
    then = (recorded or {}).get(name)
    if is_source_withheld(config):
        if then is None:
            raise withheld_error(f"data.source: {shown_address(config.path)}", is_data=True)
        return DataSource(name, config.weight, config, missing=then)
    if is_remote:
        return _remote_source(name, config, then)
    path = Path(config.path).expanduser()
    # Megatron data may be named by the prefix of their files, which is none.
    if then is not None and then.files and ".bin" not in then.files and not path.exists():
        return DataSource(name, config.weight, config, missing=then)
    if config.path.startswith(BUILTIN):
        return DataSource(name, config.weight, config)
    pair = pair_of(config.path)
    if config.options and (pair or path.exists() or not HUB_ID.fullmatch(config.path)):
        raise UserError(
            f"data.source: {config.path} takes no options (found: {', '.join(config.options)}); "
            "only built-in sources and Hugging Face data sets do."
        )
    if pair is not None:
        return DataSource(name, config.weight, config, pair)
    if path.is_dir():
        is_data_set = (path / "dataset_dict.json").is_file() or (path / "state.json").is_file()
        return DataSource(name, config.weight, config, () if is_data_set else _files_of(path))
    if path.is_file():
        if kind_of(path) is None:
            raise UserError(f"{path}: unknown kind of file. Supported are {KINDS}.")
        return DataSource(name, config.weight, config, (path,))
    if HUB_ID.fullmatch(config.path) and kind_of(path) is None:
        return DataSource(name, config.weight, config)
    raise UserError(_missing(path))


def is_source_withheld(config: SourceConfig) -> bool:
    """Whether a source is withheld (`fetch_limits.py`): an address, a data set of the hub, or a
    path with a reference to the environment."""
    if not is_withheld(config.path):
        return False
    path = Path(config.path).expanduser()
    is_local = path.exists() or pair_of(config.path) is not None or kind_of(path) is not None
    return (
        OPENING in config.path
        or remote_scheme(config.path) is not None
        or (not is_local and HUB_ID.fullmatch(config.path) is not None)
    )


def _remote_source(name: str, config: SourceConfig, then: SourceContents | None) -> DataSource:
    if config.options:
        raise UserError(
            f"data.source: {shown_address(config.path)} takes no options (found:"
            f" {', '.join(config.options)})."
        )
    try:
        return DataSource(name, config.weight, config, _objects_of(config.path))
    except MissingExtraError:
        raise
    except UserError:
        if then is None:
            raise
        return DataSource(name, config.weight, config, missing=then)


def _objects_of(address: str) -> tuple[RemoteObject, ...]:
    objects = list_objects(address, lambda path: kind_of(path) is not None)
    if not objects:
        raise UserError(
            f"{shown_address(address)}: no readable object below this address. Supported are"
            f" {REMOTE_KINDS}."
        )
    if kind_of(objects[0]) is None:
        raise UserError(
            f"{shown_address(address)}: unknown kind of object. Supported are {REMOTE_KINDS}"
            " (Megatron data are read in place: copy them to a disk)."
        )
    return objects


def resolve_sources(
    configured: str | SourceConfig | list[str | SourceConfig],
    recorded: Mapping[str, SourceContents] | None = None,
) -> list[DataSource]:
    """All sources of a config key, with distinct names; `recorded` as in `resolve_source`."""
    items = normalized_sources(configured)
    if not items:
        raise UserError(
            "data.source is an empty list: name at least one file, directory or data set."
        )
    sources = [resolve_source(item, recorded) for item in items]
    names = [source.name for source in sources]
    for name in names:
        if names.count(name) > 1:
            raise UserError(
                f"data.source: two sources are named {name!r}; give each its own `name`."
            )
    return sources


def file_hash(file: Path, memo: Path) -> str:
    """xxh3-128 of a file's bytes in hex, cached in the directory `memo` while the file is
    unchanged."""
    try:
        stat = file.stat()
    except OSError as error:
        raise UserError(
            f"{file}: cannot be read ({error.strerror}). Check the file and its permissions."
        ) from None
    identity = [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino, stat.st_dev]
    cached = memo / f"{xxhash.xxh3_128_hexdigest(os.fsencode(file.resolve()))}.json"
    # Where it is not cached, or written by another process right now, hash the file.
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        known = read_json(cached)
        if known["identity"] == identity:
            return str(known["xxh3_128"])
    started_ns = time.time_ns()
    value = hash_bytes_of(file)
    if started_ns - max(stat.st_mtime_ns, stat.st_ctime_ns) > 2_000_000_000:
        # On a full or read-only disk, the next start hashes the file again.
        with contextlib.suppress(OSError):
            replace_file(
                cached,
                json.dumps({"identity": identity, "xxh3_128": value, "file": str(file)}).encode(),
            )
    return value


def _default_name(path: str) -> str:
    """The last part of a path without the suffixes of its format."""
    name = (
        (path if remote_scheme(path) is None else shown_address(path))
        .removeprefix(BUILTIN)
        .rstrip("/")
        .rsplit("/", 1)[-1]
    )
    for compression in COMPRESSIONS:
        name = name.removesuffix(compression)
    known = kind_of(Path(name)) is not None or name.endswith((".bin", ".idx"))
    return name.rsplit(".", 1)[0] if known else name


def _files_of(directory: Path) -> tuple[Path, ...]:
    """Readable files below a directory in the order of their paths, without hidden files and
    directories.

    Links to files and directories are followed, and each file is taken once: under its own path if
    that is in the directory, else under the first link to it. A link to a parent of this directory
    is a cycle and is not followed.
    """
    root = Path(os.path.realpath(directory))
    found: dict[str, Path] = {}
    seen: set[str] = set()
    pending = [directory]
    while pending:
        linked: list[Path] = []
        for parent, directories, names in os.walk(pending.pop(0)):
            real_parent = os.path.realpath(parent)
            if real_parent in seen:
                directories.clear()
                continue
            seen.add(real_parent)
            directories[:] = sorted(name for name in directories if not name.startswith("."))
            linked += [path for name in directories if (path := Path(parent, name)).is_symlink()]
            for name in sorted(names):
                if not name.startswith(".") and kind_of(Path(name)) is not None:
                    path = Path(parent, name)
                    real = os.path.realpath(path)
                    if real not in found or not path.is_symlink():
                        found[real] = path
        pending += [path for path in linked if not root.is_relative_to(os.path.realpath(path))]
    if not found:
        raise UserError(f"{directory}: no readable file in this directory. Supported are {KINDS}.")
    return tuple(sorted(found.values(), key=lambda file: file.relative_to(directory).as_posix()))


def _missing(path: Path) -> str:
    if os.path.lexists(path):
        return (
            f"{path}: is not a regular file, but a device, a pipe or a broken link. Write the"
            " documents to a file."
        )
    message = f"{path}: no such file or directory."
    if path.parent.is_dir():
        if near := difflib.get_close_matches(path.name, sorted(os.listdir(path.parent)), 1):
            return f"{message} Did you mean {path.parent / near[0]}?"
        return f"{message} Check data.source; {path.parent} exists."
    return f"{message} Check data.source: {path.parent} does not exist either."


def _hub_batches(source: SourceConfig) -> Iterator[RawBatch]:
    """Raw batches of a hub data set or of a saved one."""
    dataset = _load_hub(source)
    origin = f"{source.path} ({source.split})"
    if source.options.get("streaming"):
        return batched_rows(origin, "row", enumerate(dataset, 1))
    size = max(1, min(8192, BATCH_BYTES * max(1, len(dataset)) // max(1, dataset.data.nbytes)))
    tables = dataset.with_format("arrow").iter(batch_size=size)
    return arrow_batches(
        origin, (batch for table in tables for batch in table.combine_chunks().to_batches())
    )


def _hub_key(source: SourceConfig) -> str:
    """A string that changes with the content of the data set."""
    root = Path(source.path).expanduser()
    if root.is_dir():
        files = sorted(
            file
            for file in root.rglob("*")
            if file.is_file() and file.suffix in (".arrow", ".json")
        )
        return "/".join(
            [source.split, *(f"{file.relative_to(root)}={hash_bytes_of(file)}" for file in files)]
        )
    import datasets

    try:
        builder = datasets.load_dataset_builder(source.path, **_hub_arguments(source))
    except Exception as error:
        raise _not_loaded(source, error) from error
    return f"{source.path}/{builder.config.name}/{builder.hash}/{source.split}"


def _load_hub(source: SourceConfig) -> Any:
    import datasets

    for unknown in sorted(set(source.options) - set(_HUB_OPTIONS)):
        raise UserError(
            f"data.source {source.path}: unknown option {unknown!r}; known are"
            f" {list(_HUB_OPTIONS)}."
        )
    path = Path(source.path).expanduser()
    try:
        if not path.is_dir():
            streaming = bool(source.options.get("streaming"))
            return datasets.load_dataset(
                source.path, split=source.split, streaming=streaming, **_hub_arguments(source)
            )
        dataset = datasets.load_from_disk(str(path))
    except Exception as error:  # the library raises many types when a data set cannot be loaded
        raise _not_loaded(source, error) from error
    if not isinstance(dataset, datasets.DatasetDict):
        return dataset
    if source.split not in dataset:
        raise UserError(
            f"{path}: no split {source.split!r}; it has {', '.join(dataset)}. Set"
            " data.source.split."
        )
    return dataset[source.split]


def _hub_arguments(source: SourceConfig) -> dict[str, Any]:
    return {key: source.options[key] for key in ("name", "revision") if key in source.options}


def _not_loaded(source: SourceConfig, error: Exception) -> UserError:
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    return UserError(
        f"data.source: {source.path} is not a file or directory here, and cannot be loaded as a"
        f" Hugging Face data set (split {source.split!r}): {reason}"
    )
