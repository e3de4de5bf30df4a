"""Builds docker/Dockerfile for real: `drillyard image build` with buildah in a chroot, on a base of
debootstrap's that is made once.

No daemon: the base is a Debian tree, kept outside the checkout. pip inside of the build needs what
pip needs on this machine (an index, a certificate); it is mounted for the build and is nothing of
the image.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
SUITE = "bookworm"
PACKAGES = "python3,python3-venv,ca-certificates"
BASE = "localhost/drillyard-base"
ARGUMENTS = {"BASE": BASE, "EXTRAS": "", "SYSTEM": "python3-venv"}
"""Without the training libraries, which are gigabytes."""
MAX_IMAGES = 60
"""Kept steps of builds; beyond, those that no image needs are removed."""
TOOLS = Path(os.environ.get("DRILLYARD_TOOLS") or Path.home() / ".cache/drillyard/tools")
SOURCES = (
    *("pyproject.toml", "README.md", "LICENSE", "constraints.txt", ".dockerignore"),
    *("docker", "charts", "src"),
)
"""What the image is built from."""
DATE = "2026-01-02T03:04:05Z"
"""Of the commit: the same each time, so that steps that did not change are not done again."""


def make_checkout(directory: Path) -> str:
    """A repository with one commit of the image's sources; returns the commit."""
    directory.mkdir()
    unwanted = shutil.ignore_patterns("__pycache__", "*.egg-info", ".*")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, directory / name, ignore=unwanted)
        else:
            shutil.copy(ROOT / name, directory / name)
    run_git(directory, "init", "--quiet")
    run_git(directory, "add", "--all")
    run_git(directory, "commit", "--quiet", "--message", "sources")
    return run_git(directory, "rev-parse", "HEAD")


def run_git(directory: Path, *argv: str) -> str:
    """Standard output of git in a directory, with the same author and date each time."""
    names = {
        f"GIT_{who}_{what}": "a" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")
    }
    dates = {"GIT_AUTHOR_DATE": DATE, "GIT_COMMITTER_DATE": DATE}
    environment = {**os.environ, **names, **dates, "GIT_CONFIG_GLOBAL": "/dev/null"}
    command = ["git", "-C", str(directory), *argv]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


class Builder:
    """buildah with a storage of its own, so that no other image of the machine is seen or changed.

    The storage is kept: steps of the Dockerfile that did not change are not done again.
    """

    def __init__(self, directory: Path, scratch: Path) -> None:
        settings = scratch / "storage.conf"
        self.environment = {
            **os.environ,
            "BUILDAH_ISOLATION": "chroot",
            "CONTAINERS_STORAGE_CONF": str(settings),
        }
        self._pip = scratch / "pip.conf"
        write_pip_conf(self._pip)
        # vfs copies the whole tree for every step; it is for machines where overlay file systems
        # cannot be mounted.
        for driver in ("overlay", "vfs"):
            storage = directory / f"buildah-{driver}"
            values = {"driver": driver, "graphroot": storage / "root", "runroot": storage / "run"}
            lines = [f'{name} = "{value}"' for name, value in values.items()]
            settings.write_text("\n".join(["[storage]", *lines]) + "\n", encoding="utf-8")
            if self._process("buildah", "info").returncode == 0:
                break

    def __call__(self, *argv: str) -> str:
        """Standard output of `buildah ARGV`. What it says where it fails is the error."""
        done = self._process("buildah", *argv)
        assert done.returncode == 0, (
            f"buildah {argv[0]}: {done.stdout[-4000:]}{done.stderr[-4000:]}"
        )
        return done.stdout

    def make_base(self) -> None:
        """The base image, unless it is there."""
        if self._process("buildah", "inspect", "--type", "image", BASE).returncode == 0:
            return
        container = self("from", "scratch").strip()
        self("add", "--quiet", container, f"{base_tree()}/", "/")
        self("commit", "--quiet", "--rm", container, BASE)

    def build(self, checkout: Path, tag: str, *further: str) -> str:
        """The name of the image of docker/Dockerfile; `further` are arguments for buildah."""
        if len(self("images", "--all", "--quiet").split()) > MAX_IMAGES:
            # It fails at an image that another test file builds from at the moment.
            self._process("buildah", "rmi", "--prune")
        paths = [f"{path}:{path}:ro" for path in local_paths(pip_settings())]
        words = ["--builder", "buildah", "--context", str(checkout), "--tag", tag]
        words += [word for pair in ARGUMENTS.items() for word in ("--build-arg", "=".join(pair))]
        words += ["--", "--network", "host", *further]
        words += [
            word
            for each in (f"{self._pip}:/etc/pip.conf:ro", *paths)
            for word in ("--volume", each)
        ]
        return self.image("build", *words).strip()

    def image(self, *argv: str) -> str:
        """Standard output of `drillyard image ARGV`."""
        done = self._process(sys.executable, "-m", "drillyard", "image", *argv)
        assert done.returncode == 0, f"{argv[0]}: {done.stdout[-4000:]}{done.stderr[-4000:]}"
        return done.stdout

    def container(self, image: str) -> str:
        """A container of the image, as a launcher would start one."""
        return self("from", "--pull-never", image).strip()

    def run(self, container: str, *argv: str) -> str:
        """What a command prints in it, as the image's user."""
        return self("run", container, "--", *argv)

    def mount(self, container: str) -> Path:
        """Where the container's files can be read."""
        return Path(self("mount", container).strip())

    def inspected(self, image: str) -> dict[str, Any]:
        """What buildah knows of the image; its configuration is at OCIv1.config."""
        found: dict[str, Any] = json.loads(self("inspect", "--type", "image", image))
        return found

    def _process(self, *argv: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            argv, env=self.environment, capture_output=True, text=True, check=False
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
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
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
