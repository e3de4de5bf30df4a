"""`drillyard launch --accept LEVEL`: nodes are checked before a run starts on them.

The check is a job of its own, as judging needs what the nodes do not have. It takes a few nodes
more than the run, where they are idle: partners that pass show which of a bad pair it is. Nodes
proven to be bad are excluded from the run, by launchers that can; otherwise nothing is submitted.
The scheduler chooses the run's nodes: where others than the checked ones are free, it may take
those.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from drillyard.acceptance.accept_command import (
    Acceptance,
    acceptance_of,
    names_of_culprits,
    on_nodes,
    run_acceptance,
    without_nodes,
)
from drillyard.acceptance.check import Level
from drillyard.acceptance.judgement import Outcome
from drillyard.acceptance.results import Status
from drillyard.config.platforms import platforms
from drillyard.errors import UserError
from drillyard.launch.launcher import launcher_for
from drillyard.launch.remote_files import print_notice

SPARE_NODES = 2
MOST_ROUNDS = 3
_GOOD = (Status.passed, Status.warn)


def nodes_to_exclude(
    cluster_file: Path,
    level: Level,
    nodes: int | None,
    exclude: list[str],
    report: Callable[[Acceptance, Outcome], None],
    *,
    pool: str | None = None,
) -> list[str]:
    """Check the nodes of a run to come; returns those that it must not use, `exclude` included.
    `report` is called with each outcome. Raises UserError where the run must not start."""
    first = acceptance_of(
        cluster_file, level, nodes=nodes, pool=pool, exclude=exclude, fixed_nodes=True
    )
    cluster = first.request.cluster
    can_exclude = platforms()[cluster.platform].capabilities.exclude
    excluded = list(exclude)
    for _ in range(MOST_ROUNDS):
        acceptance = _with_spares(first, excluded)
        outcome = run_acceptance(acceptance)
        report(acceptance, outcome)
        bad = names_of_culprits(outcome)
        if outcome.verdict in _GOOD:
            return excluded
        if not bad or not can_exclude:
            raise _refused(cluster.platform, outcome, can_exclude)
        print_notice(f"{', '.join(bad)}: proven to be bad; the run does not use it")
        excluded += bad
        healthy = len(outcome.evidence.nodes) - len(bad)
        if healthy >= cluster.nodes and without_nodes(outcome, outcome.culprits) in _GOOD:
            return excluded
    raise UserError(
        f"{cluster.name}: nodes fail again and again, now without {', '.join(excluded)}; nothing"
        f" was submitted\ncheck them all: drillyard accept {cluster_file}"
        + (f" --pool {pool}" if pool else "")
    )


def _with_spares(acceptance: Acceptance, excluded: list[str]) -> Acceptance:
    request = on_nodes(acceptance, acceptance.request.cluster.nodes, excluded).request
    idle = launcher_for(request.cluster).idle_nodes(request)
    nodes = request.cluster.nodes
    return on_nodes(acceptance, max(nodes, min(len(idle or ()), nodes + SPARE_NODES)), excluded)


def _refused(platform: str, outcome: Outcome, can_exclude: bool) -> UserError:
    shown = [
        each.reason for each in outcome.results if each.required and each.status is outcome.verdict
    ]
    why = (
        ""
        if can_exclude or not outcome.culprits
        else f"\nplatform {platform} cannot take other nodes in their place"
    )
    lines = "\n".join(f"  {reason}" for reason in dict.fromkeys(shown))
    return UserError(
        f"the nodes are not accepted ({outcome.verdict}); nothing was submitted:\n{lines}{why}"
    )
