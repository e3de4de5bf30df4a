"""`drillyard accept`: what is shown before anything is submitted, and what is refused."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tests.unit.acceptance.nccl_samples import a4_output
from tests.unit.estimation.requests import run_config

from drillyard.acceptance import without_scheduler
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


def test_a_dry_run_of_a_thousand_nodes_costs_less_than_starting_and_no_torch(here: Path) -> None:
    code = (
        "import sys, time\n"
        "from drillyard.cli import main as cli\n"
        "for nodes in '2', '1000':\n"
        "    try: cli.main(['accept', 'cluster.yaml', '--nodes', nodes, '--dry-run'])\n"
        "    except SystemExit as ended: assert not ended.code\n"
        "    print(time.process_time(), file=sys.stderr)\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    # The first pays for the imports (1.0 s of a fast core), on any machine far more than the plan.
    first, both = map(float, done.stderr.split()[-2:])
    assert both - first < first
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


PART = ("--node-rank", "0", "--nnodes", "1", "--master-addr", "127.0.0.1")


@pytest.mark.parametrize("beside", [("--from", "table.txt"), PART])
@pytest.mark.parametrize(
    "option",
    [("--exclude", "n1"), ("--wait-seconds", "9"), ("--drain",), ("--dry-run",), ("--explain",),
     ("--drain", "--max-share", "0")],
)  # fmt: skip
def test_options_of_a_job_that_is_not_submitted_are_refused(
    here: Path, capsys: Capture, beside: tuple[str, ...], option: tuple[str, ...]
) -> None:
    Path("table.txt").write_text(a4_output())
    code, out, err = accept(capsys, "cluster.yaml", *beside, *option)
    assert (code, out) == (2, "") and option[0] in err and beside[0] in err


@pytest.mark.parametrize(
    "option",
    [("--level", "full"), ("--level", "quick"), ("--node-rank", "0"), ("--nnodes", "2"),
     ("--master-addr", "h"), ("--master-port", "2000"), ("--run", "r.yaml"),
     ("--files", "--dry-run")],
)  # fmt: skip
def test_recorded_output_takes_no_option_of_probes(
    here: Path, capsys: Capture, option: tuple[str, ...]
) -> None:
    Path("table.txt").write_text(a4_output())
    recorded = ("--from", "table.txt", "--machine", "a4-highgpu-8g")
    code, out, err = accept(capsys, *option, *recorded)
    assert (code, out) == (2, "") and option[-1 if option[0] == "--files" else 0] in err
    # The remedy: without it.
    assert accept(capsys, *recorded)[0] == 0


@pytest.mark.parametrize("option", ["--nnodes=2", "--master-addr=h", "--master-port=2000"])
def test_an_option_of_a_node_s_part_is_named(here: Path, capsys: Capture, option: str) -> None:
    code, _, err = accept(capsys, "cluster.yaml", option)
    assert code == 2 and err.startswith(f"error: {option.split('=')[0]}:")


def test_a_port_that_is_taken_is_named_and_another_one_works(
    here: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(without_scheduler, "_run", lambda *_: 7)
    with socket.create_server(("", 0)) as taken:
        port = str(taken.getsockname()[1])
        code, out, err = accept(capsys, "cluster.yaml", *PART, "--master-port", port)
    assert (code, out) == (2, "") and f"--master-port {port}" in err
    code, out, _ = accept(capsys, "cluster.yaml", *PART, "--master-port", port)
    assert code == 3 and "exit code 7" in out


def test_evidence_of_another_program_is_not_replaced(
    here: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(without_scheduler, "_run", lambda *_: 7)
    notes = Path("place/acceptance/evidence.json")
    notes.parent.mkdir(parents=True)
    notes.write_text("notes of mine")
    code, _, err = accept(capsys, "cluster.yaml", *PART, "--output", "place")
    assert code == 2 and str(notes) in err
    # The remedy.
    assert accept(capsys, "cluster.yaml", *PART, "--output", "other")[0] == 3


@pytest.mark.parametrize("command", ["accept", "launch"])
def test_files_without_a_dry_run_are_refused(here: Path, capsys: Capture, command: str) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([command, "cluster.yaml", "--files"])
    assert ended.value.code == 2 and "--dry-run" in capsys.readouterr().err


def test_a_run_that_a_quick_check_does_not_look_at_is_said(here: Path, capsys: Capture) -> None:
    config = run_config().model_dump(mode="json", exclude_unset=True)
    Path("run.yaml").write_text(json.dumps(config))
    words = ("cluster.yaml", "--run", "run.yaml", "--dry-run")
    code, _, err = accept(capsys, *words)
    assert code == 0 and "--level standard" in err
    code, _, err = accept(capsys, *words, "--level", "standard")
    assert code == 0 and "--run" not in err


@pytest.mark.parametrize("platform", ["ssh", "vertex"])
def test_a_launcher_that_cannot_exclude_nodes_refuses_to(
    here: Path, capsys: Capture, platform: str
) -> None:
    from tests.unit.launch.requests import cluster

    Path("other.yaml").write_text(cluster(platform))
    code, _, err = accept(capsys, "other.yaml", "--exclude", "n1", "--dry-run")
    assert code == 2 and "slurm, kubernetes, gke" in err
