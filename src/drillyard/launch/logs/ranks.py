"""Which rank a line of a node's log is from, by the prefix that a launcher on the node put before it.

The agent writes `[default3]:` before the lines of local rank 3 where the command is one per GPU (agent/rank_pipes.py),
as torchrun does with `--tee` (`default` is its `--role`); torch's own messages begin `[rank7]:` (the rank in all), Open
MPI's `[1,7]<stdout>:`. Prefixes may be nested. A line without one is of no rank.
"""

from __future__ import annotations

import re
from typing import Final

from drillyard.launch.logs.merge import KEY_BYTES
from drillyard.loglines.prefixes import split_prefix

_PREFIX: Final = re.compile(rb"(?:\[[^\]\n]{1,64}\](?:<std(?:out|err|diag)>)?:?[ \t]?)+")
_KNOWN_PREFIXES: Final = 4096


class RankFilter:
    """Chooses the lines of one rank among stamped lines of its node."""

    def __init__(self, rank: int, node: int, per_node: int) -> None:
        self._rank = rank
        self._first = node * per_node
        self._per_node = per_node
        self._known: dict[bytes, bool] = {}

    def __call__(self, line: bytes) -> bool:
        """Whether the line is the rank's."""
        prefix = _PREFIX.match(line, KEY_BYTES)
        if prefix is None:
            return False
        text = prefix[0]
        known = self._known.get(text)
        if known is None:
            if len(self._known) >= _KNOWN_PREFIXES:
                self._known.clear()
            known = self._known[text] = self._rank_of(text) == self._rank
        return known

    def _rank_of(self, prefix: bytes) -> int | None:
        shape, _, origin, _ = split_prefix(prefix)
        if origin.rank is not None:
            return origin.rank
        if "local" in shape.parts:
            local = origin.names[shape.parts.index("local")][0]
            return self._first + local if local < self._per_node else None
        return None
