"""The program that submits, as a process: of two at once, one does."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import pytest
from tests.unit.launch.requests import WORKLOAD, cluster, planned, request

from drillyard.launch.agent import submit
from drillyard.launch.agent.submit import TAKEN, sbatch_environment
from drillyard.launch.plan_output import write_plan


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def fake_sbatch(directory: Path, script: str) -> dict[str, str]:
    """The environment of a user whose sbatch is this script."""
    sbatch = directory / "bin" / "sbatch"
    sbatch.parent.mkdir()
    sbatch.write_text(f"#!/bin/sh\n{script}\n")
    sbatch.chmod(0o755)
    return os.environ | {
        "PATH": f"{sbatch.parent}:{os.environ['PATH']}",
        "XDG_STATE_HOME": str(directory / "state"),
    }


def sent(directory: Path) -> Path:
    """What a launch sends, of a run that the index does not have."""
    (directory / "index").mkdir(parents=True)
    entry = {"run": "one", "launch_directory": "/runs/one/launch", "replaces": None}
    (directory / "index" / "one.json").write_text(json.dumps(entry))
    (directory / "job.json").write_text(directory.name)
    return directory


def waits_for_lock(process: subprocess.Popen[str]) -> bool:
    """Whether a program has opened the lock that the other one has."""
    assert process.poll() is None, process.communicate()
    files = Path(f"/proc/{process.pid}/fd")
    return any(
        os.readlink(each).endswith("/.lock") for each in files.iterdir() if each.is_symlink()
    )


def test_of_two_programs_at_once_one_submits(tmp_path: Path) -> None:
    play = (
        f"echo $$ >>{tmp_path}/called; while [ ! -e {tmp_path}/go ]; do sleep 0.02; done; echo"
        " '12;cluster'"
    )
    environment = fake_sbatch(tmp_path, play)
    launch = tmp_path / "runs" / "one" / "launch"

    def start(name: str) -> subprocess.Popen[str]:
        words = ["--cluster", "c", "--launch-directory", str(launch), "--script", "job.sbatch"]
        argv = [
            sys.executable,
            "-m",
            "drillyard.launch.agent",
            "submit",
            *words,
            "--sent",
            str(sent(tmp_path / name)),
        ]
        return subprocess.Popen(
            argv, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    first = start("first")
    until((tmp_path / "called").exists)
    second = start("second")
    until(lambda: waits_for_lock(second))
    (tmp_path / "go").touch()
    assert first.communicate(timeout=60) == ("12\n", "") and first.returncode == 0
    assert second.communicate(timeout=60) == ("", "job 12\n") and second.returncode == TAKEN
    assert len((tmp_path / "called").read_text().split()) == 1
    assert (launch / "job.json").read_text() == "first"
    entry = json.loads((tmp_path / "state" / "drillyard" / "c" / "one.json").read_text())
    assert entry["job_id"] == "12" and "replaces" not in entry


def test_a_damaged_lock_keeps_nobody_out(tmp_path: Path) -> None:
    for at in ("soon", [1], None):
        (tmp_path / "claim").write_text(json.dumps({"submission": "a", "at": at}))
        assert submit._other_launch(tmp_path, "b") is None
    (tmp_path / "claim").write_text(json.dumps({"submission": "a", "at": time.time()}))
    assert str(submit._other_launch(tmp_path, "b")).startswith("a, 0 s ago")


def test_a_plan_that_is_applied_by_hand_is_written_and_submitted(tmp_path: Path) -> None:
    asked = request(cluster(storage=f"{{directory: {tmp_path}}}"), WORKLOAD)
    plan = planned(asked)
    write_plan(plan, tmp_path / "out")
    environment = fake_sbatch(tmp_path, f'echo "$@" >{tmp_path}/submitted; echo 12')
    done = subprocess.run(
        ["sh", tmp_path / "out" / "apply.sh"], env=environment, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "12\n", "")
    assert (
        tmp_path / "submitted"
    ).read_text() == f"--parsable {plan.launch_directory}/job.sbatch\n"
    launch = Path(plan.launch_directory)
    assert {
        path for path in (file.path for file in plan.files) if not (launch / path).is_file()
    } == set()
    assert (launch / "secret").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("mode", [0o600, 0o644, 0o755])
def test_a_copy_has_its_mode_before_its_first_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int
) -> None:
    source, target = tmp_path / "sent", tmp_path / "secrets.json"
    source.write_text("s3cret")
    source.chmod(mode)
    # Of a copy that was killed.
    (tmp_path / "secrets.json.new").write_text("half")
    copy, seen = shutil.copyfileobj, []

    def look(content: BinaryIO, out: BinaryIO) -> None:
        status = (tmp_path / "secrets.json.new").stat()
        seen.append((stat.S_IMODE(status.st_mode), status.st_size))
        copy(content, out)

    monkeypatch.setattr(shutil, "copyfileobj", look)
    before = os.umask(0)
    try:
        submit._copy(source, target)
    finally:
        os.umask(before)
    assert seen == [(mode, 0)]
    assert (target.read_text(), stat.S_IMODE(target.stat().st_mode)) == ("s3cret", mode)
    assert {path.name for path in tmp_path.iterdir()} == {"sent", "secrets.json"}


def test_a_copy_that_fails_names_its_file_and_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = tmp_path / "sent", tmp_path / "secrets.json"
    source.write_text("new")
    target.write_text("old")

    def full(content: BinaryIO, out: BinaryIO) -> None:
        out.write(b"n")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "copyfileobj", full)
    with pytest.raises(OSError, match=f"No space left on device: '{target}'"):
        submit._copy(source, target)
    assert target.read_text() == "old" and not (tmp_path / "secrets.json.new").exists()


def test_defaults_of_a_site_do_not_change_what_the_script_says(tmp_path: Path) -> None:
    script = tmp_path / "job.sbatch"
    script.write_text("#!/bin/bash\n#SBATCH --time=60\n#SBATCH --export=ALL\n")
    given = {
        "PATH": "/bin",
        "SLURM_CONF": "/c",
        "SBATCH_EXPORT": "NONE",
        "SLURM_EXPORT_ENV": "NONE",
        "SBATCH_TIMELIMIT": "1",
        "SBATCH_PARTITION": "site",
        "SLURM_CPUS_PER_TASK": "1",
        "SRUN_CPUS_PER_TASK": "1",
    }
    kept = sbatch_environment(given, script)
    assert kept == {"PATH": "/bin", "SLURM_CONF": "/c", "SBATCH_PARTITION": "site"}


@pytest.mark.parametrize(
    ("option", "name"),
    [
        ("-p b", "SBATCH_PARTITION"),
        ("-pb", "SBATCH_PARTITION"),
        ("--mail-type=END --qos=q", "SBATCH_QOS"),
        ("--mem=0", "SBATCH_MEM_PER_CPU"),
    ],
)
def test_a_default_gives_way_to_the_option_however_it_is_written(
    option: str, name: str, tmp_path: Path
) -> None:
    script = tmp_path / "job.sbatch"
    script.write_text(f"#!/bin/bash\n#SBATCH {option}\n")
    assert sbatch_environment({name: "site"}, script) == {}
    script.write_text("#!/bin/bash\n#SBATCH --time-min=3 --parsable\n")
    assert sbatch_environment({name: "site"}, script) == {name: "site"}


def test_a_job_is_never_sent_to_a_cluster_where_cancel_would_not_find_it(tmp_path: Path) -> None:
    given = {"SBATCH_CLUSTERS": "other", "SLURM_CLUSTERS": "one"}
    assert sbatch_environment(given, tmp_path / "job.sbatch") == {"SLURM_CLUSTERS": "one"}


def test_defaults_that_are_left_out_are_named(tmp_path: Path) -> None:
    launch = tmp_path / "runs" / "one" / "launch"
    words = ["--cluster", "c", "--launch-directory", str(launch), "--script", "job.sbatch"]
    argv = [sys.executable, "-m", "drillyard.launch.agent", "submit", *words]
    done = subprocess.run(
        [*argv, "--sent", str(sent(tmp_path / "sent"))],
        env=fake_sbatch(tmp_path, 'echo "${SBATCH_EXCLUSIVE-left out}" >&2; echo 12')
        | {"SBATCH_EXCLUSIVE": "user", "SBATCH_GRES": "gpu:1", "SBATCH_QOS": "high"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "12\n")
    shown = [line for line in done.stderr.splitlines() if line.startswith(submit.SAYS)]
    assert "left out" in done.stderr and len(shown) == 1
    assert "SBATCH_EXCLUSIVE, SBATCH_GRES" in shown[0] and "SBATCH_QOS" not in shown[0]
