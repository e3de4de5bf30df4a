"""A checkpoint from somebody else: its files are read as data, run nothing, and lead nowhere outside of it.

The attacks on whole commands (`train`, `export`, `eval`) are in tests/integration/test_foreign_checkpoint.py.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import struct
import zipfile
from collections.abc import Callable
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
from drillyard.errors import UserError
from drillyard.training.checkpoint import Checkpointer, inspect, list_checkpoints, load_checkpoint, verify
from drillyard.training.checkpoint.files import checksum
from drillyard.training.checkpoint.manifest import FileRecord, Manifest, ManifestError, decode, encode

DATA = "__0_0.distcp"
STATE = {"w": torch.arange(4.0), "note": "ten"}


class Run:
    """Pickles as a call that makes the file `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.fixture
def ran(tmp_path: Path) -> Path:
    """What an attack makes when it runs."""
    return tmp_path / "ran"


def saved(value: object) -> bytes:
    """The archive that torch.save makes of a value."""
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def write(run: Path, files: dict[str, bytes]) -> Path:
    """A checkpoint of step 10 with these files and the manifest that fits them; returns its directory."""
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
    index = Metadata({key: metadata for key, (metadata, _) in archives.items()}, storage_data=places, **more)
    return {DATA: content, ".metadata": pickle.dumps(index)}


def tensor_of(size: int) -> TensorStorageMetadata:
    shape = torch.Size([size])
    return TensorStorageMetadata(TensorProperties(), shape, [ChunkStorageMetadata(torch.Size([0]), shape)])


def good(**more: Any) -> dict[str, bytes]:
    archives = {"w": (tensor_of(4), saved(STATE["w"])), "note": (BytesStorageMetadata(), saved("ten"))}
    return stored(archives, **more)


def code_for_the_index(attack: Run) -> dict[str, bytes]:
    return {**good(), ".metadata": pickle.dumps(attack)}


def code_of_an_old_protocol(attack: Run) -> dict[str, bytes]:
    return {**good(), ".metadata": pickle.dumps(attack, protocol=2)}


def code_inside_the_index(attack: Run) -> dict[str, bytes]:
    return good(planner_data=attack)


def code_as_a_value(attack: Run) -> dict[str, bytes]:
    return stored({"w": (tensor_of(4), saved(STATE["w"])), "note": (BytesStorageMetadata(), saved(attack))})


def code_as_a_value_in_the_place_of_a_tensor(attack: Run) -> dict[str, bytes]:
    return stored({"w": (BytesStorageMetadata(), saved(attack)), "note": (BytesStorageMetadata(), saved("ten"))})


def code_as_a_tensor(attack: Run) -> dict[str, bytes]:
    return stored({"w": (tensor_of(4), saved(attack)), "note": (BytesStorageMetadata(), saved("ten"))})


ATTACKS = [
    (code_for_the_index, ".metadata"),
    (code_of_an_old_protocol, ".metadata"),
    (code_inside_the_index, ".metadata"),
    (code_as_a_value, DATA),
    (code_as_a_value_in_the_place_of_a_tensor, DATA),
    (code_as_a_tensor, DATA),
]
Attack = Callable[[Run], dict[str, bytes]]


def command(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main([*map(str, arguments)])
    return int(ended.value.code or 0)


def state() -> dict[str, Any]:
    return {"w": torch.zeros(4), "note": ""}


def test_a_checkpoint_made_as_these_are_is_undamaged_and_loads(tmp_path: Path) -> None:
    write(tmp_path, good())
    assert command("checkpoint", "verify", tmp_path) == 0
    loaded = load_checkpoint(tmp_path, state()).state
    assert loaded["w"].tolist() == [0, 1, 2, 3] and loaded["note"] == "ten"


@pytest.mark.parametrize("attack", [attack for attack, _ in ATTACKS if attack is not code_as_a_tensor])
def test_a_load_runs_no_code(attack: Attack, tmp_path: Path, ran: Path) -> None:
    write(tmp_path, attack(Run(ran)))
    with contextlib.suppress(Exception):
        load_checkpoint(tmp_path, state())
    assert not ran.exists()


@pytest.mark.parametrize(("attack", "file"), ATTACKS)
def test_code_in_a_checkpoint_is_refused_and_not_run(
    attack: Attack, file: str, tmp_path: Path, ran: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, attack(Run(ran)))
    assert command("checkpoint", "verify", tmp_path) == 2
    printed = capsys.readouterr()
    assert f"{path / file}: refused" in printed.err and "undamaged" not in printed.out
    assert os.mkdir.__module__ + ".mkdir" in printed.err
    with pytest.raises(UserError, match=path.name):
        load_checkpoint(tmp_path, state())
    settings: dict[str, Any] = {"keep": 1, "keep_best": False, "asynchronous": False, "identity": {}}
    checkpointer = Checkpointer(tmp_path / "checkpoints", **settings, on_event=lambda *_, **__: None)
    for source in (None, path):
        with pytest.raises(UserError, match=path.name):
            checkpointer.load(state(), source)
    checkpointer.close()
    assert not ran.exists()


@pytest.mark.parametrize(("attack", "file"), [each for each in ATTACKS if each[0] is not code_as_a_tensor])
@pytest.mark.parametrize("as_json", [[], ["--json"]])
def test_a_list_refuses_code_in_the_index_and_in_values(
    attack: Attack, file: str, as_json: list[str], tmp_path: Path, ran: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, attack(Run(ran)))
    assert command("checkpoint", "list", tmp_path, *as_json) == 2
    printed = capsys.readouterr()
    assert f"{path / file}: refused" in printed.err and "refused" in printed.out
    assert not ran.exists()


def test_a_class_of_torch_cannot_be_changed_by_an_index(tmp_path: Path) -> None:
    """BUILD with a pair sets attributes of whatever lies below it, such as a class."""
    name = b"\x8c\x25torch.distributed.checkpoint.metadata\x94\x8c\x08Metadata\x94\x93"
    write(tmp_path, {**good(), ".metadata": b"\x80\x04" + name + b"(N}\x8c\x05owned\x8c\x03yessttb."})
    assert command("checkpoint", "verify", tmp_path) == 2
    write_again = b"\x80\x04" + name + b"(N}\x8c\x05owned\x8c\x03yesstb."
    write(tmp_path / "again", {**good(), ".metadata": write_again})
    assert command("checkpoint", "verify", tmp_path / "again") == 2
    assert not hasattr(Metadata, "owned")


def far_memo() -> bytes:
    """LONG_BINPUT 2**24 - 1: Python's unpickler allocates room for all smaller numbers, up to 34 GB."""
    index = good()[".metadata"]
    return index[:-1] + b"r\xff\xff\xff\x00" + index[-1:]


def deep_key() -> bytes:
    """A key of a dictionary that is a tuple of a million levels: hashing it overflows the stack."""
    return b"\x80\x04}N" + b"\x85" * 1_000_000 + b"Ns."


def shared_pieces() -> bytes:
    """A list of a thousand pieces that a thousand tensors share: a million to look at from 30 kB."""
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
    assert [(file.name, file.verdict) for file in verify(info) if file.verdict != "ok"] == [(".metadata", "refused")]
    assert command("checkpoint", "list", tmp_path) == 2


def repacked(archive: bytes, compression: int = zipfile.ZIP_STORED, **more: bytes) -> bytes:
    """The archive with other compression and with more records."""
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(archive)) as old, zipfile.ZipFile(stream, "w", compression) as new:
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
def test_an_archive_that_torch_save_did_not_write_is_refused(archive: bytes, tmp_path: Path) -> None:
    path = write(tmp_path, stored({"w": (tensor_of(4), archive)}))
    info = inspect(path)
    assert info is not None
    assert [(file.name, file.verdict) for file in verify(info) if file.verdict != "ok"] == [(DATA, "refused")]
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


NAMED = {
    "list": b"\x8c\x13torch.serialization\x8c\x0b_get_layout\x93",
    "tuple": b"\x8c\x08builtins\x8c\x07getattr\x93",
}


def doubled_list() -> bytes:
    """A list that holds the list before it twice, and so on: its text has 2**20 parts here, and may have any number."""
    lists = b"".join(b"]\x94(" + b"h%c" % n * 2 + b"e" for n in range(1, 21))
    return b"\x80\x04" + NAMED["list"] + b"\x94]\x94" + lists + b"h\x00h\x15\x85R."


def doubled_tuple_as_key() -> bytes:
    """A tuple that holds the tuple before it twice, kept by calls: hashing it takes 2**20 steps, or any number."""
    tuples = b"".join(b"h\x00" + b"h%c" % n * 2 + b"\x86\x94R" for n in range(1, 21))
    return b"\x80\x04" + NAMED["tuple"] + b"\x94h\x00K\x01K\x01\x86\x94R" + tuples + b"}h\x15Ns."


@pytest.mark.parametrize("index", [doubled_list(), doubled_tuple_as_key()], ids=["list", "tuple"])
def test_an_index_builds_no_value_of_a_size_beyond_its_own(index: bytes, tmp_path: Path) -> None:
    path = write(tmp_path, {**good(), ".metadata": index})
    with pytest.raises(UserError, match=r"calls a function with list|is no tuple of sizes"):
        load_checkpoint(path, state())


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
    ids=["deep-key", "deep-in-set", "deep-list", "wide-key", "wide-list", "changed-part", "slow", "storage", "typed"],
)
def test_a_value_that_is_deep_or_huge_or_slow_to_build_is_refused(content: bytes, tmp_path: Path) -> None:
    """The first two killed the process when they were loaded, the fourth and (longer) the slow one never ended."""
    archive = of_pickle(b"\x80\x02" + content + b".")
    path = write(tmp_path, stored({"note": (BytesStorageMetadata(), archive)}))
    assert command("checkpoint", "verify", tmp_path) == 2
    assert command("checkpoint", "list", tmp_path) == 2
    with pytest.raises(UserError, match=DATA):
        load_checkpoint(path, {"note": ""})


def tensor_claiming(storage: int, shape: list[int], strides: list[int]) -> bytes:
    """A tensor of 16 bytes whose pickle claims a storage of other size, or a shape that the storage cannot hold."""
    storage_id = b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu") + number(storage) + b"tQ"
    sizes = b"".join(b"(" + b"".join(map(number, values)) + b"t" for values in (shape, strides))
    call = storage_id + b"K\x00" + sizes + b"\x89ccollections\nOrderedDict\n)R"
    return of_pickle(b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(" + call + b"tR.", **{"0": bytes(16)})


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


PLAIN = [None, True, -1, 2**40, 2.5, "text", b"bytes", [1, (2, 3)], [{"a": {1, 2}, 3: []}], torch.Size([2, 3])]


def test_every_plain_value_is_saved_and_loaded_and_an_object_is_not_saved(tmp_path: Path) -> None:
    events: list[str] = []
    settings: dict[str, Any] = {"keep": 1, "keep_best": False, "asynchronous": False, "identity": {}}
    checkpointer = Checkpointer(
        tmp_path / "checkpoints", **settings, on_event=lambda name, **fields: events.append(name)
    )
    tensors = {
        f"t{n}": torch.ones(2, dtype=dtype) for n, dtype in enumerate((torch.bfloat16, torch.uint16, torch.bool))
    }
    values = {f"v{n}": value for n, value in enumerate(PLAIN)}
    checkpointer.save(1, {**values, **tensors}, metadata={}, wait=True)
    loaded = load_checkpoint(tmp_path, dict.fromkeys(values) | {key: torch.zeros_like(t) for key, t in tensors.items()})
    assert {key: loaded.state[key] for key in values} == values
    assert all(torch.equal(loaded.state[key], tensor) for key, tensor in tensors.items())
    checkpointer.save(2, {"path": Path("x")}, metadata={}, wait=True)
    checkpointer.close()
    assert events == ["checkpoint", "checkpoint_failed"]


# -- the manifest ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "a/../../../outside", "..", ".", "", "manifest.json"])
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
def test_a_file_that_is_a_link_out_of_the_checkpoint_is_not_opened(name: str, tmp_path: Path) -> None:
    path = write(tmp_path, good())
    (path / name).rename(tmp_path / "outside")
    (path / name).symlink_to(tmp_path / "outside")
    (info,) = list_checkpoints(tmp_path)
    assert info.status == "damaged" and name in info.reason and "link" in info.reason
    assert all(file.verdict == "unreadable" for file in verify(info) if file.name == name and name != "manifest.json")
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
def test_a_manifest_with_values_of_another_kind_is_not_believed(old: str, new: str, tmp_path: Path) -> None:
    raw = encode(Manifest(10, 1, "2.15.0", "2026-01-31T12:00:00.000Z", {DATA: FileRecord(4, "0" * 32)}))
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
    assert info.status == "damaged" and "larger than" in info.reason


def test_what_stands_for_the_held_out_loss_is_a_number_or_nothing(tmp_path: Path) -> None:
    path = write(tmp_path, good())
    for content in ("1" * 400, '{"held_out_loss": 1' + "0" * 400 + "}", "[" * 4000, '{"held_out_loss": "x"}'):
        (path / "held_out.json").write_text(content)
        (info,) = list_checkpoints(tmp_path)
        assert info.complete and info.held_out_loss is None
