"""One node of several: which share of the ranks a supervisor has.

Several supervisors, one per node, share a run: a launcher starts them together and, when one ends with an error, ends
the others and starts all again. So a supervisor of several does one round only. That of node 0 writes the run's events
and claims its directory; the others keep their hands off both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class NodePlacement:
    """A node's place among the `count` nodes of a run, and where all ranks meet."""

    count: int = 1
    rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int | None = None
    """None: a free port of this host, a fresh one in each round; only where it is the one node."""

    @property
    def is_first(self) -> bool:
        """Whether rank 0 is here, and with it the run's events and directory."""
        return self.rank == 0


def rank_environments(
    shared: Mapping[str, str], num_ranks: int, round_number: int, node: NodePlacement | None = None
) -> list[dict[str, str]]:
    """The environment of each rank that a node has in a round, lowest rank first; `num_ranks`: of one node."""
    node = node or NodePlacement()
    common = {
        **shared,
        "WORLD_SIZE": str(node.count * num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": node.master_addr,
        "DRILLYARD_ROUND": str(round_number),
        "DRILLYARD_SUPERVISED": "1",
        # Lines reach the log when they are printed: what a killed rank said last is what its user wants to read.
        "PYTHONUNBUFFERED": "1",
    }
    first = node.rank * num_ranks
    return [{**common, "RANK": str(first + local), "LOCAL_RANK": str(local)} for local in range(num_ranks)]
