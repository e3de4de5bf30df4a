"""The program that submits, as a process: of two at once, one does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.unit.launch.requests import WORKLOAD, cluster, request

from drillyard.launch.agent.submit import TAKEN
from drillyard.launch.plan_output import write_plan
from drillyard.launch.slurm.launcher import plan_of


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
    return os.environ | {"PATH": f"{sbatch.parent}:{os.environ['PATH']}", "XDG_STATE_HOME": str(directory / "state")}


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
    return any(os.readlink(each).endswith("/.lock") for each in files.iterdir() if each.is_symlink())


def test_of_two_programs_at_once_one_submits(tmp_path: Path) -> None:
    play = f"echo $$ >>{tmp_path}/called; while [ ! -e {tmp_path}/go ]; do sleep 0.02; done; echo '12;cluster'"
    environment = fake_sbatch(tmp_path, play)
    launch = tmp_path / "runs" / "one" / "launch"

    def start(name: str) -> subprocess.Popen[str]:
        words = ["--cluster", "c", "--launch-directory", str(launch), "--script", "job.sbatch"]
        argv = [sys.executable, "-m", "drillyard.launch.agent", "submit", *words, "--sent", str(sent(tmp_path / name))]
        return subprocess.Popen(argv, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

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


def test_a_plan_that_is_applied_by_hand_is_written_and_submitted(tmp_path: Path) -> None:
    asked = request(cluster(storage=f"{{directory: {tmp_path}}}"), WORKLOAD)
    plan = plan_of(asked)
    write_plan(plan, tmp_path / "out")
    environment = fake_sbatch(tmp_path, f'echo "$@" >{tmp_path}/submitted; echo 12')
    done = subprocess.run(["sh", tmp_path / "out" / "apply.sh"], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "12\n", "")
    assert (tmp_path / "submitted").read_text() == f"--parsable {plan.launch_directory}/job.sbatch\n"
    launch = Path(plan.launch_directory)
    assert {path for path in (file.path for file in plan.files) if not (launch / path).is_file()} == set()
    assert (launch / "secret").stat().st_mode & 0o077 == 0
