"""`drillyard chaos` before it starts a run: what it refuses, without touching anything."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.facts import says
from tests.integration.tiny_run import contents, drillyard, write_config

from drillyard.faults.disturbed_run import can_mount


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "checkpoint.every_steps=null"], "checkpoint.every_steps ... not set"),
        (["--set", "checkpoint.every_steps=10"], "40 steps ... 10 ... 6 saves"),
        (["--faults", "kill,quake"], "quake ... kill, stop, term, disk-full, flip"),
        (["--count", "3"], "--count 3 ... 5 kinds ... --faults"),
        (["--set", "training.stps=3"], "training.stps ... 'steps'"),
    ],
)  # fmt: skip
def test_bad_settings_are_refused_before_anything_runs(
    workplace: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    config = write_config(workplace, "refused", checkpoint={"every_steps": 4})
    before = contents(workplace)
    ended = drillyard("chaos", config, "--directory", tmp_path / "chaos", *arguments)
    assert ended.returncode == 2 and ended.stderr.startswith("error: "), ended.stderr
    assert says(ended.stderr, message) and "Traceback" not in ended.stderr
    assert contents(workplace) == before
    assert not (tmp_path / "chaos").exists()


def test_a_directory_with_anything_in_it_is_refused(workplace: Path, tmp_path: Path) -> None:
    config = write_config(workplace, "refused", checkpoint={"every_steps": 4})
    (tmp_path / "precious").write_text("data")
    ended = drillyard("chaos", config, "--directory", tmp_path)
    assert ended.returncode == 2 and says(
        ended.stderr, f"{tmp_path}: ... not empty ... --directory"
    )
    assert (tmp_path / "precious").read_text() == "data"


def test_a_run_that_fails_undisturbed_is_reported_with_its_error(
    workplace: Path, tmp_path: Path
) -> None:
    config = write_config(workplace, "refused", checkpoint={"every_steps": 4})
    ended = drillyard(
        "chaos",
        config,
        "--directory",
        tmp_path / "chaos",
        "--set",
        "data.source=/nowhere/rows.jsonl",
    )
    assert ended.returncode == 2
    assert (
        says(ended.stderr, "undisturbed ... exit code 2") and "/nowhere/rows.jsonl" in ended.stderr
    )
    assert not (tmp_path / "chaos" / "reference" / "checkpoints").exists()


SMALL_DISK = """
import errno, os, sys
from pathlib import Path
from drillyard.faults.disturbed_run import can_mount, mounted_tmpfs
directory = Path(sys.argv[1])
assert can_mount(1 << 20)
with mounted_tmpfs(directory, 1 << 20):
    try:
        (directory / "file").write_bytes(bytes(2 << 20))
    except OSError as error:
        print(errno.errorcode[error.errno], flush=True)
    os.kill(os.getpid(), 9)
"""


def test_a_small_tmpfs_fills_up_and_disappears_with_its_killed_process(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    ended = subprocess.run(
        [sys.executable, "-c", SMALL_DISK, str(disk)], capture_output=True, text=True
    )
    assert (ended.returncode, ended.stdout) == (-signal.SIGKILL, "ENOSPC\n"), ended.stderr
    assert not any(disk.iterdir())
    assert str(disk) not in Path("/proc/self/mounts").read_text()


def test_a_tmpfs_larger_than_the_memory_is_refused() -> None:
    assert not can_mount(1 << 60)
