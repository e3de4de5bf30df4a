"""`drillyard accept`: what is shown before anything is submitted, and what is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from drillyard.cli import main as cli

Capture = pytest.CaptureFixture[str]
SLURM = "name: lab\nplatform: slurm\nnodes: {nodes}\nmachine: a3-megagpu-8g\n"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("cluster.yaml").write_text(SLURM.format(nodes=2) + "storage: {directory: /mnt/shared}\n")
    return tmp_path


def accept(capsys: Capture, *arguments: str) -> tuple[int, str, str]:
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        cli.main(["accept", *arguments])
    return int(ended.value.code or 0), *capsys.readouterr()


def test_a_dry_run_repeats_names_the_job_and_changes_nothing(here: Path, capsys: Capture) -> None:
    first, second = (accept(capsys, "cluster.yaml", "--dry-run", "--json") for _ in range(2))
    assert first == second and first[0] == 0
    plan = json.loads(first[1])
    assert plan["handle"] == "slurm://lab/accept-lab"
    assert plan["run_directory"] == "/mnt/shared/runs/accept-lab"
    files = {each["path"]: each["content"] for each in plan["files"]}
    job = json.loads(files["job.json"])
    assert job["max_failures"] == 0
    # The schedule is a file: its length is no command's.
    assert len(" ".join(job["command"])) < 1000
    assert json.loads(files["files/acceptance/schedule.json"])["level"] == "quick"
    assert sorted(each.name for each in here.iterdir()) == ["cluster.yaml"]


def test_excluded_nodes_are_the_job_s(here: Path, capsys: Capture) -> None:
    _, out, _ = accept(capsys, "cluster.yaml", "--dry-run", "--exclude", "n1", "--exclude", "n2")
    assert "#SBATCH --exclude=n1,n2" in out


def test_a_dry_run_of_a_thousand_nodes_takes_a_second_and_no_torch(here: Path) -> None:
    code = (
        "import sys, time\n"
        "from drillyard.cli import main as cli\n"
        "try: cli.main(['accept', 'cluster.yaml', '--nodes', '1000', '--dry-run'])\n"
        "except SystemExit as ended: assert not ended.code\n"
        "assert 'torch' not in sys.modules\n"
        "print(time.process_time(), file=sys.stderr)\n"
    )
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=dict(os.environ)
    )
    assert done.returncode == 0, done.stderr
    # Of this process's own: others of the machine do not count.
    assert float(done.stderr.split()[-1]) < 1.0, time.monotonic() - began
    assert "#SBATCH --nodes=1000" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--level", "slow"), "quick, standard, full"),
        (("--max-share", "0.5"), "--drain"),
        (("--node-rank", "0"), "--nnodes"),
        (("--node-rank", "2", "--nnodes", "2", "--master-addr", "h"), "--node-rank 2"),
        (("--nnodes", "2"), "--node-rank"),
        (("--baseline", "missing.json"), "missing.json"),
        (("--run", "missing.yaml"), "missing.yaml"),
        (("--hardware", "missing.yaml"), "missing.yaml"),
        (("--exclude", "a b"), "a b"),
    ],
)
def test_mistakes_are_named_before_anything_is_submitted(
    here: Path, capsys: Capture, arguments: tuple[str, ...], named: str
) -> None:
    code, _, err = accept(capsys, "cluster.yaml", *arguments)
    assert code == 2 and named in err


@pytest.mark.parametrize("platform", ["ssh", "vertex"])
def test_a_launcher_that_cannot_exclude_nodes_refuses_to(
    here: Path, capsys: Capture, platform: str
) -> None:
    from tests.unit.launch.requests import cluster

    Path("other.yaml").write_text(cluster(platform))
    code, _, err = accept(capsys, "other.yaml", "--exclude", "n1", "--dry-run")
    assert code == 2 and "slurm, kubernetes, gke" in err
