"""Nodes of a partition as sinfo prints them: which are idle, which offer fewer GPUs than a run
needs, and the commands that take one out and bring it back."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from drillyard.launch.slurm.config import SlurmConfig
from drillyard.launch.slurm.rules import gpus_of_gres

SINFO = ("sinfo", "--noheader", "--Node", "--format=%N|%P|%t|%f|%G|%E")
"""One line per node and partition; the reason, which may have `|` in it, is last."""
_COUNTED_FEWER = re.compile(r"gres/gpu count reported lower than configured \((\d+) < (\d+)\)")
"""The reason with which slurmctld drains a node that has lost GPUs (slurmctld/node_mgr.c)."""
_OUT = ("drain", "drng", "drained", "draining")


@dataclass(frozen=True)
class SlurmNode:
    """A node in a partition. `state` as sinfo's %t, with its marks: idle, idle~, mix, drain*."""

    name: str
    state: str
    features: frozenset[str]
    gpus: int
    reason: str

    @property
    def is_drained(self) -> bool:
        """Whether Slurm starts no new job on it by an order."""
        return self.state.rstrip("*~#!%$@^-+") in _OUT


def parse_sinfo(text: str, partition: str | None) -> list[SlurmNode]:
    """The nodes of a partition in what SINFO printed; None: of the default one, which has a `*`."""
    found = []
    for line in text.splitlines():
        if line.count("|") < 5:
            continue
        name, of, state, features, gres, reason = line.split("|", 5)
        if of.rstrip("*") != partition if partition else not of.endswith("*"):
            continue
        words = frozenset(() if features == "(null)" else features.split(","))
        found.append(SlurmNode(name, state, words, gpus_of_gres(gres) or 0, reason))
    return found


def usable_nodes(
    nodes: Iterable[SlurmNode], slurm: SlurmConfig, excluded: Iterable[str]
) -> list[SlurmNode] | None:
    """The nodes on which a job of this config may run; None where its constraint is more than one
    feature."""
    if slurm.constraint is not None and not re.fullmatch(r"[\w.-]+", slurm.constraint):
        return None
    left_out = set(excluded)
    return [
        each
        for each in nodes
        if each.name not in left_out
        and (slurm.constraint is None or slurm.constraint in each.features)
    ]


def short_of_gpus(nodes: Sequence[SlurmNode], needed: int, wanted: int) -> dict[str, str]:
    """Nodes with fewer than `needed` GPUs, and what each offers. Nodes without any are another kind
    and left out, while `wanted` others have enough."""
    lost = {each.name: _COUNTED_FEWER.search(each.reason) for each in nodes}
    enough = [
        each
        for each in nodes
        if each.gpus >= needed and not lost[each.name] and not each.is_drained
    ]
    short = {}
    for each in nodes:
        if (counted := lost[each.name]) is not None:
            short[each.name] = f"offers {counted[1]} of {counted[2]} GPUs ({each.reason})"
        elif each.gpus < needed and (each.gpus > 0 or len(enough) < wanted):
            short[each.name] = f"offers {each.gpus} of {needed} GPUs (sinfo, Gres)"
    return short


def drain_command(node: str, reason: str) -> list[str]:
    """Takes a node out: what runs on it goes on."""
    return ["scontrol", "update", f"NodeName={node}", "State=DRAIN", f"Reason={reason}"]


def undrain_command(node: str) -> list[str]:
    """Undoes `drain_command`."""
    return ["scontrol", "update", f"NodeName={node}", "State=RESUME"]
