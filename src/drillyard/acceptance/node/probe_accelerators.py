"""GPUs of a host, as NVIDIA's tools, the PCI bus and device files show them: the tools' own text,
which is parsed where it is judged."""

from __future__ import annotations

from typing import Any

from drillyard.host_tools import num_gpus, run_tools

COMMANDS = {
    "query": ["nvidia-smi", "-q", "-x"],
    "list": ["nvidia-smi", "-L"],
    "links": ["nvidia-smi", "nvlink", "-s"],
    "link_errors": ["nvidia-smi", "nvlink", "-e"],
    "topology": ["nvidia-smi", "topo", "-m"],
    "pci": ["lspci", "-n", "-d", "10de:"],
}
"""10de is NVIDIA's vendor number on the PCI bus."""


def probe(arguments: dict[str, Any]) -> dict[str, Any]:
    """`{"device_files": count, "tools": {name: its answer}}`. `seconds`: of each tool."""
    return {
        "device_files": num_gpus(),
        "tools": run_tools(COMMANDS, float(arguments.get("seconds", 20.0))),
    }
