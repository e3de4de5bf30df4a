"""The public API as its documentation shows it: every example runs, every name has one, and types
reach a consumer."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

from tests.integration.test_package import build
from tests.integration.tiny_run import TIMEOUT_SECONDS, write_config, write_rows

import drillyard

DOCUMENT = Path(__file__).parents[2] / "docs" / "api.md"
EXAMPLES = re.findall(
    r"^```python\n(.*?)^```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
)
CLUSTER = "name: here\nplatform: local\nprocesses_per_node: 1\n"


def test_each_public_name_has_an_example() -> None:
    imported = {
        name
        for example in EXAMPLES
        for name in re.findall(r"^from drillyard import (.*)$", example, re.M)
    }
    names = {name.strip() for line in imported for name in line.split(",")}
    assert names == set(drillyard.__all__)


def test_the_examples_run(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl")
    write_config(tmp_path, "small").rename(tmp_path / "run.yaml")
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    home = tmp_path / "home"
    home.mkdir()
    environment = {**os.environ, "HOME": str(home)}
    environment.pop("XDG_STATE_HOME", None)
    program = tmp_path / "examples.py"
    program.write_text("\n".join(EXAMPLES))
    done = subprocess.run(
        [sys.executable, str(program)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert "small 4" in lines and "fits" in lines and "succeeded" in lines and "small.html" in lines
    assert (tmp_path / "small.html").read_text(encoding="utf-8").startswith("<!doctype html>")


def test_mypy_strict_passes_on_a_program_that_uses_the_wheel(tmp_path: Path) -> None:
    """`--strict` refuses calls of untyped functions: `py.typed` and the signatures must be in the
    wheel."""
    (tmp_path / "built").mkdir()
    venv.create(tmp_path / "venv", with_pip=False, symlinks=True)
    (packages,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    with zipfile.ZipFile(build(tmp_path / "built", "wheel")) as wheel:
        wheel.extractall(packages)
    # What the core installs; PyTorch and the like are extras, and an application that calls no
    # training has none.
    for name in (
        "pydantic",
        "pydantic_core",
        "annotated_types",
        "typing_inspection",
        "typing_extensions.py",
    ):
        (packages / name).symlink_to(Path(sysconfig.get_path("purelib")) / name)
    program = tmp_path / "program.py"
    program.write_text(
        "\n".join(EXAMPLES)
        + "\nreveal_type(found.verdict)\nreveal_type(handle)\nreveal_type(page)\n"
    )
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--config-file=",
        f"--cache-dir={tmp_path / 'cache'}",
    ]
    command += [f"--python-executable={tmp_path / 'venv' / 'bin' / 'python'}", str(program)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert (
        'Revealed type is "str"' in done.stdout and 'Revealed type is "pathlib.Path"' in done.stdout
    )
    for function in ("submit", "measure", "report"):
        program.write_text(
            f'from drillyard import {function}\n\n{function}("run.yaml", no_such_option=1)\n'
        )
        wrong = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert wrong.returncode == 1 and "no_such_option" in wrong.stdout
