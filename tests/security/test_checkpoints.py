"""The index and manifest of a checkpoint from somebody else: read as data, they run nothing and
lead nowhere outside.

Its tensors and values: test_checkpoint_values.py. Whole commands (`train`, `export`, `eval`):
tests/integration/test_foreign_checkpoint.py.
"""

from __future__ import annotations

import contextlib
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.security.foreign_checkpoints import (
    DATA,
    STATE,
    Code,
    command,
    good,
    saved,
    state,
    stored,
    tensor_of,
    write,
)
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
)

from drillyard.errors import UserError
from drillyard.training.checkpoint.checkpointer import Checkpointer
from drillyard.training.checkpoint.inventory import inspect, list_checkpoints
from drillyard.training.checkpoint.loading import load_checkpoint
from drillyard.training.checkpoint.manifest import (
    FileRecord,
    Manifest,
    ManifestError,
    checksum,
    decode,
    encode,
)
from drillyard.training.checkpoint.verification import verify


def code_for_the_index(attack: Code) -> dict[str, bytes]:
    return {**good(), ".metadata": pickle.dumps(attack)}


def code_of_an_old_protocol(attack: Code) -> dict[str, bytes]:
    return {**good(), ".metadata": pickle.dumps(attack, protocol=2)}


def code_inside_the_index(attack: Code) -> dict[str, bytes]:
    return good(planner_data=attack)


def code_as_a_value(attack: Code) -> dict[str, bytes]:
    return stored(
        {"w": (tensor_of(4), saved(STATE["w"])), "note": (BytesStorageMetadata(), saved(attack))}
    )


def code_as_a_value_in_the_place_of_a_tensor(attack: Code) -> dict[str, bytes]:
    return stored(
        {
            "w": (BytesStorageMetadata(), saved(attack)),
            "note": (BytesStorageMetadata(), saved("ten")),
        }
    )


def code_as_a_tensor(attack: Code) -> dict[str, bytes]:
    return stored(
        {"w": (tensor_of(4), saved(attack)), "note": (BytesStorageMetadata(), saved("ten"))}
    )


ATTACKS = [
    (code_for_the_index, ".metadata"),
    (code_of_an_old_protocol, ".metadata"),
    (code_inside_the_index, ".metadata"),
    (code_as_a_value, DATA),
    (code_as_a_value_in_the_place_of_a_tensor, DATA),
    (code_as_a_tensor, DATA),
]
Attack = Callable[[Code], dict[str, bytes]]


def test_a_checkpoint_made_as_these_are_is_undamaged_and_loads(tmp_path: Path) -> None:
    write(tmp_path, good())
    assert command("checkpoint", "verify", tmp_path) == 0
    loaded = load_checkpoint(tmp_path, state()).state
    assert loaded["w"].tolist() == [0, 1, 2, 3] and loaded["note"] == "ten"


@pytest.mark.parametrize(
    "attack", [attack for attack, _ in ATTACKS if attack is not code_as_a_tensor]
)
def test_a_load_runs_no_code(attack: Attack, tmp_path: Path, ran: Path) -> None:
    write(tmp_path, attack(Code(ran)))
    with contextlib.suppress(Exception):
        load_checkpoint(tmp_path, state())
    assert not ran.exists()


@pytest.mark.parametrize(("attack", "file"), ATTACKS)
def test_code_in_a_checkpoint_is_refused_and_not_run(
    attack: Attack, file: str, tmp_path: Path, ran: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, attack(Code(ran)))
    assert command("checkpoint", "verify", tmp_path) == 2
    printed = capsys.readouterr()
    assert f"{path / file}: refused" in printed.err and "undamaged" not in printed.out
    assert os.mkdir.__module__ + ".mkdir" in printed.err
    with pytest.raises(UserError, match=path.name):
        load_checkpoint(tmp_path, state())
    settings: dict[str, Any] = {
        "keep": 1,
        "keep_best": False,
        "asynchronous": False,
        "identity": {},
    }
    checkpointer = Checkpointer(
        tmp_path / "checkpoints", **settings, on_event=lambda *_, **__: None
    )
    for source in (None, path):
        with pytest.raises(UserError, match=path.name):
            checkpointer.load(state(), source)
    checkpointer.close()
    assert not ran.exists()


@pytest.mark.parametrize(
    ("attack", "file"), [each for each in ATTACKS if each[0] is not code_as_a_tensor]
)
@pytest.mark.parametrize("as_json", [[], ["--json"]])
def test_a_list_refuses_code_in_the_index_and_in_values(
    attack: Attack,
    file: str,
    as_json: list[str],
    tmp_path: Path,
    ran: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = write(tmp_path, attack(Code(ran)))
    assert command("checkpoint", "list", tmp_path, *as_json) == 2
    printed = capsys.readouterr()
    assert f"{path / file}: refused" in printed.err and "refused" in printed.out
    assert not ran.exists()


def test_a_class_of_torch_cannot_be_changed_by_an_index(tmp_path: Path) -> None:
    """BUILD with a pair sets attributes of whatever lies below it, such as a class."""
    name = b"\x8c\x25torch.distributed.checkpoint.metadata\x94\x8c\x08Metadata\x94\x93"
    write(
        tmp_path, {**good(), ".metadata": b"\x80\x04" + name + b"(N}\x8c\x05owned\x8c\x03yessttb."}
    )
    assert command("checkpoint", "verify", tmp_path) == 2
    write_again = b"\x80\x04" + name + b"(N}\x8c\x05owned\x8c\x03yesstb."
    write(tmp_path / "again", {**good(), ".metadata": write_again})
    assert command("checkpoint", "verify", tmp_path / "again") == 2
    assert not hasattr(Metadata, "owned")


def far_memo() -> bytes:
    """LONG_BINPUT 2**24 - 1: Python's unpickler allocates room for all smaller numbers, up to 34
    GB."""
    index = good()[".metadata"]
    return index[:-1] + b"r\xff\xff\xff\x00" + index[-1:]


def deep_key() -> bytes:
    """A key of a dictionary that is a tuple of a million levels: hashing it overflows the stack."""
    return b"\x80\x04}N" + b"\x85" * 1_000_000 + b"Ns."


def shared_pieces() -> bytes:
    """A list of a thousand pieces that a thousand tensors share: a million to look at from 30
    kB."""
    tensor = tensor_of(4)
    tensor.chunks *= 1000
    place = {MetadataIndex("w", [0]): _StorageInfo(DATA, 0, 1)}
    return pickle.dumps(Metadata({str(n): tensor for n in range(1000)}, storage_data=place))


def elsewhere(place: _StorageInfo) -> bytes:
    places = {MetadataIndex("w", [0]): place}
    return pickle.dumps(Metadata({"w": tensor_of(4)}, storage_data=places))


@pytest.mark.parametrize(
    "index",
    [
        far_memo(),
        deep_key(),
        shared_pieces(),
        elsewhere(_StorageInfo("../../../etc/passwd", 0, 10)),
        elsewhere(_StorageInfo("/etc/passwd", 0, 10)),
        elsewhere(_StorageInfo(".metadata", 0, 10)),
        elsewhere(_StorageInfo(DATA, 0, 2**60)),
        elsewhere(_StorageInfo(DATA, -1, 10)),
        elsewhere(_StorageInfo(DATA, 0, 10, ["zstd"])),
        pickle.dumps({"w": 1}),
        pickle.dumps(good()[".metadata"] * 2000),
        b"",
        b"\x80\x04",
        good()[".metadata"][:-20],
    ],
    ids=lambda index: f"{len(index)}-bytes",
)
def test_an_index_that_is_none_or_leads_elsewhere_is_refused(index: bytes, tmp_path: Path) -> None:
    path = write(tmp_path, {**good(), ".metadata": index})
    info = inspect(path)
    assert info is not None
    assert [(file.name, file.verdict) for file in verify(info) if file.verdict != "ok"] == [
        (".metadata", "refused")
    ]
    assert command("checkpoint", "list", tmp_path) == 2


NAMED = {
    "list": b"\x8c\x13torch.serialization\x8c\x0b_get_layout\x93",
    "tuple": b"\x8c\x08builtins\x8c\x07getattr\x93",
}


def doubled_list() -> bytes:
    """A list that holds the list before it twice, and so on: its text has 2**20 parts here, and may
    have any number."""
    lists = b"".join(b"]\x94(" + b"h%c" % n * 2 + b"e" for n in range(1, 21))
    return b"\x80\x04" + NAMED["list"] + b"\x94]\x94" + lists + b"h\x00h\x15\x85R."


def doubled_tuple_as_key() -> bytes:
    """A tuple that holds the tuple before it twice, kept by calls: hashing it takes 2**20 steps, or
    any number."""
    tuples = b"".join(b"h\x00" + b"h%c" % n * 2 + b"\x86\x94R" for n in range(1, 21))
    return b"\x80\x04" + NAMED["tuple"] + b"\x94h\x00K\x01K\x01\x86\x94R" + tuples + b"}h\x15Ns."


@pytest.mark.parametrize("index", [doubled_list(), doubled_tuple_as_key()], ids=["list", "tuple"])
def test_an_index_builds_no_value_of_a_size_beyond_its_own(index: bytes, tmp_path: Path) -> None:
    path = write(tmp_path, {**good(), ".metadata": index})
    with pytest.raises(UserError, match=r"function .*list|tuple of sizes"):
        load_checkpoint(path, state())


# -- the manifest
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["../outside", "/etc/passwd", "a/../../../outside", "..", ".", "", "manifest.json"]
)
def test_a_manifest_that_names_another_place_is_not_believed(name: str, tmp_path: Path) -> None:
    path = write(tmp_path, good())
    outside = path.parent / "outside"
    outside.write_bytes(b"mine")
    manifest = decode((path / "manifest.json").read_bytes())
    files = {**manifest.files, name: FileRecord(4, checksum(b"mine"))}
    (path / "manifest.json").write_bytes(encode(Manifest(10, 1, "2.15.0", manifest.created, files)))
    (info,) = list_checkpoints(tmp_path)
    assert [(file.name, file.verdict) for file in verify(info)] == [("manifest.json", "damaged")]
    assert info.status == "damaged" and repr(name) in info.reason
    assert command("checkpoint", "verify", tmp_path) == 1
    assert command("checkpoint", "prune", tmp_path, "--keep", 1, "--left-overs") == 1
    assert outside.read_bytes() == b"mine" and path.is_dir()


@pytest.mark.parametrize("name", [DATA, ".metadata", "manifest.json"])
def test_a_file_that_is_a_link_out_of_the_checkpoint_is_not_opened(
    name: str, tmp_path: Path
) -> None:
    path = write(tmp_path, good())
    (path / name).rename(tmp_path / "outside")
    (path / name).symlink_to(tmp_path / "outside")
    (info,) = list_checkpoints(tmp_path)
    assert info.status == "damaged" and name in info.reason and "link" in info.reason
    assert all(
        file.verdict == "unreadable"
        for file in verify(info)
        if file.name == name and name != "manifest.json"
    )
    assert command("checkpoint", "verify", tmp_path) == 1
    with pytest.raises(UserError, match=name):
        load_checkpoint(tmp_path, state())


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"step": 10', '"step": -1'),
        ('"step": 10', '"step": true'),
        ('"step": 10', f'"step": {10**30}'),
        ('"step": 10', '"steps": 10'),
        ('"world_size": 1', '"world_size": 0'),
        ('"format_version": 1', '"format_version": "1"'),
        ('"created": "2026', '"created": [], "was": "2026'),
        ('"metadata": {}', '"metadata": []'),
        ('"identity": {}', '"identity": 5'),
        ('"metadata": {}', '"metadata": {"num_sequences": "many"}'),
        ('"metadata": {}', '"metadata": {"settings": []}'),
        ('"bytes": ', '"bytes": -'),
        ('"xxh3_128": ', '"other": '),
        ('"metadata": {}', '"metadata": ' + "[" * 100_000 + "]" * 100_000),
        ('"metadata": {}', '"metadata": ' + "9" * 5000),
    ],
)
def test_a_manifest_with_values_of_another_kind_is_not_believed(
    old: str, new: str, tmp_path: Path
) -> None:
    raw = encode(
        Manifest(10, 1, "2.15.0", "2026-01-31T12:00:00.000Z", {DATA: FileRecord(4, "0" * 32)})
    )
    assert old.encode() in raw
    body = raw.replace(old.encode(), new.encode(), 1)
    body = body[: -len("0" * 32 + '"\n}\n')] + b"0" * 32 + b'"\n}\n'
    signed = body[: -len("0" * 32 + '"\n}\n')] + checksum(body).encode() + b'"\n}\n'
    with pytest.raises(ManifestError, match=r"its|it "):
        decode(signed)


def test_a_huge_manifest_is_not_read(tmp_path: Path) -> None:
    path = write(tmp_path, good())
    with (path / "manifest.json").open("wb") as file:
        file.truncate(16 * 1024**2 + 1)
    (info,) = list_checkpoints(tmp_path)
    assert info.status == "damaged" and "16,777,217 bytes" in info.reason


def test_what_stands_for_the_held_out_loss_is_a_number_or_nothing(tmp_path: Path) -> None:
    path = write(tmp_path, good())
    for content in (
        "1" * 400,
        '{"held_out_loss": 1' + "0" * 400 + "}",
        "[" * 4000,
        '{"held_out_loss": "x"}',
    ):
        (path / "held_out.json").write_text(content)
        (info,) = list_checkpoints(tmp_path)
        assert info.complete and info.held_out_loss is None
