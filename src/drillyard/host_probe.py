"""Facts of a host that runs need: its directories, its Drillyard, its container runtime.

It travels as source to the nodes, beside host_tools.py: standard library only, nothing newer than
Python 3.9. The caller judges; what cannot be determined is null.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

from drillyard.host_tools import run_tool


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
    """Ask the Drillyard of an interpreter for its version."""
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
