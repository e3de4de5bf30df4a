"""Network interfaces and RDMA devices of a host, as the kernel shows them below /sys/class."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from drillyard.host_tools import read_small

_OF_INTERFACE = ("operstate", "mtu", "speed", "carrier", "carrier_changes", "address", "type")
_OF_PORT = ("state", "phys_state", "rate", "link_layer")
_COUNTERS = ("link_downed", "link_error_recovery", "symbol_error", "port_rcv_errors")


def probe(arguments: dict[str, Any]) -> dict[str, Any]:
    """`{"interfaces": {name: {...}}, "rdma_devices": {name: {..., "ports": {number: {...}}}}}`.

    Values are the kernel's text, null where a driver does not tell. `root`: where the host's /sys
    is mounted, if not at /.
    """
    classes = Path(str(arguments.get("root", "/"))) / "sys/class"
    return {
        "interfaces": {
            path.name: _interface(path) for path in _directories(classes / "net", required=True)
        },
        "rdma_devices": {path.name: _rdma(path) for path in _directories(classes / "infiniband")},
    }


def _interface(path: Path) -> dict[str, Any]:
    facts: dict[str, Any] = {name: read_small(path / name) for name in _OF_INTERFACE}
    device = path / "device"
    facts["device"] = os.path.basename(os.path.realpath(device)) if device.exists() else None
    facts["driver"] = _link(device / "driver")
    facts["numa_node"] = read_small(device / "numa_node")
    return facts


def _rdma(path: Path) -> dict[str, Any]:
    facts: dict[str, Any] = {
        name: read_small(path / name) for name in ("fw_ver", "hca_type", "node_type", "board_id")
    }
    device = path / "device"
    facts["device"] = os.path.basename(os.path.realpath(device)) if device.exists() else None
    facts["numa_node"] = read_small(device / "numa_node")
    facts["interfaces"] = [each.name for each in _directories(device / "net")]
    facts["ports"] = {
        port.name: {
            **{name: read_small(port / name) for name in _OF_PORT},
            "counters": {name: read_small(port / "counters" / name) for name in _COUNTERS},
        }
        for port in _directories(path / "ports")
    }
    return facts


def _directories(path: Path, required: bool = False) -> list[Path]:
    """What is in a directory, by name; nothing where it does not exist. Raises OSError where it is
    `required`."""
    try:
        return sorted(each for each in path.iterdir() if each.is_dir())
    except OSError:
        if required:
            raise
        return []


def _link(path: Path) -> str | None:
    return os.path.basename(os.path.realpath(path)) if path.exists() else None
