"""A plan as files: what apply.sh does is what the plan's steps are."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from drillyard.errors import UserError
from drillyard.launch.handles import Handle
from drillyard.launch.plan import Call, Plan, PlanFile, Program
from drillyard.launch.plan_output import write_plan


def plan(target: Path, here: Path) -> Plan:
    unpack = ("tar", "-C", str(target), "-xf", "-")
    return Plan(
        handle=Handle("slurm", "here", "run"),
        nodes=1,
        processes_per_node=1,
        run_directory="/runs/run",
        launch_directory="/runs/run/launch",
        code="there already",
        files=(PlanFile("job.json", "{}\n"), PlanFile("agent/__main__.py", "print('it''s')\n", 0o755)),
        steps=(
            Program("carry the files", unpack, sends=("job.json", "agent/__main__.py")),
            Program("carry this directory", ("tar", "-C", f"{target}/code", "-xf", "-"), sends_directory=str(here)),
            Program("submit", ("sh", "-c", f'echo "it\'s" submitted >{target}/said')),
        ),
        fields=(),
    )


def test_apply_carries_the_files_and_executes_every_step(tmp_path: Path) -> None:
    target, here = tmp_path / "cluster", tmp_path / "here"
    (target / "code").mkdir(parents=True)
    here.mkdir()
    (here / "train.py").write_text("1\n")
    subprocess.run(["git", "init", "-q", str(here)], check=True)
    write_plan(plan(target, here), tmp_path / "out")
    subprocess.run(["sh", str(tmp_path / "out" / "apply.sh")], check=True)
    assert (target / "job.json").read_text() == "{}\n"
    assert os.access(target / "agent" / "__main__.py", os.X_OK)
    assert len((target / "secret").read_text()) == 64 and (target / "secret").stat().st_mode & 0o077 == 0
    assert (target / "code" / "train.py").is_file()
    assert (target / "said").read_text() == "it's submitted\n"


def test_a_call_is_written_as_its_body_and_a_request(tmp_path: Path) -> None:
    call = Call("create the job", "POST", "https://service/v1/jobs", {"displayName": "run"})
    one = plan(tmp_path, tmp_path)
    write_plan(Plan(**{**one.__dict__, "steps": (call,)}), tmp_path / "out")
    assert json.loads((tmp_path / "out" / "requests" / "01.json").read_text()) == {"displayName": "run"}
    script = (tmp_path / "out" / "apply.sh").read_text()
    assert "-d @../requests/01.json https://service/v1/jobs" in script
    subprocess.run(["sh", "-n", str(tmp_path / "out" / "apply.sh")], check=True)


def test_a_directory_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(UserError, match="holds no plan"):
        write_plan(plan(tmp_path, tmp_path), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_script_of_another_tool_is_no_plan(tmp_path: Path) -> None:
    (tmp_path / "apply.sh").write_text("terraform apply\n")
    for overwrite in ((), ("overwrite",)):
        with pytest.raises(UserError, match="holds no plan"):
            write_plan(plan(tmp_path, tmp_path), tmp_path, **dict.fromkeys(overwrite, True))
    assert (tmp_path / "apply.sh").read_text() == "terraform apply\n"


def test_an_edited_plan_is_replaced_only_on_request(tmp_path: Path) -> None:
    out = tmp_path / "out"
    write_plan(plan(tmp_path, tmp_path), out)
    write_plan(plan(tmp_path, tmp_path), out)
    (out / "launch" / "job.json").write_text('{"mine": 1}\n')
    with pytest.raises(UserError, match="--overwrite"):
        write_plan(plan(tmp_path, tmp_path), out)
    assert (out / "launch" / "job.json").read_text() == '{"mine": 1}\n'
    write_plan(plan(tmp_path, tmp_path), out, overwrite=True)
    assert (out / "launch" / "job.json").read_text() == "{}\n"
