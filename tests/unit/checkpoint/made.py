"""Checkpoints of a few bytes, made without torch: real manifests and an index without tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from drillyard.training.checkpoint.manifest import (
    MANIFEST_NAME,
    FileRecord,
    Manifest,
    checksum,
    encode,
)

# What pickle gives for torch.distributed.checkpoint.metadata.Metadata(state_dict_metadata={},
# storage_data={}).
NO_TENSORS = (
    b"\x80\x04\x8c\x25torch.distributed.checkpoint.metadata\x94\x8c\x08Metadata\x94\x93\x94)\x81\x94}\x94("
    b"\x8c\x13state_dict_metadata\x94}\x94\x8c\x0cstorage_data\x94}\x94ub."
)
CONTENT = {"__0_0.distcp": b"first shard", "__1_0.distcp": b"second", ".metadata": NO_TENSORS}


def make_checkpoint(run: Path, step: int, *, format_version: int = 1, **metadata: Any) -> Path:
    """A complete checkpoint of two ranks in `run`; returns its directory."""
    path = run / "checkpoints" / f"step-{step:08d}"
    path.mkdir(parents=True)
    for name, data in CONTENT.items():
        (path / name).write_bytes(data)
    records = {name: FileRecord(len(data), checksum(data)) for name, data in CONTENT.items()}
    manifest = Manifest(
        step,
        2,
        "2.15.0",
        "2026-01-31T12:00:00.000Z",
        records,
        {"name": "a"},
        metadata,
        format_version=format_version,
    )
    (path / MANIFEST_NAME).write_bytes(encode(manifest))
    return path


def damage_silently(path: Path) -> None:
    """Other bytes of the same size: only reading them shows it."""
    (path / "__1_0.distcp").write_bytes(b"sec0nd")
