"""What cannot work, or is likely not meant, in a run and a cluster put together: found before anything is sent.

    warnings = require_launchable(request)

Each rule yields findings with the rule, its source and the fix, at the line of the config where the value stands; one
error lists all of them. Rules are pure: no disk, no network. What only one launcher knows (a partition that is not
there, a host that does not answer) that launcher finds; what one config says alone is config's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from drillyard.config.problems import Path, Problem, SourceLocation, location_of, problem_line
from drillyard.errors import UserError
from drillyard.hardware.machines import Machine
from drillyard.launch.launcher import LaunchRequest

Config = Literal["run", "cluster"]


@dataclass(frozen=True)
class LaunchFinding:
    """Something about the value at `problem.path` of a config; one that is not `fatal` is a warning."""

    config: Config
    problem: Problem
    fatal: bool = True


Rule = Callable[[LaunchRequest, Machine | None], Iterator[LaunchFinding]]
"""A rule of a request and its machine; None where none is named or it is not known."""


def check_request(request: LaunchRequest) -> list[LaunchFinding]:
    """All that is found in `request`, in the order of the rules."""
    from drillyard.launch.checks import cluster, image, run

    name = request.cluster.machine
    machine = None if name is None else request.facts.find_machine(name)
    rules = (*cluster.RULES, *run.RULES, *image.RULES)
    return [finding for rule in rules for finding in rule(request, machine)]


def require_launchable(request: LaunchRequest) -> tuple[str, ...]:
    """The warnings of `request`. Raises one UserError that lists every mistake, run config first, in order of lines."""
    found = sorted(dict.fromkeys(check_request(request)), key=lambda finding: _order(request, finding))
    mistakes = [_line(request, finding) for finding in found if finding.fatal]
    if mistakes:
        raise UserError("\n".join(mistakes))
    return tuple(_line(request, finding) for finding in found)


def error(config: Config, key: str | Path, message: str) -> LaunchFinding:
    """What is wrong with the value at `key`, dotted or in parts."""
    return LaunchFinding(config, Problem(_path(key), message))


def warning(config: Config, key: str | Path, message: str) -> LaunchFinding:
    """What is likely not meant by the value at `key`, dotted or in parts."""
    return LaunchFinding(config, Problem(_path(key), message), fatal=False)


def _path(key: str | Path) -> Path:
    parts = key.split(".") if isinstance(key, str) else key
    return tuple(int(part) if isinstance(part, str) and part.isdecimal() else part for part in parts)


def _place_of(request: LaunchRequest, finding: LaunchFinding) -> SourceLocation:
    config = request.run if finding.config == "run" else request.cluster
    places = config._origin.places
    return (
        SourceLocation(f"{finding.config} config", 0) if places is None else location_of(finding.problem.path, places)
    )


def _order(request: LaunchRequest, finding: LaunchFinding) -> tuple[bool, int]:
    return finding.config == "cluster", _place_of(request, finding).order


def _line(request: LaunchRequest, finding: LaunchFinding) -> str:
    return problem_line(_place_of(request, finding), finding.problem)
