"""The training probe's fixed shapes, and what its ranks printed: phases of blocks of steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from drillyard.acceptance.rank_values import RankValues, mapping, numbers

LARGE = {
    **{"hidden": 4096, "heads": 32, "kv_heads": 8, "intermediate": 14336},
    **{"layers": 4, "vocabulary": 32000, "sequence": 4096, "sequences": 2},
}
"""Layers of Llama 3 8B (config.json of meta-llama/Meta-Llama-3-8B), four of them: 1.1B parameters,
some 45 GB of memory in a step."""
MEDIUM = {**LARGE, "layers": 2, "sequences": 1}
"""For accelerators of less memory: 0.7B parameters, some 20 GB."""
SMALL = {
    **{"hidden": 128, "heads": 4, "kv_heads": 2, "intermediate": 384},
    **{"layers": 2, "vocabulary": 512, "sequence": 128, "sequences": 2},
}
"""For CPUs: a step takes some 15 ms of one core."""
LARGE_FROM_GB = 70.0


@dataclass(frozen=True)
class Phase:
    """Steps among `ranks` ranks. A block is (seconds of its steps, seconds of their local part)."""

    name: str
    ranks: int
    tokens_per_rank: int
    accumulated: int
    blocks: tuple[tuple[tuple[float, ...], tuple[float, ...]], ...]


def shape_for(memory_gb: float | None) -> dict[str, int]:
    """The shape for an accelerator of so much memory; None: for a CPU."""
    if memory_gb is None:
        return SMALL
    return LARGE if memory_gb >= LARGE_FROM_GB else MEDIUM


def phases_of(rank: RankValues) -> tuple[Phase, ...]:
    """The phases that a rank printed; none where one of them has another form."""
    listed = rank.values.get("phases")
    found = [_phase(mapping(each), rank) for each in (listed if isinstance(listed, list) else [])]
    return () if None in found else tuple(each for each in found if each is not None)


def _phase(printed: Mapping[str, Any], rank: RankValues) -> Phase | None:
    shape, name = mapping(rank.values.get("shape")), printed.get("name")
    ranks, tokens = (_count(printed.get(key)) for key in ("ranks", "tokens_per_rank"))
    once = _count(shape.get("sequence")) * _count(shape.get("sequences"))
    blocks = []
    listed = printed.get("blocks")
    for each in listed if isinstance(listed, list) else []:
        step, local = (numbers(mapping(each).get(key)) for key in ("step", "local"))
        if not step or len(step) != len(local):
            return None
        blocks.append((step, local))
    if not isinstance(name, str) or not (ranks and tokens and once and blocks) or tokens % once:
        return None
    return Phase(name, ranks, tokens, tokens // once, tuple(blocks))


def _count(value: object) -> int:
    """A whole number above zero; 0 for anything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0
