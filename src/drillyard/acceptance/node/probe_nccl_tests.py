"""A program of nccl-tests over the devices of one node, where one is installed.

Between nodes these programs need MPI, which launchers do not set up alike; there PyTorch measures.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import Any

from drillyard.host_tools import memory_file

PROGRAMS = {
    "all_reduce": "all_reduce_perf",
    "all_gather": "all_gather_perf",
    "reduce_scatter": "reduce_scatter_perf",
    "all_to_all": "alltoall_perf",
    "sendrecv": "sendrecv_perf",
}
DIRECTORIES = (
    "/third_party/nccl-tests/build",
    "/opt/nccl-tests/build",
    "/usr/local/bin",
)
"""Looked through after PATH: where images of Google Cloud and of NVIDIA have them."""
MOST_OUTPUT_BYTES = 1 << 20


def probe(arguments: dict[str, Any]) -> dict[str, Any]:
    """What the program printed. `skipped`: it is not installed, or the node has one device."""
    collective = str(arguments["collective"])
    ranks = int(arguments.get("ranks") or os.environ.get("NPROC_PER_NODE") or 1)
    values: dict[str, Any] = {"collective": collective, "ranks": ranks, "program": None}
    program = _find(PROGRAMS.get(collective, ""))
    if program is None:
        return {**values, "skipped": f"nccl-tests has no installed program for {collective}"}
    if ranks == 1:
        return {**values, "skipped": "the node has one device"}
    sizes = sorted(int(size) for size in arguments["sizes"])
    command = [program, "-b", str(sizes[0]), "-e", str(sizes[-1]), "-f", "2", "-g", str(ranks)]
    command += ["-w", "5", "--iters", "20", "-c", "1"]
    code, output, error = _run(command, float(arguments.get("budget_seconds", 60.0)))
    values.update(program=PROGRAMS[collective], command=command, output=output, exit_code=code)
    if error is not None:
        values["error"] = error
    return values


def _find(name: str) -> str | None:
    found = shutil.which(name) if name else None
    if found is None and name:
        paths = (os.path.join(directory, name) for directory in DIRECTORIES)
        found = next((path for path in paths if os.access(path, os.X_OK)), None)
    return found


def _run(command: list[str], seconds: float) -> tuple[int | None, str, str | None]:
    """The exit code, what was printed, and why it was ended; what it started ends with the
    probe."""
    with memory_file() as printed:
        error = None
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=printed, stderr=subprocess.STDOUT
            )
        except OSError as failed:
            return None, "", f"cannot be started: {failed}"
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            error = f"did not end within {seconds:.0f} s and was killed"
        printed.seek(0)
        text = printed.read(MOST_OUTPUT_BYTES).decode(errors="replace")
        return (None if error else process.returncode), text, error
