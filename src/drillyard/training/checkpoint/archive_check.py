"""The archives of a checkpoint, one per tensor or value, looked at without loading them. Needs no
torch.

An archive is what `torch.save` writes: a zip file with a pickle `data.pkl`, at some offset of a
data file. The opcodes of the pickle are read, not run: the names in it are compared with those of
tensors and plain containers, and the sizes of what it would build are added up. This comes before
`torch.load(weights_only=True)`, which has rules of its own, and bounds what that can be made to
allocate.

Cost: 0.3 ms per archive.
"""

from __future__ import annotations

import io
import pickletools
import re
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final, cast

from drillyard.guarded_files import open_unbuffered
from drillyard.training.checkpoint.index_reader import (
    DTYPE,
    METADATA_NAME,
    ArchiveLocation,
    UnsafeCheckpoint,
    UnsafeContent,
    raise_unsafe,
    read_index,
)
from drillyard.training.checkpoint.manifest import Manifest

LARGEST_READ_BYTES = 16 * 1024**2
"""Of an archive's directory or `data.pkl`: a tensor's have some hundred bytes, those of a plain
value its own size."""

_TENSOR_PARTS: Final = {
    "torch._utils _rebuild_tensor_v2",
    "torch._utils _rebuild_tensor_v3",
    "torch.storage UntypedStorage",
    "torch Size",
}
_PLAIN: Final = {"collections OrderedDict", "_codecs encode", "__builtin__ set", "builtins set"}
_STORAGE: Final = re.compile(r"torch [A-Z]\w*Storage")
# What torch.save (protocol 2) gives for tensors, dictionaries, lists, tuples, sets, numbers, text
# and bytes.
_OPCODES: Final = """
APPEND APPENDS BINFLOAT BINGET BININT BININT1 BININT2 BINPERSID BINPUT BINUNICODE EMPTY_DICT EMPTY_LIST EMPTY_TUPLE
GLOBAL LONG1 LONG_BINGET LONG_BINPUT MARK NEWFALSE NEWTRUE NONE PROTO REDUCE SETITEM SETITEMS STOP TUPLE TUPLE1 TUPLE2
TUPLE3
"""  # noqa: E501
_ALLOWED_OPCODES: Final = frozenset(_OPCODES.split())
_CALLED: Final = (_TENSOR_PARTS | _PLAIN) - {"torch.storage UntypedStorage"}
_DEEPEST: Final = 100
"""Levels of lists, dictionaries and tuples in a value: twice what a config may have, and far below
the stack's end."""
_MOST_VALUES: Final = 100_000_000
"""Parts of all values, each counted once per container around it: a pickle of 16 MiB needs less."""


def unsafe_files(directory: Path, manifest: Manifest) -> dict[str, str]:
    """Reasons for refusing files of a checkpoint, by name. All must be as the manifest says."""
    if METADATA_NAME not in manifest.files:
        return {}
    try:
        places = read_index(directory, manifest).places.values()
    except (UnsafeCheckpoint, OSError) as error:
        return {METADATA_NAME: str(error)}
    refused: dict[str, str] = {}
    for place in places:
        if place.name not in refused:
            try:
                check_archive(directory, place)
            except (UnsafeCheckpoint, OSError) as error:
                refused[place.name] = str(error)
    return refused


def require_plain(directory: Path, manifest: Manifest) -> None:
    """Raise UnsafeCheckpoint where the index of a checkpoint, or a value stored in it, is not
    plain. Raises OSError.

    Reads the index and the archives of values, not those of tensors: milliseconds for a checkpoint
    of a few ranks.
    """
    for place in read_index(directory, manifest).value_places():
        check_archive(directory, place)


def check_archive(directory: Path, place: ArchiveLocation) -> None:
    """Raise UnsafeCheckpoint unless the archive holds a tensor or plain values. Raises OSError.

    Its records are stored, not compressed: what is read from it is no larger than it is.
    """
    path = directory / place.name
    with open_unbuffered(path) as file:
        try:
            check_archive_stream(_Window(file, place.start, place.bytes), place.bytes)
        except UnsafeContent as refused:
            raise_unsafe(path, f"the archive at byte {place.start} {refused}")


def check_archive_stream(stream: io.RawIOBase | io.BytesIO, size: int) -> None:
    """As `check_archive`, of an open archive of `size` bytes; raises ValueError."""
    try:
        with zipfile.ZipFile(cast(IO[bytes], stream)) as archive:
            records = archive.infolist()
            if any(record.compress_type != zipfile.ZIP_STORED for record in records):
                raise UnsafeContent("has compressed records")
            if sum(record.file_size for record in records) > size:
                raise UnsafeContent("claims more bytes than it has")
            names = [record.filename.casefold() for record in records]
            if len(set(names)) < len(names):
                raise UnsafeContent("has two records of one name")
            pickles = [record for record in records if record.filename.endswith((".pkl", ".py"))]
            if (
                len(pickles) != 1
                or pickles[0].filename.count("/") != 1
                or not pickles[0].filename.endswith("/data.pkl")
            ):
                raise UnsafeContent("has other records than torch.save writes")
            if pickles[0].file_size > LARGEST_READ_BYTES:
                raise UnsafeContent(f"has a pickle of {pickles[0].file_size} bytes")
            content = archive.read(pickles[0])
        _Builder().run(content)
    except UnsafeContent:
        raise
    except Exception as error:  # zipfile and pickletools have no list of what damaged files raise
        raise UnsafeContent(f"cannot be read ({type(error).__name__}: {error})") from error


@dataclass(slots=True)
class _Value:
    """Known size and depth of a value. `contained`: it is part of another value."""

    size: int = 1
    depth: int = 1
    contained: bool = False
    text: object = None  # of a string, and of the function that GLOBAL names
    members: tuple[object, ...] = ()  # the texts of a tuple's members


class _Builder:
    """Follows a pickle with sizes in the place of values, and refuses all but tensors and plain
    values.

    A few bytes can build a tuple of 2**40 members, by containing the one before twice, or one of a
    million levels. Hashing the first never ends, and hashing the second overflows the stack and
    kills the process.
    """

    def __init__(self) -> None:
        self._stack: list[_Value] = []
        self._marks: list[int] = []
        self._memo: dict[object, _Value] = {}
        self._total = 0

    def run(self, content: bytes) -> None:
        """Raises UnsafeContent, and anything for a pickle that is not well formed."""
        for opcode, argument, _ in pickletools.genops(content):
            if opcode.name not in _ALLOWED_OPCODES:
                raise UnsafeContent(
                    f"has the pickle opcode {opcode.name}, and tensors and plain values have none"
                )
            self._step(opcode.name, argument)

    def _step(self, opcode: str, argument: object) -> None:
        stack = self._stack
        match opcode:
            case "PROTO" | "STOP":
                pass
            case "GLOBAL":
                _require_known(str(argument))
                stack.append(_Value(text=argument))
            case "MARK":
                self._marks.append(len(stack))
            case "BINPUT" | "LONG_BINPUT":
                self._memo[argument] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(self._memo[argument])
            case "TUPLE" | "TUPLE1" | "TUPLE2" | "TUPLE3":
                members = self._pop(int(opcode[5:] or 0))
                stack.append(_Value(members=tuple(member.text for member in members[:3])))
                self._contain(stack[-1], members)
            case "APPEND" | "APPENDS" | "SETITEM" | "SETITEMS":
                members = self._pop({"APPEND": 1, "SETITEM": 2}.get(opcode, 0))
                self._contain(stack[-1], members)
            case "REDUCE":
                function, arguments = self._pop(2)
                _require_call(function, arguments)
                stack.append(_Value())
                self._contain(stack[-1], [arguments])
            case "BINPERSID":
                stack[-1] = _Value()
            case _:
                stack.append(_Value(text=argument))

    def _pop(self, count: int) -> list[_Value]:
        """The last `count` values; all behind the last mark where it is 0."""
        start = len(self._stack) - count if count else self._marks.pop()
        members = self._stack[start:]
        del self._stack[start:]
        return members

    def _contain(self, container: _Value, members: list[_Value]) -> None:
        if (
            container.contained
        ):  # its size has been counted; torch.save fills a container before it uses it
            raise UnsafeContent("changes a value that is part of another one already")
        for member in members:
            member.contained = True
            container.size += member.size
            container.depth = max(container.depth, member.depth + 1)
            self._total += member.size
            if container.depth > _DEEPEST or self._total > _MOST_VALUES:
                raise UnsafeContent(
                    f"has a value of more than {_DEEPEST} levels or {_MOST_VALUES} parts"
                )


def _require_known(wanted: str) -> None:
    module, _, name = wanted.partition(" ")
    is_dtype = module == "torch" and DTYPE.fullmatch(name) is not None
    if not (wanted in _TENSOR_PARTS or wanted in _PLAIN or is_dtype or _STORAGE.fullmatch(wanted)):
        raise UnsafeContent(
            f"names {module[:80]}.{name[:80]}, which is no part of a tensor or a plain value"
        )


def _require_call(function: _Value, arguments: _Value) -> None:
    """Storages are named, never called: `UntypedStorage(2**45)` allocates that many bytes. Some
    text encodings take quadratic time; bytes are pickled as latin1."""
    if function.text not in _CALLED:
        raise UnsafeContent(
            f"calls {str(function.text)[:80]!r}, which makes no tensor or plain value"
        )
    if function.text == "_codecs encode" and (
        len(arguments.members) != 2 or arguments.members[1] != "latin1"
    ):
        raise UnsafeContent("has bytes in another encoding than torch.save writes")


class _Window(io.RawIOBase):
    """A part of an open file as a file of its own; a single read of more than `LARGEST_READ_BYTES`
    is refused."""

    def __init__(self, file: io.FileIO, start: int, size: int) -> None:
        super().__init__()
        self._file, self._start, self._size, self._at = file, start, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = max(
            0, offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        )
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._size - self._at)
        size = left if size < 0 else min(size, left)
        if size > LARGEST_READ_BYTES:
            raise UnsafeContent(f"has a part of {size} bytes that no tensor or plain value has")
        self._file.seek(self._start + self._at)
        data = self._file.read(size)
        self._at += len(data)
        return data
