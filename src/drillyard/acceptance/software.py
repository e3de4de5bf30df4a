"""Versions of the software of a node, from what its files and tools say: driver, CUDA, libraries,
firmware, services. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from drillyard.acceptance.gpu_evidence import NodeGpus
from drillyard.hardware.network_stacks import NetworkStack

_DRIVER = re.compile(r"Kernel Module[^\d\n]*(\d+\.\d+(?:\.\d+)?)")
_LIBRARY = re.compile(r"/(libnccl|libfabric|libnccl-net[\w-]*)\.so\.(\d+\.\d[\w.]*)$")
_VERSION = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})+)")


def versions_of(
    software: Mapping[str, Any],
    gpus: NodeGpus | None,
    nics: Mapping[str, Any] | None,
    stack: NetworkStack | None,
) -> dict[str, str]:
    """Versions by name. What cannot be read is missing; several of one kind are joined."""
    found: dict[str, str] = {}
    for name in ("kernel", "python", "libc"):
        if isinstance(software.get(name), str) and software[name].strip():
            found[name] = software[name].strip()
    files = _mapping(software.get("files"))
    if named := re.search(r'^PRETTY_NAME="?([^"\n]+)"?$', str(files.get("os")), re.MULTILINE):
        found["operating system"] = named[1]
    if driver := _DRIVER.search(str(files.get("driver"))):
        found["driver"] = driver[1]
    found |= dict(_packages(_mapping(software.get("tools"))))
    found |= dict(_libraries(software.get("libraries")))
    found |= dict(_tools(software))
    if gpus is not None and gpus.table is not None:
        found |= {name: gpus.table.facts[name] for name in gpus.table.facts}
        for key, title in (("vbios", "VBIOS"), ("persistence", "persistence mode")):
            values = sorted({gpu.texts[key] for gpu in gpus.table.gpus if gpu.is_told(key)})
            if values:
                found[title] = ", ".join(values)
    firmware = sorted(
        {
            str(device["fw_ver"])
            for device in _mapping(_mapping(nics).get("rdma_devices")).values()
            if isinstance(device, Mapping) and device.get("fw_ver")
        }
    )
    if firmware:
        found["NIC firmware"] = ", ".join(firmware)
    if stack is not None:
        found |= dict(_images(_mapping(software.get("tools")), stack))
    return found


def _packages(tools: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for tool in ("packages", "rpm_packages"):
        for line in str(_mapping(tools.get(tool)).get("text", "")).splitlines():
            words = line.split()
            # Installed ones: `ii`; a name alone was removed or is only suggested.
            if len(words) == 3 and words[2].startswith("ii"):
                yield f"package {words[0]}", words[1]


def _libraries(listed: object) -> Iterator[tuple[str, str]]:
    versions: dict[str, set[str]] = {}
    for path in listed if isinstance(listed, list) else []:
        if found := _LIBRARY.search(str(path)):
            versions.setdefault(found[1], set()).add(found[2])
    for name, those in versions.items():
        yield {"libnccl": "NCCL"}.get(name, name), ", ".join(sorted(those))


def _tools(software: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    tools = _mapping(software.get("tools"))
    for tool, title, pattern in (
        ("libfabric", "libfabric", r"libfabric: (\S+)"),
        ("ofed", "OFED", r"(\S+?):?\s*$"),
        ("fabric_manager", "fabric manager", r"[Vv]ersion is : (\S+)"),
    ):
        answer = _mapping(tools.get(tool))
        found = re.search(pattern, str(answer.get("text", "")), re.MULTILINE)
        if found and not answer.get("error"):
            yield title, found[1]
    services, names = _mapping(tools.get("services")), software.get("service_names")
    states = str(services.get("text", "")).split()
    if isinstance(names, list) and len(states) == len(names):
        for name, state in zip(names, states, strict=True):
            yield f"service {name}", state
    modules = software.get("modules")
    if isinstance(modules, list) and modules:
        peer = [name for name in ("nvidia_peermem", "gdrdrv") if name in modules]
        yield "peer memory", ", ".join(peer) or "none"


def _images(tools: Mapping[str, Any], stack: NetworkStack) -> Iterator[tuple[str, str]]:
    """Versions of the stack's plugin and daemon, by the containers that installed or run them."""
    running = str(_mapping(tools.get("containers")).get("text", "")).split()
    for key, title in (("installer", "plugin"), ("sidecar", "rxdm")):
        repository = stack.images.get(key, "").rpartition(":")[0]
        tags = {
            image.rpartition(":")[2].lstrip("v")
            for image in running
            if repository and image.rpartition(":")[0] == repository
        }
        if tags:
            yield title, ", ".join(sorted(tags))


def version_tuple(text: str) -> tuple[int, ...] | None:
    """The first version in a text as numbers; None: there is none."""
    found = _VERSION.search(text)
    return tuple(int(part) for part in found[1].split(".")) if found else None


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
