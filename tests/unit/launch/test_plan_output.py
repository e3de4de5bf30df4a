"""A plan as files: what apply.sh does is what the plan's steps are."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from drillyard.errors import UserError
from drillyard.launch.agent.job import Job
from drillyard.launch.plan import Call, Plan, Program
from drillyard.launch.plan_output import explain_text, plan_text, write_plan
from drillyard.plan_files import ExplainedField, PlanFile


def plan(target: Path, here: Path) -> Plan:
    unpack = ("tar", "-C", str(target), "-xf", "-")
    return Plan(
        Job("run", "here", "slurm", 1, 1, "/runs/run", "/runs/run/launch", []),
        code="there already",
        files=(
            PlanFile("job.json", "{}\n"),
            PlanFile("agent/__main__.py", "print('it''s')\n", 0o755),
        ),
        steps=(
            Program("carry the files", unpack, sends=("job.json", "agent/__main__.py")),
            Program(
                "carry this directory",
                ("tar", "-C", f"{target}/code", "-xf", "-"),
                sends_directory=str(here),
            ),
            Program("submit", ("sh", "-c", f'echo "it\'s" submitted >{target}/said')),
        ),
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
    assert (
        len((target / "secret").read_text()) == 64
        and (target / "secret").stat().st_mode & 0o077 == 0
    )
    assert (target / "code" / "train.py").is_file()
    assert (target / "said").read_text() == "it's submitted\n"


def test_a_call_is_written_as_its_body_and_a_request(tmp_path: Path) -> None:
    call = Call("create the job", "POST", "https://service/v1/jobs", {"displayName": "run"})
    one = plan(tmp_path, tmp_path)
    write_plan(Plan(**{**one.__dict__, "steps": (call,)}), tmp_path / "out")
    assert json.loads((tmp_path / "out" / "requests" / "01.json").read_text()) == {
        "displayName": "run"
    }
    script = (tmp_path / "out" / "apply.sh").read_text()
    assert "-d @../requests/01.json https://service/v1/jobs" in script
    subprocess.run(["sh", "-n", str(tmp_path / "out" / "apply.sh")], check=True)


def test_a_directory_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(UserError, match=re.escape(str(tmp_path))):
        write_plan(plan(tmp_path, tmp_path), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_script_of_another_tool_is_no_plan(tmp_path: Path) -> None:
    (tmp_path / "apply.sh").write_text("terraform apply\n")
    for overwrite in ((), ("overwrite",)):
        with pytest.raises(UserError, match=re.escape(str(tmp_path))):
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


def shown_plan(
    *steps: Program | Call,
    files: tuple[PlanFile, ...] = (),
    fields: tuple[ExplainedField, ...] = (),
    script: str = "",
) -> Plan:
    job = Job("llama-8b", "h100", "slurm", 2, 8, "/r", "/r/launch", [])
    return Plan(
        job, files, fields, ("first\nsecond",), code="there already: /p", steps=steps, script=script
    )


def test_a_plan_shows_steps_as_shell_lines_and_calls_with_their_bodies() -> None:
    text = plan_text(
        shown_plan(
            Program(
                "write",
                ("tar", "-C", "/a dir", "-x"),
                sends=("job.json", "agent/a.py", "agent/b.py"),
            ),
            Program("start n0", ("ssh", "n0", "go"), parallel=True),
            Program("start n1", ("ssh", "n1", "go"), parallel=True),
            Program("carry", ("tar", "x"), sends_directory="/p"),
            Call("submit", "POST", "https://service/jobs", {"displayName": "é"}),
        )
    )

    assert "# slurm://h100/llama-8b: 2 nodes x 8 ranks = 16\n" in text
    assert "# warning: first\n# warning: second\n" in text
    assert (
        "1. write\n   $ tar -C '/a dir' -x\n   < a tar archive of job.json, agent/*\n\n"
        "2. start n0\n   $ ssh n0 go\n\n"
        "3. start n1 (at the same time as the one before)\n   $ ssh n1 go\n\n"
        "4. carry\n   $ tar x\n   < a tar archive of the files in /p that git does not ignore\n\n"
        '5. submit\n   POST https://service/jobs\n   {\n     "displayName": "é"\n   }\n'
    ) in text


def test_a_plan_shows_its_script_first_and_other_files_by_size_unless_all_are_wanted() -> None:
    files: tuple[PlanFile, ...] = (
        PlanFile("job.json", "{}\n"),
        PlanFile("job.sbatch", "#!/bin/sh\nexit 0", 0o755),
    )
    plan = shown_plan(
        Program("go", ("go",)),
        files=(*files, PlanFile("agent/a.py", "import os\n")),
        script="job.sbatch",
    )

    short, whole = plan_text(plan), plan_text(plan, whole_files=True)

    script = "\n----- job.sbatch (mode 0755)\n#!/bin/sh\nexit 0\\ no newline at the end\n"
    for text in (short, whole):
        assert text.index("# step 1: go") < text.index(script) < text.index("1. go\n   $ go")
        assert "        3  0644  job.json\n" in text and "       10  0644  agent/*: 1 files" in text
        assert "import os" not in text
    assert "----- job.json" not in short and "----- job.json (mode 0644)\n{}\n" in whole


def test_every_field_is_explained() -> None:
    field = ExplainedField(
        "environment: NCCL_NET", "gIB", "the machine's stack", "https://cloud.google.com"
    )
    script = ExplainedField("job.sbatch: setup", "one\ntwo", "as set", "cluster.yaml: slurm.setup")

    text = explain_text(shown_plan(fields=(field, script)))

    assert (
        "\nenvironment: NCCL_NET = gIB\n    why:    the machine's stack\n    source: https://cloud.google.com\n"
        in text
    )
    assert "\njob.sbatch: setup = one\n    | two\n    why:    as set\n" in text
