"""Data sets of the Hugging Face `datasets` library: hub ids, and directories made by `save_to_disk`.

The library is imported only when such a source is read. It downloads and memory-maps a hub data set, or streams it
with `options: {streaming: true}`; `options: {name: ...}` selects a configuration and `options: {revision: ...}` a
commit. The content key of a hub data set is the hash that the library derives from its commit; that of a saved one is
the hashes of its files.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from drillyard.config.run import SourceConfig
from drillyard.data.file_readers import arrow_batches
from drillyard.data.raw_batches import BATCH_BYTES, RawBatch, batched_rows, hash_bytes_of
from drillyard.errors import UserError

_OPTIONS = {"streaming", "name", "revision"}


def batches(source: SourceConfig) -> Iterator[RawBatch]:
    """Raw batches of a hub data set or of a saved one."""
    dataset = _load(source)
    origin = f"{source.path} ({source.split})"
    if source.options.get("streaming"):
        return batched_rows(origin, "row", enumerate(dataset, 1))
    size = max(1, min(8192, BATCH_BYTES * max(1, len(dataset)) // max(1, dataset.data.nbytes)))
    tables = dataset.with_format("arrow").iter(batch_size=size)
    return arrow_batches(origin, (batch for table in tables for batch in table.combine_chunks().to_batches()))


def content_key(source: SourceConfig) -> str:
    """A string that changes with the content of the data set."""
    if Path(source.path).expanduser().is_dir():
        root = Path(source.path).expanduser()
        files = sorted(file for file in root.rglob("*") if file.is_file() and file.suffix in (".arrow", ".json"))
        return "/".join([source.split, *(f"{file.relative_to(root)}={hash_bytes_of(file)}" for file in files)])
    import datasets

    try:
        builder = datasets.load_dataset_builder(source.path, **_arguments(source))
    except Exception as error:
        raise _not_loaded(source, error) from error
    return f"{source.path}/{builder.config.name}/{builder.hash}/{source.split}"


def _load(source: SourceConfig) -> Any:
    import datasets

    unknown = set(source.options) - _OPTIONS
    if unknown:
        raise UserError(
            f"data.source {source.path}: unknown option {sorted(unknown)[0]!r}; known are {sorted(_OPTIONS)}."
        )
    path = Path(source.path).expanduser()
    try:
        if path.is_dir():
            dataset = datasets.load_from_disk(str(path))
            if not isinstance(dataset, datasets.DatasetDict):
                return dataset
            if source.split in dataset:
                return dataset[source.split]
            raise UserError(f"{path}: no split {source.split!r}; it has {', '.join(dataset)}. Set data.source.split.")
        streaming = bool(source.options.get("streaming"))
        return datasets.load_dataset(source.path, split=source.split, streaming=streaming, **_arguments(source))
    except UserError:
        raise
    except Exception as error:  # the library raises many types when a data set cannot be loaded
        raise _not_loaded(source, error) from error


def _arguments(source: SourceConfig) -> dict[str, Any]:
    return {key: source.options[key] for key in ("name", "revision") if key in source.options}


def _not_loaded(source: SourceConfig, error: Exception) -> UserError:
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    return UserError(
        f"data.source: {source.path} is not a file or directory here, and cannot be loaded as a Hugging Face data set "
        f"(split {source.split!r}): {reason}"
    )
