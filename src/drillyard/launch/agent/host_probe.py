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
from pathlib import Path
from typing import Any

from drillyard.host_tools import gpu_models, num_gpus, run_tool
from drillyard.supervise.sockets import can_bind

from .job import LAUNCHED_FROM, read_job
from .ownership import problem_of
from .protocol import NUM_PORTS
from .startup import agents_here
from .state_file import read_file


def check(options: Namespace) -> int:
    facts: dict[str, Any] = {
        "clock": time.time(),
        "user": os.getuid(),
        "gpus": num_gpus(),
        "gpu_models": gpu_models(),
    }
    if options.directory is not None:
        facts["directory"] = directory_facts(
            Path(options.directory), options.nonce, options.write_nonce
        )
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


def directory_facts(directory: Path, nonce: str | None, write_nonce: str | None) -> dict[str, Any]:
    """Check whether a directory can be written (it is created if it is missing), and whether other
    hosts share it.

    `write_nonce` leaves a file `.drillyard-NONCE` for the others to see; `nonce` looks for one, for
    ten seconds, since network file systems may show it late.
    """
    facts: dict[str, Any] = {
        "path": str(directory),
        "writable": False,
        "error": None,
        "seen": None,
        "free_bytes": None,
    }
    try:
        directory.mkdir(parents=True, exist_ok=True)
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
