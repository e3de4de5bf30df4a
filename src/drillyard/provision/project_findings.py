"""What was found about a project before a cluster is made."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

Level = Literal["error", "warning", "unknown"]
_ORDER = ("error", "warning", "unknown")


@dataclass(frozen=True)
class ProjectFinding:
    """`error`: `up` would fail. `unknown`: it could not be found out. `fix` is a command or a
    setting."""

    level: Level
    what: str
    fix: str = ""


def in_order(findings: Iterable[ProjectFinding]) -> list[ProjectFinding]:
    """Each finding once, errors first."""
    return sorted(dict.fromkeys(findings), key=lambda each: _ORDER.index(each.level))


def findings_text(project: str, findings: Sequence[ProjectFinding]) -> str:
    """The findings for a person."""
    if not findings:
        return f"Project {project} has what the cluster needs."
    lines = [f"Project {project}:"]
    for each in findings:
        lines.append(f"  {each.level}: {each.what}")
        lines += [f"    {each.fix}"] if each.fix else []
    return "\n".join(lines)
