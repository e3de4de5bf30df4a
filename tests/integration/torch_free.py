"""A virtual environment with what `pip install drillyard` brings and nothing else: no torch, no
transformers.

Nothing is downloaded: the distributions that `dependencies` in pyproject.toml name, and those that
these need, are linked from the environment that runs the tests. Building it takes about a second.

    from tests.integration.torch_free import torch_free as torch_free      # in conftest.py or a test module
    def test_it(torch_free): ended = torch_free("metrics", "run.log", "--json")
"""  # noqa: E501

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sysconfig
import tomllib
import venv
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
Command = Callable[..., "subprocess.CompletedProcess[str]"]


def core_distributions() -> dict[str, importlib.metadata.Distribution]:
    """The distributions that an installation without extras has, by name."""
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    found: dict[str, importlib.metadata.Distribution] = {}
    while wanted:
        requirement, _, marker = wanted.pop().partition(";")
        name = re.split(r"[^A-Za-z0-9_.-]", requirement.strip())[0].lower().replace("_", "-")
        if name in found or "extra ==" in marker or "win32" in marker:
            continue
        try:
            found[name] = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            # For another Python or platform: were it needed here, the command would fail for want
            # of it.
            continue
        wanted += found[name].requires or []
    return found


def make_environment(directory: Path) -> Path:
    """Make the environment there; returns its `drillyard` command."""
    venv.create(directory, with_pip=False, symlinks=True)
    packages = Path(
        sysconfig.get_path("purelib", vars={"base": str(directory), "platbase": str(directory)})
    )
    for distribution in core_distributions().values():
        for top in {
            file.parts[0]
            for file in distribution.files or ()
            if file.parts[0] not in ("..", "__pycache__")
        }:
            if not (packages / top).exists():
                os.symlink(distribution.locate_file(top), packages / top)
    (packages / "drillyard.pth").write_text(f"{ROOT / 'src'}\n")
    command = directory / "bin" / "drillyard"
    command.write_text(
        f"#!{directory / 'bin' / 'python'}\nfrom drillyard.cli.main import main\n\nmain()\n"
    )
    command.chmod(0o755)
    return command


@pytest.fixture(scope="session")
def torch_free(tmp_path_factory: pytest.TempPathFactory) -> Command:
    """`drillyard` with these arguments, as a process of the environment without torch."""
    command = make_environment(tmp_path_factory.mktemp("torch-free") / "venv")
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "VIRTUAL_ENV"))
    }

    def run(*arguments: object, **options: object) -> subprocess.CompletedProcess[str]:
        words = [str(command), *map(str, arguments)]
        settings = {
            "capture_output": True,
            "text": True,
            "timeout": 240,
            "env": environment,
            **options,
        }
        return subprocess.run(words, **settings)  # type: ignore[call-overload, no-any-return]

    return run
