"""DCGM's own diagnostic, where it is installed: its JSON, which is parsed where it is judged."""

from __future__ import annotations

from typing import Any

from drillyard.host_tools import run_tools


def probe(arguments: dict[str, Any]) -> dict[str, Any]:
    """`{"tools": {"diagnostic": its answer}}`. `run`: DCGM's level 1 to 4; `seconds`: its limit."""
    level = int(arguments.get("run", 1))
    commands = {"diagnostic": ["dcgmi", "diag", "-r", str(level), "-j"]}
    return {"tools": run_tools(commands, float(arguments.get("seconds", 45.0)))}
