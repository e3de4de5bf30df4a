"""Builds docker/Dockerfile for real: buildah in a chroot, on a base that debootstrap makes once and
that is kept.

No daemon and no registry: the base is a Debian tree, kept outside the checkout. pip inside of the
build needs what pip needs on this machine (an index, a certificate); it is mounted for the build
and is nothing of the image.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
SUITE = "bookworm"
PACKAGES = "python3,python3-venv,ca-certificates"
BASE, IMAGE = "localhost/drillyard-test-base", "localhost/drillyard-test"
MAX_IMAGES = 60
"""Kept steps of builds; beyond, those that no image needs are removed."""
TOOLS = Path(os.environ.get("DRILLYARD_TOOLS") or Path.home() / ".cache/drillyard/tools")


class Builder:
    """buildah with a storage of its own, so that no other image of the machine is seen or changed.

    The storage is kept: steps of the Dockerfile that did not change are not done again.
    """

    def __init__(self, directory: Path) -> None:
        self._environment = {**os.environ, "BUILDAH_ISOLATION": "chroot"}
        # vfs copies the whole tree for every step; it is for machines where overlay file systems
        # cannot be mounted.
        for driver in ("overlay", "vfs"):
            storage = directory / f"buildah-{driver}"
            self._flags = [
                "--root",
                str(storage / "root"),
                "--runroot",
                str(storage / "run"),
                "--storage-driver",
                driver,
            ]
            if self._process("info").returncode == 0:
                break

    def __call__(self, *argv: str) -> str:
        """Standard output of `buildah ARGV`. What it says where it fails is the error."""
        done = self._process(*argv)
        assert done.returncode == 0, (
            f"buildah {argv[0]}: {done.stdout[-4000:]}{done.stderr[-4000:]}"
        )
        return done.stdout

    def make_base(self) -> None:
        """The base image, unless it is there."""
        if self._process("inspect", "--type", "image", BASE).returncode == 0:
            return
        container = self("from", "scratch").strip()
        self("add", "--quiet", container, f"{base_tree()}/", "/")
        self("commit", "--quiet", "--rm", container, BASE)

    def build(self, pip: Path, arguments: Sequence[str]) -> None:
        """The image of docker/Dockerfile, with `NAME=VALUE` build arguments and pip's settings of
        this machine."""
        if len(self("images", "--all", "--quiet").split()) > MAX_IMAGES:
            self("rmi", "--prune")
        volumes = [
            f"{pip}:/etc/pip.conf:ro",
            *(f"{path}:{path}:ro" for path in local_paths(pip_settings())),
        ]
        words = [
            "bud",
            "--network",
            "host",
            "--layers",
            "--file",
            str(ROOT / "docker/Dockerfile"),
            "--tag",
            IMAGE,
        ]
        words += [word for volume in volumes for word in ("--volume", volume)]
        words += [word for argument in arguments for word in ("--build-arg", argument)]
        self(*words, str(ROOT))

    def container(self) -> str:
        """A container of the image, as a launcher would start one."""
        return self("from", "--pull-never", IMAGE).strip()

    def run(self, container: str, *argv: str) -> str:
        """What a command prints in it, as the image's user."""
        return self("run", container, "--", *argv)

    def mount(self, container: str) -> Path:
        """Where the container's files can be read."""
        return Path(self("mount", container).strip())

    def configuration(self) -> dict[str, Any]:
        """The image's configuration: Env, User, Labels, Cmd, Entrypoint, WorkingDir."""
        inspected: dict[str, Any] = json.loads(self("inspect", "--type", "image", IMAGE))
        configuration: dict[str, Any] = inspected["OCIv1"]["config"]
        return configuration

    def _process(self, *argv: str) -> subprocess.CompletedProcess[str]:
        command = ["buildah", *self._flags, *argv]
        return subprocess.run(
            command, env=self._environment, capture_output=True, text=True, check=False
        )


def base_tree() -> Path:
    """A minimal Debian with Python. Made once (about a minute); a tree without its stamp was broken
    off."""
    tree = TOOLS / f"debian-{SUITE}-python"
    if not (tree / "etc/drillyard-base").exists():
        partial = tree.with_name(f"{tree.name}.{os.getpid()}")
        TOOLS.mkdir(parents=True, exist_ok=True)
        command = ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", SUITE, str(partial)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"debootstrap: {done.stdout[-2000:]}{done.stderr[-2000:]}"
        shutil.rmtree(partial / "var/cache/apt", ignore_errors=True)
        (partial / "etc/drillyard-base").write_text(f"{SUITE} {PACKAGES}\n", encoding="utf-8")
        shutil.rmtree(tree, ignore_errors=True)
        partial.rename(tree)
    return tree


def pip_settings() -> dict[str, str]:
    """pip's settings of this machine, from its files and its environment, by their names."""
    settings = {}
    listed = subprocess.run(
        ["python3", "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    )
    for line in listed.stdout.splitlines():
        key, _, value = line.partition("=")
        settings[key.rpartition(".")[2]] = value.strip("'\"")
    return settings


def write_pip_conf(path: Path) -> None:
    """The settings as a file of pip's."""
    lines = ["[global]", *(f"{name} = {value}" for name, value in pip_settings().items())]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def local_paths(settings: dict[str, str]) -> list[str]:
    """Files and directories of this machine that the settings name: a certificate, wheels."""
    words = [word for value in settings.values() for word in value.split()]
    return sorted({word for word in words if word.startswith("/") and Path(word).exists()})
