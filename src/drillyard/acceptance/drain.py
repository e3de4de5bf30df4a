"""Taking nodes that are proven to be at fault out of use, at most a share of those checked.

More bad nodes than that have a common cause more often than not, such as a switch or a driver, so
then none is taken out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from drillyard.acceptance.judgement import Outcome
from drillyard.errors import UserError
from drillyard.launch.launcher import Launcher

MAX_SHARE = 0.1


def drain_culprits(launcher: Launcher[Any], outcome: Outcome, max_share: float) -> Iterator[str]:
    """Drain the proven nodes of an outcome; yields what was done, and the command that undoes it,
    or why it was not done, a line each."""
    culprits, checked = outcome.culprits, outcome.evidence.expected_nodes
    if not culprits:
        yield "drain: no node is proven to be at fault; none was taken out"
        return
    if len(culprits) > max_share * checked:
        yield (
            f"drain: {len(culprits)} of {checked} nodes are proven to be at fault, more than"
            f" --max-share {max_share:g}: none was taken out; --max-share"
            f" {rounded_up(len(culprits) / checked)} takes them out"
        )
        return
    for rank in culprits:
        node = outcome.evidence.name_of(rank)
        try:
            undo = launcher.drain(node, reason_of(outcome, rank))
        except UserError as error:
            yield f"drain: {error}"
            continue
        yield (
            f"drain: {node} was out already"
            if undo is None
            else f"drain: {node} is taken out; to undo it: {undo}"
        )


def reason_of(outcome: Outcome, rank: int) -> str:
    """The first result that proves a node to be at fault, on one line."""
    result = next(each for each in outcome.results if rank in each.culprits)
    return f"drillyard accept: {result.check}: {' '.join(result.reason.split())}"[:200]


def rounded_up(share: float) -> str:
    """A share with two digits, not below it."""
    return f"{-(-share * 100 // 1) / 100:.2g}"
