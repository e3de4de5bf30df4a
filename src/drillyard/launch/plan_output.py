"""`--output DIR`: a plan as files that a person can read, keep and apply without Drillyard.

DIR/launch/          the generated files, as they will lie in the run's launch directory
DIR/requests/        the bodies of calls to a service
DIR/apply.sh         the plan's steps, in order, as a shell script
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from drillyard.errors import UserError
from drillyard.launch.plan import Call, Plan, Program, Step
from drillyard.launch.programs import comment_safe
from drillyard.launch.submit_secrets import secret_names

_MADE_BY = "Made by `drillyard launch --output`."
_HEADER = """\
#!/bin/sh
# {handle}: what `drillyard launch` executes, in order. Made by `drillyard launch --output`.
set -eu
cd "$(dirname -- "$0")/launch"
umask 077
# The agents of a run know each other by this.
[ -e secret ] || head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \\n' >secret
"""
_SECRETS = """\
# What ${{env:NAME}} in the configs stands for, from this shell's environment.
{checks}
trap 'rm -f secrets.json' EXIT
python3 -c 'import json, os, sys; print(json.dumps({{name: os.environ[name] for name in sys.argv[1:]}}))' \\
    {names} >secrets.json
"""
_NO_SECRETS = "echo '{}' >secrets.json\n"


def write_plan(plan: Plan, directory: Path, *, overwrite: bool = False) -> list[Path]:
    """Write the plan's files; returns their paths.

    Raises UserError, with nothing written, where `directory` holds anything but a plan, or a file that would be
    replaced by other content, unless `overwrite`.
    """
    script = directory / "apply.sh"
    files: dict[Path, tuple[str, int]] = {
        directory / "launch" / file.path: (file.content, file.mode) for file in plan.files
    }
    lines = [_HEADER.format(handle=plan.handle) + _secrets(secret_names(plan.files))]
    for number, step in enumerate(plan.steps, 1):
        request = directory / "requests" / f"{number:02}.json"
        if isinstance(step, Call):
            files[request] = (json.dumps(step.body, indent=2) + "\n", 0o644)
        lines.append(f"# {comment_safe(step.purpose)}\n{_line(step, f'../requests/{request.name}')}\n")
    files[script] = ("\n".join(lines), 0o755)
    try:
        _require_plan(directory, script)
        changed = [
            path for path, (content, _) in files.items() if path.exists() and path.read_bytes() != content.encode()
        ]
    except OSError as error:
        raise UserError(f"{error.filename}: cannot be read ({error.strerror}); name a new directory") from None
    if changed and not overwrite:
        raise UserError(
            f"{changed[0]}: is there with other content; give --overwrite to replace this plan, or name a new directory"
        )
    return [_write(path, content, mode) for path, (content, mode) in files.items()]


def _require_plan(directory: Path, script: Path) -> None:
    """Raise UserError where a directory holds something, and no plan."""
    if not directory.exists() or not any(directory.iterdir()):
        return
    if not script.is_file() or _MADE_BY not in script.read_text(encoding="utf-8", errors="replace"):
        raise UserError(f"{directory}: is not empty and holds no plan; name a new directory")


def _secrets(names: Sequence[str]) -> str:
    if not names:
        return _NO_SECRETS
    checks = "\n".join(f': "${{{name}?is not set, and the configs refer to it; nothing was sent}}"' for name in names)
    return _SECRETS.format(checks=checks, names=" ".join(names))


def _line(step: Step, request: str) -> str:
    """A step as shell."""
    if isinstance(step, Program):
        command = shlex.join(step.argv)
        if step.sends:
            return f"tar -cf - secret secrets.json {shlex.join(step.sends)} | {command}"
        if step.sends_directory is not None:
            listed = "git ls-files -z --cached --others --exclude-standard"
            return (
                f"(cd {shlex.quote(step.sends_directory)} && {listed} | tar --mtime=@0 --null -T - -cf -) | {command}"
            )
        return command
    if step.sends:
        return f"gcloud storage rsync --recursive . {shlex.quote(step.target)}"
    token = '"Authorization: Bearer $(gcloud auth print-access-token)"'
    body = f"-H 'Content-Type: application/json' -d @{request}"
    return f"curl --fail -X {step.method} -H {token} {body} {shlex.quote(step.target)}"


def _write(path: Path, content: str, mode: int) -> Path:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # A new file, so that the umask applies and a link is replaced.
        path.unlink(missing_ok=True)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w", encoding="utf-8") as file:
            file.write(content)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror})") from None
    return path
