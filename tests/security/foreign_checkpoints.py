"""Checkpoints as somebody else might have made them, with manifests that fit."""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from drillyard.cli import main as cli
from drillyard.training.checkpoint.manifest import FileRecord, Manifest, checksum, encode

DATA = "__0_0.distcp"
STATE = {"w": torch.arange(4.0), "note": "ten"}


class Code:
    """Pickles as a call that makes the directory `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def saved(value: object) -> bytes:
    """The archive that torch.save makes of a value."""
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def write(run: Path, files: dict[str, bytes]) -> Path:
    """A checkpoint of step 10 with these files and the manifest that fits them; returns its
    directory."""
    path = run / "checkpoints" / "step-00000010"
    path.mkdir(parents=True)
    for name, content in files.items():
        (path / name).write_bytes(content)
    records = {name: FileRecord(len(content), checksum(content)) for name, content in files.items()}
    manifest = Manifest(10, 1, str(torch.__version__), "2026-01-31T12:00:00.000Z", records)
    (path / "manifest.json").write_bytes(encode(manifest))
    return path


def stored(archives: dict[str, tuple[Any, bytes]], **more: Any) -> dict[str, bytes]:
    """`.metadata` and the data file of archives by key, each with what the index says of it."""
    content, places = b"", {}
    for key, (metadata, archive) in archives.items():
        offset = None if isinstance(metadata, BytesStorageMetadata) else [0]
        places[MetadataIndex(key, offset)] = _StorageInfo(DATA, len(content), len(archive))
        content += archive
    index = Metadata(
        {key: metadata for key, (metadata, _) in archives.items()}, storage_data=places, **more
    )
    return {DATA: content, ".metadata": pickle.dumps(index)}


def tensor_of(size: int) -> TensorStorageMetadata:
    shape = torch.Size([size])
    return TensorStorageMetadata(
        TensorProperties(), shape, [ChunkStorageMetadata(torch.Size([0]), shape)]
    )


def good(**more: Any) -> dict[str, bytes]:
    archives = {
        "w": (tensor_of(4), saved(STATE["w"])),
        "note": (BytesStorageMetadata(), saved("ten")),
    }
    return stored(archives, **more)


def command(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main([*map(str, arguments)])
    return int(ended.value.code or 0)


def state() -> dict[str, Any]:
    return {"w": torch.zeros(4), "note": ""}
