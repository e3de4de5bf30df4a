"""Marks of a run and of its agents on everything that they start, and which process is which."""

from __future__ import annotations

import hashlib
import os

from .shared_modules import process_identity

__all__ = [
    "AGENT_MARK",
    "RUN_MARK",
    "Process",
    "node_name",
    "process_of",
    "run_token",
    "running_process",
    "this_process",
]

RUN_MARK = "DRILLYARD_RUN"
"""In the environment of everything that a run starts on a host: see `run_token`."""
AGENT_MARK = "DRILLYARD_AGENT"
"""In the environment of everything that one agent starts."""

Process = process_identity.Process
node_name = process_identity.node_name
process_of = process_identity.process_of
running_process = process_identity.running_process
this_process = process_identity.this_process


def run_token(launch_directory: str) -> str:
    """The value of RUN_MARK for a run: the same for all its agents."""
    return hashlib.sha256(os.path.abspath(launch_directory).encode()).hexdigest()[:20]
