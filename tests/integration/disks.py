"""Small real file systems to fill and to break; mounting them needs root.

- `Tmpfs`: of a few MB, full in no time.
- `LoopDisk`: ext4 on a loop device. `abort` turns it read-only, as the kernel does after an error;
  a second one whose image lies on the first then has a device that answers each write with an I/O
  error.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from pathlib import Path

MIB = 1024 * 1024
TIMEOUT_SECONDS = 120


class Tmpfs:
    """A tmpfs at `place`, from `mount` to `unmount`."""

    def __init__(self, place: Path, size_bytes: int) -> None:
        self.place = place
        self._size_bytes = size_bytes

    def mount(self) -> None:
        self.place.mkdir(parents=True, exist_ok=True)
        _run("mount", "-t", "tmpfs", "-o", f"size={self._size_bytes}", "tmpfs", self.place)

    def unmount(self) -> None:
        # Lazily: what a failed test has left running must not keep the disk.
        _run("umount", "--lazy", self.place)

    def fill(self, leave: int = 0) -> Path:
        """A file that leaves only so many bytes free; deleting it gives them back."""
        ballast = self.place / "ballast"
        # Who else writes there meanwhile may take the last page first: then it is full all the
        # same.
        with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            statistics = os.statvfs(self.place)
            file.write(bytes(statistics.f_bavail * statistics.f_frsize - leave))
        return ballast


class LoopDisk:
    """ext4 at `place` on a loop device; its image is made in the directory `below`."""

    def __init__(self, place: Path, size_bytes: int, below: Path) -> None:
        self.place = place
        self._image = below / f"{place.name}.image"
        self._size_bytes = size_bytes

    def make(self) -> None:
        """Make the file system and mount it."""
        with self._image.open("wb") as file:
            file.truncate(self._size_bytes)
        _run("mkfs.ext4", "-q", self._image)
        self.place.mkdir(parents=True, exist_ok=True)
        self.mount()

    def mount(self) -> None:
        _run("mount", "-o", "loop,errors=remount-ro", self._image, self.place)

    def unmount(self) -> None:
        """Unmount, and wait until the kernel has let go of the image: then what that lies on can be
        unmounted too."""
        _run("umount", self.place)
        end = time.monotonic() + TIMEOUT_SECONDS
        while any(
            _backing_file(device) == str(self._image.resolve())
            for device in Path("/sys/block").glob("loop*")
        ):
            assert time.monotonic() < end, f"{self._image} is still in use"
            time.sleep(0.01)

    def check(self) -> None:
        """Repair the unmounted file system, as after any error of its device."""
        ended = subprocess.run(["e2fsck", "-fy", str(self._image)], capture_output=True, text=True)
        assert ended.returncode <= 1, ended.stdout + ended.stderr

    def abort(self) -> None:
        """What the kernel does after an error that it cannot go on from: read-only at once, open
        files or not.

        What was not on the disk before would be gone, or be damaged, as soon as the kernel needs
        the memory.
        """
        _run("sync", "--file-system", self.place)
        _run("mount", "-o", "remount,abort", self.place)


def _backing_file(device: Path) -> str | None:
    """The image that a loop device shows; None for a free one."""
    try:
        return (device / "loop" / "backing_file").read_text().strip()
    except OSError:
        return None


def _run(*command: object) -> None:
    ended = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    assert ended.returncode == 0, f"{command}: {ended.stderr}"
