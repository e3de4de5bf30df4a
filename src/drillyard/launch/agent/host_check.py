"""The verb `check`: facts of a host that a launcher needs before it starts anything there, as one
JSON object.

The launcher evaluates them, as it has the facts of all hosts. What cannot be determined is null.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from drillyard.host_probe import directory_facts, drillyard_facts, image_facts
from drillyard.host_tools import gpu_models, num_gpus
from drillyard.supervise.sockets import can_bind

from .job import LAUNCHED_FROM, read_job
from .meeting import follow, lead
from .ownership import problem_of
from .protocol import NUM_PORTS
from .state_file import agents_here, read_file


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


def running_agents(launch_directory: Path) -> list[dict[str, Any]]:
    return [
        {"node": announced["node"], "submission": announced["submission"], "pid": process.pid}
        for announced, process in agents_here(launch_directory)
        if process.alive
    ]


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
        with contextlib.suppress(OSError, ValueError):
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
