"""A small file system of its own for the checkpoints of one run, gone without trace when its processes are.

A tmpfs, mounted in a mount namespace that only this process and its children see: nothing is left mounted when they
end, however they end. Needs the right to mount (root); `may_mount` says whether there is one.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

from drillyard.errors import UserError

_CLONE_NEWNS = 0x00020000
_MS_REC_PRIVATE = 0x4000 | 0x40000
_LARGEST_BYTES = 4 * 1024**3
_libc = ctypes.CDLL(None, use_errno=True)


def can_mount(size_bytes: int) -> bool:
    """Whether a tmpfs of this size can be mounted here: this process sees mounts of its own from now on if so."""
    memory = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if size_bytes > min(_LARGEST_BYTES, memory // 4) or _libc.unshare(_CLONE_NEWNS) != 0:
        return False
    return _mount(b"none", b"/", None, _MS_REC_PRIVATE, None) == 0


@contextlib.contextmanager
def mounted_tmpfs(directory: Path, size_bytes: int) -> Iterator[None]:
    """A tmpfs of `size_bytes` at `directory`, which is made. After `may_mount` has said yes. Raises UserError."""
    directory.mkdir(parents=True)
    if _mount(b"tmpfs", os.fsencode(directory), b"tmpfs", 0, f"size={size_bytes}".encode()) != 0:
        raise UserError(f"{directory}: no small file system can be mounted: {os.strerror(ctypes.get_errno())}")
    try:
        yield
    finally:
        _libc.umount2(os.fsencode(directory), 2)  # MNT_DETACH: also when a process still looks into it


def _mount(source: bytes, target: bytes, kind: bytes | None, flags: int, data: bytes | None) -> int:
    return int(_libc.mount(source, target, kind, ctypes.c_ulong(flags), data))
