"""The kernel's log since boot: the lines that could tell of a fault, as the kernel wrote them.

Sources in order: dmesg, /dev/kmsg, journalctl. A host may forbid each of them to a job.
"""

from __future__ import annotations

import os
import re
import time
from typing import Any

from drillyard.host_tools import read_small, run_tool

MOST_LINES, MOST_LINE_CHARACTERS = 4000, 500
_OF_INTEREST = re.compile(
    r"nvrm|nvidia|xid|nvswitch|nvlink|mlx|link|carrier|error|fail|lockup|hung|blocked for|"
    r"read-?only|oom|out of memory|killed|nvme|nfs|raid|pcie|\baer\b|thermal|temperature|"
    r"machine check|\bmce\b|edac|power|timeout|timed out|not responding|stall|corrupt",
    re.IGNORECASE,
)
"""Wider than any rule needs, so that a rule can change without a new run."""
_FIRST = re.compile(r"xid|nvrm", re.IGNORECASE)
"""Kept where there are too many lines."""


def probe(arguments: dict[str, Any]) -> dict[str, Any]:
    """`{"source", "lines", "total_lines", "first_second", "left_out", "tried", "now", "uptime"}`.

    `lines` have the form of dmesg: `[seconds since boot] text`. `source` None: no source can be
    read, and `tried` says why. `left_out`: lines of interest beyond the limit.
    """
    seconds = float(arguments.get("seconds", 8.0))
    tried: dict[str, str] = {}
    source, lines = None, []
    for name in ("dmesg", "/dev/kmsg", "journalctl"):
        found = _read(name, seconds)
        if isinstance(found, str):
            tried[name] = found
        else:
            source, lines = name, found
            break
    chosen = [line[:MOST_LINE_CHARACTERS] for line in lines if _OF_INTEREST.search(line)]
    kept = chosen
    if len(chosen) > MOST_LINES:
        first = [at for at, line in enumerate(chosen) if _FIRST.search(line)][:MOST_LINES]
        wanted = set(first) | set(range(len(chosen) - (MOST_LINES - len(first)), len(chosen)))
        kept = [chosen[at] for at in sorted(wanted)]
    uptime = read_small("/proc/uptime")
    return {
        "source": source,
        "lines": kept,
        "total_lines": len(lines),
        "first_second": _first_second(lines),
        "left_out": len(chosen) - len(kept),
        "tried": tried,
        "now": time.time(),
        "uptime": float(uptime.split()[0]) if uptime else None,
    }


def _read(name: str, seconds: float) -> list[str] | str:
    """All lines, or why there are none."""
    if name == "/dev/kmsg":
        try:
            lines = _kernel_messages()
        except OSError as error:
            return error.strerror or str(error)
    else:
        words = ["-k", "-b", "-o", "short-monotonic", "--no-pager", "-q"]
        ran = run_tool(["dmesg"] if name == "dmesg" else ["journalctl", *words], seconds)
        if ran["error"]:
            return str(ran["error"])
        lines = str(ran["text"]).splitlines()
    return lines or "has no lines"


def _kernel_messages() -> list[str]:
    """Records of /dev/kmsg in dmesg's form. Raises OSError where they may not be read."""
    descriptor = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    lines: list[str] = []
    try:
        while True:
            try:
                record = os.read(descriptor, 8192).decode(errors="replace")
            except BlockingIOError:
                return lines
            except BrokenPipeError:
                # Records were overwritten while they were read; the next read goes on after them.
                continue
            head, _, text = record.partition(";")
            fields = head.split(",")
            if len(fields) > 2 and fields[2].isdigit():
                first = text.splitlines()[0] if text.splitlines() else ""
                lines.append(f"[{int(fields[2]) / 1e6:12.6f}] {first}")
    finally:
        os.close(descriptor)


def _first_second(lines: list[str]) -> float | None:
    """When the log begins, in seconds since boot: a buffer forgets its oldest lines."""
    found = re.match(r"\[\s*(\d+\.\d+)\]", lines[0]) if lines else None
    return float(found.group(1)) if found else None
