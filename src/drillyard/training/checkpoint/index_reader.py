"""The index of a checkpoint, read without running anything that it names. Needs no torch.

torch.distributed.checkpoint (DCP) keeps its index, `.metadata`, as a pickle, and a pickle is a
program: `pickle.load` calls what the file names. `read_index` accepts only the opcodes, in the
order, that pickling DCP's metadata classes gives, and puts an inert class in the place of each
class that these files may name. Any other name is refused, and so is a place outside of the files
that the manifest lists. `dcp_storage.metadata_of` makes torch's own objects from the result.
`archive_check.py` does the same for the tensors and values.

Cost: 24 microseconds per piece of a tensor, one and a half times that of `pickle.load` (60,000
pieces).
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

from drillyard.errors import UnsafeFileError
from drillyard.guarded_files import open_regular
from drillyard.training.checkpoint.manifest import Manifest

METADATA_NAME = ".metadata"
LARGEST_INDEX_BYTES = 1024**3
"""About 7 million pieces at 150 bytes: 3,000 tensors on 2,300 ranks."""
MOST_DIMS = 64
"""torch's own limit is 64 as well (at::TensorIterator)."""


class UnsafeCheckpoint(UnsafeFileError):
    """A file of a checkpoint holds what no checkpoint needs, such as code; the text names the file
    and the reason."""


def raise_unsafe(path: Path, reason: str) -> NoReturn:
    """Raise UnsafeCheckpoint with the advice that every such refusal needs."""
    raise UnsafeCheckpoint(
        f"{path}: refused: {reason}. Nothing of it was run. A checkpoint holds tensors and plain"
        " values only: do not use this one; get it from a source that you trust (one of a later"
        " torch needs a later Drillyard)"
    )


class UnsafeContent(ValueError):
    """Refused content, described as the end of a sentence about a file."""


@dataclass(frozen=True)
class ArchiveLocation:
    """Location of an archive: `bytes` bytes from `start` of the file `name` in the checkpoint's
    directory."""

    name: str
    start: int
    bytes: int


@dataclass(frozen=True)
class TensorEntry:
    """A tensor as the index describes it; `pieces`: (offset, shape) of each stored box."""

    dtype: str
    shape: tuple[int, ...]
    pieces: list[tuple[tuple[int, ...], tuple[int, ...]]]


@dataclass(frozen=True)
class CheckpointIndex:
    """The content of `.metadata`. `places` by key and, for a piece of a tensor, its offset; None
    for a plain value."""

    tensors: dict[str, TensorEntry]
    values: list[str]
    places: dict[tuple[str, tuple[int, ...] | None], ArchiveLocation]

    def value_places(self) -> list[ArchiveLocation]:
        return [self.places[key, None] for key in self.values]


def read_index(directory: Path, manifest: Manifest) -> CheckpointIndex:
    """The index of a checkpoint whose `.metadata` is as the manifest says. Raises UnsafeCheckpoint
    and OSError."""
    path = directory / METADATA_NAME
    with open_regular(path) as file:
        raw = file.read(LARGEST_INDEX_BYTES + 1)
    data_bytes = sum(
        record.bytes for name, record in manifest.files.items() if name != METADATA_NAME
    )
    # A piece takes some 150 bytes here and more than 1,000 in its data file.
    if len(raw) > min(LARGEST_INDEX_BYTES, data_bytes + 1024**2):
        raise_unsafe(
            path, f"an index of {len(raw)} bytes over {data_bytes} bytes of data is too large"
        )
    try:
        _require_known_opcodes(raw)
        return _checked(_Unpickler(io.BytesIO(raw)).load(), manifest)
    except UnsafeContent as refused:
        raise_unsafe(path, str(refused))
    # a pickle that is not what it should be fails in any way: that is no reason to load it
    except Exception as error:
        raise_unsafe(path, f"it is not the index of a checkpoint ({type(error).__name__}: {error})")


class _Inert(type):
    """The metaclass of stand-ins: a pickle can set attributes of a class that it names (BUILD); not
    of these."""

    def __setattr__(cls, name: str, value: object) -> None:
        raise UnsafeContent(f"changes the class {cls.__name__}")


class _Object(metaclass=_Inert):
    """Stands for an object of DCP's metadata classes: its attributes, as the pickle sets them."""

    def field(self, name: str, kind: type | tuple[type, ...]) -> Any:
        """The attribute, where it has one of the types; else the index is refused."""
        value = self.__dict__.get(name)
        if type(value) not in (kind if isinstance(kind, tuple) else (kind,)):
            raise UnsafeContent(
                f"it has {type(value).__name__} for {type(self).__name__.lstrip('_')}.{name}"
            )
        return value


class _TensorProperties(_Object):
    def __setstate__(self, state: object) -> None:
        """(dtype, layout, requires_grad, memory format, pinned) and, since torch 2.12, strides."""
        if type(state) is not tuple or len(state) not in (5, 6) or type(state[0]) is not _Dtype:
            raise UnsafeContent("it has tensor properties of another form")
        if len(state) == 6 and state[5] is not None:
            _shape(state[5])
        if any(type(item) not in (_Dtype, str, bool, int) for item in state[:5]):
            raise UnsafeContent("it has tensor properties of another form")
        self.__dict__["dtype"] = state[0].name


class _Dtype:
    """Stands for a torch.dtype."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


class _Function:
    """Stands for a function that the pickle may call, and has no attribute that it could set."""

    __slots__ = ("_function",)
    _function: Callable[..., Any]

    def __init__(self, function: Callable[..., Any]) -> None:
        object.__setattr__(self, "_function", function)

    def __setattr__(self, name: str, value: object) -> None:
        raise UnsafeContent("changes a function")

    def __call__(self, *arguments: Any) -> Any:
        """Refuses arguments that are no number, text or shape: calls could nest tuples without end
        (see `_RUN`)."""
        for argument in arguments:
            if type(argument) is tuple:
                _shape(argument)
            elif type(argument) not in (int, str, _Function):
                raise UnsafeContent(f"it calls a function with {type(argument).__name__}")
        return self._function(*arguments)


def _shape(values: object) -> tuple[int, ...]:
    """torch.Size: a flat tuple of sizes."""
    if (
        type(values) is not tuple
        or len(values) > MOST_DIMS
        or any(type(v) is not int or v < 0 for v in values)
    ):
        raise UnsafeContent("it has a shape that is no tuple of sizes")
    return values


_DCP: Final = "torch.distributed.checkpoint.metadata"
_CLASSES: Final[dict[str, Any]] = {
    name: _Inert(name, (_Object,), {})
    for name in (
        "Metadata",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "MetadataIndex",
        "StorageMeta",
        "_StorageInfo",
    )
}
_STAND_INS: Final[dict[tuple[str, str], Any]] = {
    **{(_DCP, name): stand_in for name, stand_in in _CLASSES.items() if name != "_StorageInfo"},
    (_DCP, "TensorProperties"): _TensorProperties,
    # What these give is not used. getattr(enumeration, name) is how Python 3.11 before 3.11.4
    # pickled a member.
    (_DCP, "_MEM_FORMAT_ENCODING"): _Function(lambda *_: 0),
    ("torch.serialization", "_get_layout"): _Function(lambda *_: 0),
    ("builtins", "getattr"): _Function(lambda *_: 0),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _CLASSES["_StorageInfo"],
    ("torch", "Size"): _Function(_shape),
}
DTYPE: Final = re.compile(r"b?float\d\w*|bool|u?int\d+|b?complex\d+")


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _STAND_INS:
            return _STAND_INS[module, name]
        if module == "torch" and DTYPE.fullmatch(name):
            return _Dtype(name)
        raise UnsafeContent(
            f"it names {module[:80]}.{name[:80]}, which is no part of a checkpoint's index"
        )


# The opcodes of protocol 4 and 5 that pickling the classes above gives (pickletools names them). A
# tuple stands only where these classes have one: as a shape or the one argument of a call, and in
# the state of TensorProperties. So tuples are never deep (hashing one of 200,000 levels ends the
# process), and there is no PUT, whose number makes the unpickler allocate memory for all smaller
# ones. A frame (\x95) may begin between any two objects.
_FRAME: Final = rb"(?:\x95.{8})?"
_RUN: Final = re.compile(
    rb"(?:[)}\](Nbsuea\x81\x88\x89\x93\x94]"
    rb"|[Kh].|M..|[Jj].{4}|\x95.{8}|\x8a(?:\x05.{5}|\x06.{6}|\x07.{7}|\x08.{8})"
    rb"|[\x85\x86\x87t]\x94?F(?:\x85\x94?F)?R"
    rb"|(?:[\x85\x86\x87t]\x94?F)?t\x94?Fb)*+".replace(b"F", _FRAME),
    re.DOTALL,
)


def _require_known_opcodes(raw: bytes) -> None:
    """Raise UnsafeContent at the first opcode that pickling an index does not give."""
    if raw[:2] not in (b"\x80\x04", b"\x80\x05"):
        raise UnsafeContent(
            f"it is not the index of a checkpoint{_named(raw, 2 * raw.startswith(bytes([0x80])))}"
        )
    at = 2
    while True:
        match = _RUN.match(raw, at)
        assert match is not None, "the pattern matches nothing, too"
        at = match.end()
        opcode = raw[at : at + 1]
        if opcode == b"\x8c" and at + 1 < len(raw):
            at += 2 + raw[at + 1]
        elif opcode == b"X":
            at += 5 + int.from_bytes(raw[at + 1 : at + 5], "little")
        elif opcode == b"." and at == len(raw) - 1:
            return
        else:
            raise UnsafeContent(
                f"it has the pickle opcode {opcode!r} at byte {at}, and an index has"
                f" none{_named(raw, at)}"
            )


def _named(raw: bytes, at: int) -> str:
    """Name the global of an older protocol's opcode at `at` (GLOBAL or INST), for the message."""
    if raw[at : at + 1] not in (b"c", b"i"):
        return ""
    module, name = [*raw[at + 1 : at + 200].split(b"\n"), b""][:2]
    return f" (it names {module.decode(errors='replace')}.{name.decode(errors='replace')})"


def _checked(metadata: Any, manifest: Manifest) -> CheckpointIndex:
    """The index in the unpickled stand-ins. Raises UnsafeContent where it is inconsistent or points
    outside of the data files.
    """
    if type(metadata) is not _CLASSES["Metadata"]:
        raise UnsafeContent("it is not the index of a checkpoint")
    places: dict[tuple[str, tuple[int, ...] | None], ArchiveLocation] = {}
    for key, info in metadata.field("storage_data", dict).items():
        if type(key) is not _CLASSES["MetadataIndex"] or type(info) is not _CLASSES["_StorageInfo"]:
            raise UnsafeContent("it has a place of another form")
        if info.__dict__.get("transform_descriptors"):
            raise UnsafeContent("it names a transformation of the data; Drillyard writes none")
        place = ArchiveLocation(
            info.field("relative_path", str), info.field("offset", int), info.field("length", int)
        )
        if place.name not in manifest.files or place.name == METADATA_NAME:
            raise UnsafeContent(
                f"it names the file {place.name[:80]!r}, which the manifest does not list as data"
            )
        if (
            place.start < 0
            or place.bytes < 0
            or place.start + place.bytes > manifest.files[place.name].bytes
        ):
            raise UnsafeContent(
                f"it names bytes {place.start} to {place.start + place.bytes} beyond the end of"
                f" {place.name}"
            )
        offset = key.field("offset", (tuple, type(None)))
        places[key.field("fqn", str), None if offset is None else _shape(offset)] = place
    tensors: dict[str, TensorEntry] = {}
    values: list[str] = []
    pieces_left = len(
        places
    )  # each piece has its own place, so that a list shared by many tensors costs nothing
    for name, stored in metadata.field("state_dict_metadata", dict).items():
        if type(name) is not str:
            raise UnsafeContent("it has a key that is no text")
        if type(stored) is _CLASSES["BytesStorageMetadata"]:
            values.append(name)
            _require_places(places, name, [None])
            continue
        if type(stored) is not _CLASSES["TensorStorageMetadata"]:
            raise UnsafeContent(f"it has neither a tensor nor a plain value for {name[:80]!r}")
        chunks = stored.field("chunks", list)
        pieces_left -= len(chunks)
        if pieces_left < 0 or any(
            type(chunk) is not _CLASSES["ChunkStorageMetadata"] for chunk in chunks
        ):
            raise UnsafeContent(f"it has more pieces of {name[:80]!r} than places for them")
        pieces = [
            (_shape(chunk.field("offsets", tuple)), _shape(chunk.field("sizes", tuple)))
            for chunk in chunks
        ]
        _require_places(places, name, (offset for offset, _ in pieces))
        dtype = stored.field("properties", _TensorProperties).field("dtype", str)
        tensors[name] = TensorEntry(dtype, _shape(stored.field("size", tuple)), pieces)
    return CheckpointIndex(tensors, values, places)


def _require_places(
    places: dict[tuple[str, tuple[int, ...] | None], ArchiveLocation],
    name: str,
    offsets: Iterable[tuple[int, ...] | None],
) -> None:
    if any((name, offset) not in places for offset in offsets):
        raise UnsafeContent(f"it has no place for a piece of {name[:80]!r}")
