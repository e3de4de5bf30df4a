"""The tensors and values of a checkpoint from somebody else: of bounded size and depth, and nothing
but that."""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.security.foreign_checkpoints import DATA, command, saved, stored, tensor_of, write
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
)

from drillyard.errors import UserError
from drillyard.training.checkpoint.checkpointer import Checkpointer
from drillyard.training.checkpoint.inventory import inspect
from drillyard.training.checkpoint.loading import load_checkpoint
from drillyard.training.checkpoint.verification import verify


def repacked(archive: bytes, compression: int = zipfile.ZIP_STORED, **more: bytes) -> bytes:
    """The archive with other compression and with more records."""
    stream = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(archive)) as old,
        zipfile.ZipFile(stream, "w", compression) as new,
    ):
        for name in old.namelist():
            new.writestr(name, old.read(name))
        for name, content in more.items():
            new.writestr(f"archive/{name}", content)
    return stream.getvalue()


@pytest.mark.parametrize(
    "archive",
    [
        repacked(saved(torch.zeros(1_000_000)), zipfile.ZIP_DEFLATED),
        repacked(saved(torch.zeros(4)), **{"constants.pkl": b"\x80\x02N."}),
        repacked(saved(torch.zeros(4)), **{"code.py": b"pass"}),
        pickle.dumps(torch.zeros(4)),
        saved(torch.zeros(4))[:-10],
        b"",
    ],
    ids=["compressed", "TorchScript", "source", "pickle", "cut", "empty"],
)
def test_an_archive_that_torch_save_did_not_write_is_refused(
    archive: bytes, tmp_path: Path
) -> None:
    path = write(tmp_path, stored({"w": (tensor_of(4), archive)}))
    info = inspect(path)
    assert info is not None
    assert [(file.name, file.verdict) for file in verify(info) if file.verdict != "ok"] == [
        (DATA, "refused")
    ]
    with pytest.raises(UserError, match=DATA):
        load_checkpoint(tmp_path, {"w": torch.zeros(4)})


def of_pickle(content: bytes, **records: bytes) -> bytes:
    """An archive with this pickle and records, as torch.save lays them out."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name, data in {"data.pkl": content, "version": b"3\n", "byteorder": b"little"}.items():
            archive.writestr(f"archive/{name}", data)
        for name, data in records.items():
            archive.writestr(f"archive/data/{name}", data)
    return stream.getvalue()


def text(value: str) -> bytes:
    """The opcode that pushes it."""
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def number(value: int) -> bytes:
    return b"\x8a\x08" + struct.pack("<q", value)


TUPLE_OF_2_27 = b")q\x00" + b"".join(b"h%c" % n * 2 + b"\x86q%c" % (n + 1) for n in range(27))
LIST_OF_2_27 = b"]q\x00" + b"".join(b"]q%c(" % (n + 1) + b"h%c" % n * 2 + b"e" for n in range(27))


@pytest.mark.parametrize(
    "content",
    [
        b"}" + b")" + b"\x85" * 300_000 + b"Ns",
        b"c__builtin__\nset\n])" + b"\x85" * 300_000 + b"a\x85R",
        b"]" * 300_000 + b"a" * 299_999,
        b"}" + TUPLE_OF_2_27 + b"Ns",
        LIST_OF_2_27,
        b"]q\x00]q\x01h\x00ah\x00Na",
        b"c_codecs\nencode\n" + text("a" * 100) + text("punycode") + b"\x86R",
        b"ctorch.storage\nUntypedStorage\n" + number(2**45) + b"\x85R",
        b"ctorch\nFloatStorage\n" + number(2**45) + b"\x85R",
    ],
    ids=[
        "deep-key",
        "deep-in-set",
        "deep-list",
        "wide-key",
        "wide-list",
        "changed-part",
        "slow",
        "storage",
        "typed",
    ],
)
def test_a_value_that_is_deep_or_huge_or_slow_to_build_is_refused(
    content: bytes, tmp_path: Path
) -> None:
    """The first two killed the process when they were loaded, the fourth and (longer) the slow one
    never ended."""
    archive = of_pickle(b"\x80\x02" + content + b".")
    path = write(tmp_path, stored({"note": (BytesStorageMetadata(), archive)}))
    assert command("checkpoint", "verify", tmp_path) == 2
    assert command("checkpoint", "list", tmp_path) == 2
    with pytest.raises(UserError, match=DATA):
        load_checkpoint(path, {"note": ""})


def tensor_claiming(storage: int, shape: list[int], strides: list[int]) -> bytes:
    """A tensor of 16 bytes whose pickle claims a storage of other size, or a shape that the storage
    cannot hold."""
    storage_id = (
        b"("
        + text("storage")
        + b"ctorch\nFloatStorage\n"
        + text("0")
        + text("cpu")
        + number(storage)
        + b"tQ"
    )
    sizes = b"".join(b"(" + b"".join(map(number, values)) + b"t" for values in (shape, strides))
    call = storage_id + b"K\x00" + sizes + b"\x89ccollections\nOrderedDict\n)R"
    return of_pickle(
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(" + call + b"tR.", **{"0": bytes(16)}
    )


@pytest.mark.parametrize(
    ("storage", "shape", "strides"),
    [
        (2**28, [4], [1]),
        (2**62, [4], [1]),
        (-1, [4], [1]),
        (4, [2**40], [1]),
        (4, [2**20, 2**20], [0, 0]),
        (4, [-1], [1]),
        (4, [4, 4], [1]),
    ],
)
def test_a_tensor_of_another_size_than_its_bytes_is_an_error_of_the_checkpoint(
    storage: int, shape: list[int], strides: list[int], tmp_path: Path
) -> None:
    path = write(tmp_path, stored({"w": (tensor_of(4), tensor_claiming(storage, shape, strides))}))
    with pytest.raises(UserError, match=path.name):
        load_checkpoint(path, {"w": torch.zeros(4)})


PLAIN = [
    None,
    True,
    -1,
    2**40,
    2.5,
    "text",
    b"bytes",
    [1, (2, 3)],
    [{"a": {1, 2}, 3: []}],
    torch.Size([2, 3]),
]


def test_every_plain_value_is_saved_and_loaded_and_an_object_is_not_saved(tmp_path: Path) -> None:
    events: list[str] = []
    settings: dict[str, Any] = {
        "keep": 1,
        "keep_best": False,
        "asynchronous": False,
        "identity": {},
    }
    checkpointer = Checkpointer(
        tmp_path / "checkpoints", **settings, on_event=lambda name, **fields: events.append(name)
    )
    tensors = {
        f"t{n}": torch.ones(2, dtype=dtype)
        for n, dtype in enumerate((torch.bfloat16, torch.uint16, torch.bool))
    }
    values = {f"v{n}": value for n, value in enumerate(PLAIN)}
    checkpointer.save(1, {**values, **tensors}, metadata={}, wait=True)
    loaded = load_checkpoint(
        tmp_path, dict.fromkeys(values) | {key: torch.zeros_like(t) for key, t in tensors.items()}
    )
    assert {key: loaded.state[key] for key in values} == values
    assert all(torch.equal(loaded.state[key], tensor) for key, tensor in tensors.items())
    checkpointer.save(2, {"path": Path("x")}, metadata={}, wait=True)
    checkpointer.close()
    assert events == ["checkpoint", "checkpoint_failed"]
