"""Selects lines of logs: by time with bisection, the last lines from the end, and the lines of one
rank.

`offsets_*` probe all files in one request: logs of any size cost about 25 small reads, over ssh as
many round trips for any number of files. They only save reading: the reader selects exactly, and no
offset is too late.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from drillyard.launch.logs.merge import KEY_BYTES
from drillyard.launch.remote_files import Files, ReadRequest
from drillyard.loglines.prefixes import split_prefix

_PROBE_BYTES: Final = 16 << 10
_NEAR_BYTES: Final = 256 << 10
"""Bisection ends when so little is left: it is read anyway."""
_STAMPED_LINE: Final = re.compile(rb"\n(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z )")
_TAIL_BLOCK: Final = 64 << 10


def offsets_since(files: Files, sizes: Sequence[tuple[str, int]], key: bytes) -> list[int]:
    """For each file, an offset at or before its first line of that time or later; 0 where lines are
    not stamped."""
    low = [0] * len(sizes)
    high = [size for _, size in sizes]
    while searching := [
        number for number in range(len(sizes)) if high[number] - low[number] > _NEAR_BYTES
    ]:
        probes = [
            ReadRequest(sizes[number][0], (low[number] + high[number]) // 2, _PROBE_BYTES)
            for number in searching
        ]
        for number, probe, piece in zip(searching, probes, files.read(probes), strict=True):
            found = None if piece is None else _STAMPED_LINE.search(piece.data)
            if found is None:
                # Unstamped lines, or one longer than the probe: keep the lower bound.
                high[number] = low[number]
            elif found[1] < key:
                low[number] = probe.offset + found.start() + 1
            else:
                high[number] = probe.offset
    return low


def offsets_of_tail(files: Files, sizes: Sequence[tuple[str, int]], lines: int) -> list[int]:
    """For each file, the offset at which its last `lines` lines begin."""
    begins = [size for _, size in sizes]
    left = [lines] * len(sizes)
    block = _TAIL_BLOCK
    while searching := [number for number in range(len(sizes)) if left[number] and begins[number]]:
        spans = [(max(0, begins[number] - block), begins[number]) for number in searching]
        pieces = files.read(
            [
                ReadRequest(sizes[number][0], at, end - at)
                for number, (at, end) in zip(searching, spans, strict=True)
            ]
        )
        for number, (at, end), piece in zip(searching, spans, pieces, strict=True):
            data = b"" if piece is None else piece.data
            # No line begins after the last newline.
            place = len(data) - (end == sizes[number][1])
            while left[number] and (place := data.rfind(b"\n", 0, place)) >= 0:
                left[number] -= 1
            begins[number] = at + place + 1
        block = min(4 * block, 4 << 20)
    return begins


_PREFIX: Final = re.compile(rb"(?:\[[^\]\n]{1,64}\](?:<std(?:out|err|diag)>)?:?[ \t]?)+")
_KNOWN_PREFIXES: Final = 4096


class RankFilter:
    """Selects the lines of one rank among stamped lines of its node, by the prefix that a launcher
    put before them.

    The agent and torchrun's --tee write `[default3]:` before the lines of local rank 3, torch's own
    messages begin `[rank7]:`, Open MPI's `[1,7]<stdout>:`. Prefixes may be nested. A line without
    one belongs to no rank.
    """

    def __init__(self, rank: int, node: int, per_node: int) -> None:
        self._rank, self._local_rank = rank, rank - node * per_node
        self._is_own = lru_cache(_KNOWN_PREFIXES)(self._names_it)

    def __call__(self, line: bytes) -> bool:
        """Whether the line is the rank's."""
        prefix = _PREFIX.match(line, KEY_BYTES)
        return prefix is not None and self._is_own(prefix[0])

    def _names_it(self, prefix: bytes) -> bool:
        shape, _, origin, _ = split_prefix(prefix)
        if origin.rank is not None or "local" not in shape.parts:
            return origin.rank == self._rank
        return origin.names[shape.parts.index("local")][0] == self._local_rank
