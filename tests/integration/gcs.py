"""A bucket on this machine: fake-gcs-server behind the real gcsfuse, both of which can be taken
away for a while.

`.ci/tools/gcsfuse` builds the two programs. Objects live in the server's memory.
Mounting needs root and /dev/fuse.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from http import HTTPStatus
from pathlib import Path

from drillyard.supervise.sockets import free_port

TOOLS = Path(os.environ.get("DRILLYARD_TOOLS") or "~/.cache/drillyard/tools").expanduser()
BUCKET = "bucket"
TIMEOUT_SECONDS = 180


class Bucket:
    """A bucket and its mount at `place`; `log` collects what gcsfuse says."""

    def __init__(self, directory: Path) -> None:
        self.place = directory / "mount"
        self.log = directory / "gcsfuse.log"
        self._port = free_port(set())
        self._server: subprocess.Popen[bytes] | None = None
        self._gcsfuse: subprocess.Popen[bytes] | None = None
        self._more: list[subprocess.Popen[bytes]] = []
        self.place.mkdir(parents=True)

    @property
    def endpoint(self) -> str:
        """Where the server answers: what STORAGE_EMULATOR_HOST is to be."""
        return f"http://127.0.0.1:{self._port}"

    def start_server(self) -> None:
        """Start the server and wait until it answers."""
        command = [
            _tool("fake-gcs-server"),
            "-scheme",
            "http",
            "-host",
            "127.0.0.1",
            "-port",
            str(self._port),
        ]
        command += ["-backend", "memory", "-public-host", f"127.0.0.1:{self._port}"]
        self._server = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        _until(self._has_bucket, "fake-gcs-server does not answer")

    def hold_server(self) -> None:
        """The server takes no request any more and closes no connection."""
        assert self._server is not None
        self._server.send_signal(signal.SIGSTOP)

    def release_server(self) -> None:
        assert self._server is not None
        self._server.send_signal(signal.SIGCONT)

    def mount(self, *options: str) -> None:
        """Mount the bucket with gcsfuse's defaults, but for two calls that the fake server
        lacks."""
        self._gcsfuse = self._mounted(self.place, (), options)

    def mount_again(self, place: Path, namespace: Sequence[str], *options: str) -> None:
        """Mount it at `place` too, by a gcsfuse of its own, in the mount namespace that the command
        line `namespace` enters."""
        self._more.append(self._mounted(place, namespace, options))

    def _mounted(
        self, place: Path, namespace: Sequence[str], options: Sequence[str]
    ) -> subprocess.Popen[bytes]:
        command = [
            *namespace,
            _tool("gcsfuse"),
            "--foreground",
            "--implicit-dirs",
            "--anonymous-access",
            *options,
        ]
        command += ["--custom-endpoint", f"http://127.0.0.1:{self._port}/storage/v1/"]
        command += ["--enable-hns=false", "--enable-atomic-rename-object=false", BUCKET, str(place)]
        with self.log.open("ab") as log:
            made = subprocess.Popen(command, stdout=log, stderr=log)
        is_mounted = [*namespace, "mountpoint", "--quiet", str(place)]
        _until(
            lambda: not subprocess.call(is_mounted),
            f"gcsfuse does not mount; its log is {self.log}",
        )
        return made

    def unmount(self) -> None:
        """Unmount in order: what was written is in the bucket."""
        assert self._gcsfuse is not None
        subprocess.run(["umount", str(self.place)], check=True)
        self._gcsfuse.wait(timeout=TIMEOUT_SECONDS)

    def kill_mount(self) -> None:
        """gcsfuse dies with all that it had not uploaded, and every file below the mount is
        dead."""
        _kill(self._gcsfuse)
        subprocess.run(["umount", "--lazy", str(self.place)], check=True)

    def discard(self) -> None:
        """End all programs, however they are."""
        for mount in (self._gcsfuse, *self._more):
            _kill(mount)
        _kill(self._server)
        subprocess.run(
            ["umount", "--lazy", str(self.place)], check=False, stderr=subprocess.DEVNULL
        )

    def _has_bucket(self) -> bool:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._port}/storage/v1/b?project=p",
            data=json.dumps({"name": BUCKET}).encode(),
            headers={"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=10.0) as answer:
                return bool(answer.status == 200)
        except urllib.error.HTTPError as error:
            # Made by a request whose answer came too late for us.
            return error.code == HTTPStatus.CONFLICT
        except OSError:
            return False


def _tool(name: str) -> str:
    found = sorted(TOOLS.glob(f"{name}-v*"))
    assert found, f"{name} is not built: run sh .ci/tools/gcsfuse"
    return str(found[-1])


def _kill(process: subprocess.Popen[bytes] | None) -> None:
    if process is not None:
        process.kill()
        process.wait()


def _until(condition: Callable[[], bool], otherwise: str) -> None:
    end = time.monotonic() + TIMEOUT_SECONDS
    while not condition():
        assert time.monotonic() < end, otherwise
        time.sleep(0.02)
