"""`benchmarks/gpu/run_all.py` on a CPU in tiny sizes: every row passes, and one that fails or hangs
stops no other."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

DIRECTORY = Path(__file__).parents[2] / "benchmarks" / "gpu"
# The rows of the table between two that are made to go wrong, and one whose process is killed.
PROGRAM = f"""
import sys
sys.path.insert(0, {str(DIRECTORY)!r})
import run_all
made = [
    run_all.Row("made to fail", "made_rows:fail", 60),
    run_all.Row("made to hang", "made_rows:hang", 3),
    run_all.Row("made to die", "made_rows:die", 60),
]
if __name__ == "__main__":
    sys.exit(run_all.main([*made, *run_all.ROWS]))
"""
MADE_ROWS = """
import os, signal, subprocess, sys, time
def fail(setting):
    raise ValueError("out of |\\nluck")
def hang(setting):
    with open(os.environ["CHILD_OF_HANG"], "w") as file:
        file.write(str(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"]).pid))
    time.sleep(1000)
def die(setting):
    os.kill(os.getpid(), signal.SIGKILL)
"""  # noqa: E501


def run(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "program.py",
        "--device",
        "cpu",
        "--tiny",
        "--minutes",
        "25",
        "--out",
        "out",
        *arguments,
    ]
    environment = {
        "PATH": "/usr/bin:/bin",
        "PYTHONPATH": ".",
        "CHILD_OF_HANG": "child",
        "HOME": str(directory),
    }
    return subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True)


def test_every_row_runs_and_what_fails_or_hangs_stops_no_other(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "made_rows.py").write_text(MADE_ROWS)
    done = run(tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    results = json.loads((tmp_path / "out" / "results.json").read_text())["rows"]
    status = {name: result["status"] for name, result in results.items()}
    made = {name: status.pop(name) for name in list(status) if name.startswith("made")}
    assert made == {"made to fail": "failed", "made to hang": "timed out", "made to die": "failed"}
    assert set(status.values()) == {"passed"}, {
        name: row for name, row in results.items() if "error" in row
    }
    assert len(status) == 75
    table = (tmp_path / "out" / "table.md").read_text().splitlines()
    assert len(table) == 2 + 75 + 3
    assert {line.count("|") for line in table} == {5}
    child = Path("/proc", (tmp_path / "child").read_text(), "stat")
    assert not child.exists() or child.read_text().rpartition(")")[2].split()[0] == "Z", (
        "what it started ended with it"
    )

    again = run(tmp_path, "--only", "made to fail", "--only", "versions")
    assert again.returncode == 1
    assert "made to fail" in again.stdout and "versions" not in again.stdout, (
        "a row that passed is not run again"
    )
    other = subprocess.run(
        [sys.executable, str(DIRECTORY / "run_all.py"), "--out", "out"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert (
        other.returncode == 2
        and "results of --device cpu --tiny: give another --out" in other.stdout
    )


def test_a_place_that_cannot_take_results_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    place, results = tmp_path / "out", tmp_path / "out" / "results.json"
    place.touch()
    refused = [run(tmp_path)]
    place.unlink()
    place.mkdir()
    for content in ("{}", "[]", "3", '{"device": "cpu", "tiny": true, "rows": 3}', "no JSON"):
        results.write_text(content)
        refused.append(run(tmp_path))
        assert results.read_text() == content
    for done in refused:
        assert (done.returncode, done.stderr) == (
            2,
            "",
        ) and "give another --out" in done.stdout.splitlines()[-1]
