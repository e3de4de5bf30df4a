"""What nvidia-smi prints of links, parsed: `nvlink -s`, `nvlink -e` and `topo -m`."""

from __future__ import annotations

import re
from collections.abc import Iterator

from drillyard.acceptance.parsers.errors import NotThisOutput


def parse_links(text: str) -> dict[int, list[float | None]]:
    """`nvidia-smi nvlink -s`: by GPU the GB/s of each link, None of an inactive one. Raises
    NotThisOutput."""
    links: dict[int, list[float | None]] = {}
    gpu: int | None = None
    for line in text.splitlines():
        if found := re.match(r"GPU (\d{1,4}): ", line):
            gpu = int(found[1])
            links[gpu] = []
        elif found := re.fullmatch(
            r"\s+Link (\d{1,4}): (?:(\d{1,9}(?:\.\d+)?) GB/s|<?inactive>?)", line
        ):
            if gpu is None or int(found[1]) != len(links[gpu]):
                raise NotThisOutput(f"has '{line.strip()}' out of order")
            links[gpu].append(float(found[2]) if found[2] else None)
        elif "all links are inactive" not in line.lower() and line.strip():
            raise NotThisOutput(f"has the line '{line.strip()[:80]}'")
    if not links:
        raise NotThisOutput("names no GPU")
    return links


def parse_link_errors(text: str) -> Iterator[tuple[int, int, str, int]]:
    """`nvidia-smi nvlink -e`: GPU, link, kind of error and count, of those that are not zero."""
    gpu = -1
    for line in text.splitlines():
        if found := re.match(r"GPU (\d{1,4}): ", line):
            gpu = int(found[1])
        elif (
            found := re.fullmatch(
                r"\s+Link (\d{1,4}): ([A-Za-z -]+?)(?: Errors)?: (\d{1,18})", line
            )
        ) and int(found[3]):
            yield gpu, int(found[1]), found[2].strip(), int(found[3])


def parse_topology(text: str) -> tuple[list[str], dict[str, list[str]], dict[str, str]]:
    """`nvidia-smi topo -m`: devices (GPU0, NIC0, ...), the row of links of each, and names of NICs.
    Raises NotThisOutput."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    lines = [line for line in plain.splitlines() if line.strip()]
    head = next((line.split() for line in lines if re.match(r"\s*GPU0\b", line)), None)
    if head is None:
        raise NotThisOutput("has no matrix")
    devices = [word for word in head if re.fullmatch(r"GPU\d+|NIC\d+|mlx5_\d+", word)]
    rows = {}
    for line in lines:
        words = line.split()
        if words[0] in devices and words[1:] and words != head:
            if len(words) < 1 + len(devices):
                raise NotThisOutput(f"the row of {words[0]} is cut")
            rows[words[0]] = words[1 : 1 + len(devices)]
    if missing := [device for device in devices if device not in rows]:
        raise NotThisOutput(f"has no row of {', '.join(missing)}")
    if wrong := [device for device in devices if rows[device][devices.index(device)] != "X"]:
        raise NotThisOutput(f"the row of {wrong[0]} is shifted")
    names = dict(re.findall(r"^\s*(NIC\d+): (\S+)\s*$", plain, re.MULTILINE))
    return devices, rows, names
