"""The verb `check`: facts of a host that a launcher needs before it starts anything there, as one
JSON object.

The launcher evaluates them, as it has the facts of all hosts. What cannot be determined is null.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from drillyard.host_tools import gpu_models, num_gpus, run_tool
from drillyard.supervise.sockets import can_bind

from .job import LAUNCHED_FROM, read_job
from .meeting import follow, lead
from .ownership import problem_of
from .protocol import NUM_PORTS
from .startup import agents_here
from .state_file import read_file


def check(options: Namespace) -> int:
    facts: dict[str, Any] = {
        "clock": time.time(),
        "user": os.getuid(),
    }
    meets_first = options.meet is not None and not options.as_leader
    if meets_first:
        # The one who leads has meanwhile written what the others look for.
        facts["meeting"] = meeting_facts(options.meet, False)
    if options.directory is not None:
        facts["directory"] = directory_facts(
            Path(options.directory),
            options.nonce,
            options.write_nonce,
            Path(options.base) if options.base is not None else None,
        )
    if options.meet is not None and not meets_first:
        facts["meeting"] = meeting_facts(options.meet, True)
    facts["gpus"], facts["gpu_models"] = num_gpus(), gpu_models()
    if options.project is not None:
        project = Path(options.project)
        facts["project"] = {
            "path": options.project,
            "is_there": project.is_dir(),
            "writable": os.access(project, os.W_OK),
        }
    if options.port is not None:
        facts["ports_free"] = [
            port for port in range(options.port, options.port + NUM_PORTS) if can_bind(port)
        ]
    if options.python is not None:
        facts["drillyard"] = drillyard_facts(options.python)
    if options.launch_directory is not None:
        launch = Path(options.launch_directory)
        facts["agents"] = running_agents(launch)
        try:
            facts["unsafe"] = problem_of(launch)
        except OSError as error:
            facts["unsafe"] = f"{error.filename or launch}: {error.strerror}"
    if options.image is not None:
        facts["image"] = image_facts(options.image)
    if options.runs:
        facts["runs"] = active_runs()
    facts["clock_at_end"] = time.time()
    print(json.dumps(facts))
    return 0


def meeting_facts(words: Sequence[str], as_leader: bool) -> dict[str, Any]:
    """Lead or follow. `words`: the leader's names with commas between, first port, secret, number
    of others, seconds of the leader."""
    names, port, secret, others, seconds = words
    if as_leader:
        return lead(int(port), secret.encode(), int(others), float(seconds))
    return follow(names.split(","), int(port), secret.encode())


def directory_facts(
    directory: Path, nonce: str | None, write_nonce: str | None, base: Path | None = None
) -> dict[str, Any]:
    """Check whether a directory can be written, and whether other hosts share it. It is created if
    it is missing; with `base`, which must be there, that takes its place and nothing is created.

    `write_nonce` leaves a file `.drillyard-NONCE` for the others to see; `nonce` looks for one, for
    ten seconds, since network file systems may show it late.
    """
    if base is not None and not directory.is_dir():
        directory = base
    facts: dict[str, Any] = {
        "path": str(directory),
        "writable": False,
        "error": None,
        "seen": None,
        "free_bytes": None,
    }
    try:
        if base is None:
            directory.mkdir(parents=True, exist_ok=True)
        elif not directory.is_dir():
            return {**facts, "error": "is not there"}
        probe = directory / f".drillyard-probe-{socket.gethostname()}-{os.getpid()}"
        probe.write_text("probe\n", encoding="ascii")
        probe.unlink()
        facts["writable"] = True
        facts["free_bytes"] = shutil.disk_usage(directory).free
        if write_nonce is not None:
            (directory / f".drillyard-{write_nonce}").write_text(write_nonce, encoding="ascii")
    except OSError as error:
        facts["error"] = f"{error.filename or directory}: {error.strerror}"
    if nonce is not None:
        facts["seen"] = _appears(directory, f".drillyard-{nonce}")
    return facts


def _appears(directory: Path, name: str) -> bool:
    deadline = time.monotonic() + 10.0
    while True:
        # Listing makes an NFS client ask its server; a stat may be answered from its cache.
        with contextlib.suppress(OSError):
            if name in os.listdir(directory):
                return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.5)


def drillyard_facts(python: str) -> dict[str, Any]:
    try:
        ran = subprocess.run(
            [python, "-m", "drillyard", "--version"],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"python": python, "version": None, "error": str(error)}
    words = (ran.stdout.strip() or ran.stderr.strip()).splitlines()
    if ran.returncode != 0:
        return {
            "python": python,
            "version": None,
            "error": words[-1] if words else f"exit code {ran.returncode}",
        }
    return {"python": python, "version": words[-1] if words else "", "error": None}


def running_agents(launch_directory: Path) -> list[dict[str, Any]]:
    return [
        {"node": announced["node"], "submission": announced["submission"], "pid": process.pid}
        for announced, process in agents_here(launch_directory)
        if process.alive
    ]


def image_facts(image: str) -> dict[str, Any]:
    """Find the container runtime of this host, and the id of an image; null where it has yet to be
    pulled."""
    runtime = shutil.which("docker") or shutil.which("podman")
    if runtime is None:
        return {"runtime": None, "id": None, "error": "neither docker nor podman is installed"}
    if run_tool([runtime, "version"], 60.0)["error"]:
        return {
            "runtime": runtime,
            "id": None,
            "error": f"{runtime} version: fails; does its service run?",
        }
    found = run_tool([runtime, "image", "inspect", "--format", "{{.Id}}", image], 60.0)
    known = None if found["error"] else found["text"].strip()
    return {"runtime": runtime, "id": known, "error": None}


def active_runs() -> list[dict[str, Any]]:
    """List the runs with an agent on this machine, of any user: by the job on their command
    lines. `user` is that of the agent, `launched_from` the text of the record; empty without
    one."""
    jobs = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
            user = process.stat().st_uid
        except OSError:
            continue
        if words[2:3] in (["run"], ["keep"]) and "--job" in words[:-1]:
            jobs.add((words[words.index("--job") + 1], user))
    found = []
    for path, user in sorted(jobs):
        with contextlib.suppress(OSError, ValueError, TypeError):
            job = read_job(Path(path))
            found.append(
                {
                    "run": job.run,
                    "cluster": job.cluster,
                    "launch_directory": job.launch_directory,
                    "user": user,
                    "launched_from": _record_beside(Path(path)),
                }
            )
    return found


def _record_beside(job: Path) -> str:
    try:
        return read_file(job.with_name(LAUNCHED_FROM)).decode(errors="replace")
    except FileNotFoundError:
        return ""
    except OSError:
        # As a damaged one: it is there, and names no directory.
        return "unreadable"
