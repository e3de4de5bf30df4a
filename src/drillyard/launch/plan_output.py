"""Forms in which a plan is shown before it is executed. All depend on the plan alone, byte for
byte.

plan_json(plan)         `--dry-run --json`
plan_text(plan)         `--dry-run`: the job script, the steps in order, the other files by name and size
explain_text(plan)      `--explain`: each generated field, its reason and its source
write_plan(plan, DIR)   `--output DIR`: the launch directory's files in DIR/launch/, bodies of calls in DIR/requests/,
                        and DIR/apply.sh, the steps as a shell script that needs no Drillyard
"""  # noqa: E501

from __future__ import annotations

import json
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

from drillyard.formatting import plural
from drillyard.launch.plan import Call, Plan, Program, Step, secret_names
from drillyard.plan_files import PlanFile, explanation, write_plan_files
from drillyard.programs import comment_safe, input_for_login

_AGENT = "agent/"
_MADE_BY = "Made by `drillyard launch --output`."
_HEADER = """\
#!/bin/sh
# {handle}: what `drillyard launch` executes, in order. Made by `drillyard launch --output`.
set -eu
cd "$(dirname -- "$0")/launch"
umask 077
"""
_AGENTS_SECRET = """\
# The agents of a run authenticate with this.
[ -e secret ] || head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \\n' >secret
"""
_SECRETS = """\
# What ${{env:NAME}} in the configs stands for, from this shell's environment.
{checks}
trap 'rm -f secrets.json' EXIT
python3 -c 'import json, os, sys; print(json.dumps({{name: os.environ[name] for name in sys.argv[1:]}}))' \\
    {names} >secrets.json
"""  # noqa: E501
_NO_SECRETS = "echo '{}' >secrets.json\n"


def plan_text(plan: Plan, *, whole_files: bool = False) -> str:
    """The plan for a person: the job script, what is executed, and what is sent.

    Other files are a line each, with mode and size, unless `whole_files`; the agent's source is one
    line for all.
    """
    nodes, per_node = plan.nodes, plan.processes_per_node
    lines = [
        (
            f"# {plan.handle}: {plural(nodes, 'node')} x {plural(per_node, 'rank')} ="
            f" {nodes * per_node}"
        ),
        f"# run directory:    {comment_safe(plan.run_directory)}",
        f"# launch directory: {comment_safe(plan.launch_directory)}",
        f"# code:             {comment_safe(plan.code)}",
        *(f"# warning: {line}" for warning in plan.warnings for line in warning.splitlines()),
    ]
    lines += [
        f"# step {number}: {step.purpose}"
        for number, step in enumerate(plan.steps, 1)
        if plan.script
    ]
    own = [file for file in plan.files if not file.path.startswith(_AGENT)]
    lines += [line for file in own if file.path == plan.script for line in _whole(file)]
    lines += ["", f"# {plural(len(plan.steps), 'step')}, executed in this order:"]
    for number, (before, step) in enumerate(zip([None, *plan.steps], plan.steps, strict=False), 1):
        lines += ["", *_step_lines(number, step, before)]
    others = [file for file in own if file.path != plan.script]
    lines += [line for file in others if whole_files for line in _whole(file)]
    agent = [len(file.content.encode()) for file in plan.files if file.path.startswith(_AGENT)]
    how = "" if whole_files else " (--files prints them)"
    lines += [
        "",
        f"# {plural(len(others), 'file')} more in {comment_safe(plan.launch_directory)}{how}:",
        "",
    ]
    lines += [f"{len(file.content.encode()):>9}  {file.mode:04o}  {file.path}" for file in others]
    lines += (
        [f"{sum(agent):>9}  0644  {_AGENT}*: {len(agent)} files, the agent's source"]
        if agent
        else []
    )
    return "\n".join(lines) + "\n"


def plan_json(plan: Plan) -> dict[str, Any]:
    """The plan for programs."""
    of_job = ("nodes", "processes_per_node", "run_directory", "launch_directory")
    own = ("code", "files", "steps", "fields", "warnings", "script")
    values = asdict(plan)
    return {
        "handle": str(plan.handle),
        **{name: getattr(plan, name) for name in of_job},
        **{name: values[name] for name in own},
    }


def explain_text(plan: Plan) -> str:
    """Every generated field of the plan as `--explain` prints it: where it is, its value, reason
    and source."""
    return explanation(str(plan.handle), plan.fields)


def _step_lines(number: int, step: Step, before: Step | None) -> list[str]:
    lines = [f"{number}. {step.purpose}"]
    if isinstance(step, Program):
        if (
            isinstance(before, Program)
            and before.stage == step.stage
            and before.parallel
            and step.parallel
        ):
            lines[0] += " (at the same time as the one before)"
        lines.append(f"   $ {shlex.join(step.argv)}")
        if step.sends_directory is not None:
            lines.append(
                f"   < a tar archive of the files in {step.sends_directory} that git does not"
                " ignore"
            )
    else:
        lines.append(f"   {step.method} {step.target}")
        body = json.dumps(step.body, indent=2, ensure_ascii=False) if step.body else ""
        lines += [f"   {line}" for line in body.splitlines()]
    if step.sends:
        # The agent's files are one entry, the last.
        others = [path for path in step.sends if not path.startswith(_AGENT)]
        others += [f"{_AGENT}*"] if len(others) < len(step.sends) else []
        lines.append(f"   < a tar archive of {', '.join(others)}")
    return lines


def _whole(file: PlanFile) -> list[str]:
    lines = file.content.split("\n")
    text = lines[:-1] if lines[-1] == "" else [*lines[:-1], f"{lines[-1]}\\ no newline at the end"]
    return ["", f"----- {file.path} (mode {file.mode:04o})", *text]


def write_plan(plan: Plan, directory: Path, *, overwrite: bool = False) -> list[Path]:
    """Write the plan's files; returns their paths.

    Raises UserError, with nothing written, where `directory` contains anything but a plan, or,
    unless `overwrite`, a file with other content.
    """
    files = {f"launch/{file.path}": (file.content, file.mode) for file in plan.files}
    names = secret_names(plan.files)
    checks = "\n".join(
        f': "${{{name}?is not set, and the configs refer to it; nothing was sent}}"'
        for name in names
    )
    secrets = _SECRETS.format(checks=checks, names=" ".join(names)) if names else _NO_SECRETS
    has_agents = any(file.path.startswith(_AGENT) for file in plan.files)
    lines = [_HEADER.format(handle=plan.handle) + (_AGENTS_SECRET + secrets if has_agents else "")]
    for number, step in enumerate(plan.steps, 1):
        request = f"requests/{number:02}.json"
        if isinstance(step, Call):
            files[request] = (json.dumps(step.body, indent=2) + "\n", 0o644)
        lines.append(f"# {comment_safe(step.purpose)}\n{_line(step, f'../{request}')}\n")
    files["apply.sh"] = ("\n".join(lines), 0o755)
    return write_plan_files(
        directory, files, script="apply.sh", made_by=_MADE_BY, overwrite=overwrite
    )


def _line(step: Step, request: str) -> str:
    """A step as shell."""
    if isinstance(step, Program):
        command, before = shlex.join(step.argv), input_for_login(step.argv)
        if step.sends:
            sent = f"tar -cf - secret secrets.json {shlex.join(step.sends)}"
            return f"{{ {before} && {sent}; }} | {command}" if before else f"{sent} | {command}"
        if step.sends_directory is not None:
            listed = "git ls-files -z --cached --others --exclude-standard"
            first = f"{before} && " if before else ""
            return (
                f"({first}cd {shlex.quote(step.sends_directory)} && {listed} | tar --mtime=@0"
                f" --null -T - -cf -) | {command}"
            )
        return f"{before} | {command}" if before else command
    if step.sends:
        return f"gcloud storage rsync --recursive . {shlex.quote(step.target)}"
    headers = """-H "Authorization: Bearer $(gcloud auth print-access-token)" -H 'Content-Type: application/json'"""  # noqa: E501
    return f"curl --fail -X {step.method} {headers} -d @{request} {shlex.quote(step.target)}"
