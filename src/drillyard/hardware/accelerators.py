"""Accelerators: dense peak FLOP/s by precision and memory, looked up by our name or by the name the driver reports.

The facts stand in accelerators.yaml, each row with its source and date. There is no default row: an accelerator that is
not known has no peak, so a run on it has no MFU; a wrong one would be worse. A CPU has no row for the same reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import yaml


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One GPU model. `peak_flops` maps a precision (bf16, fp8, ...) to dense FLOP/s; `memory_gb` is in 1e9 bytes.

    `unverified` names the fields (`peak_tflops`, or one value as `peak_tflops.fp4`) that no primary source confirms.
    """

    name: str
    title: str
    reported_as: tuple[str, ...]
    peak_flops: dict[str, float]
    memory_gb: float
    source: str
    date: str
    unverified: tuple[str, ...]

    def peak_is_unverified(self, precision: str) -> bool:
        """Whether the peak at `precision` rests on a derivation or a secondary source: say so where it is used."""
        return bool({"peak_tflops", f"peak_tflops.{precision}"} & set(self.unverified))


@cache
def accelerators() -> tuple[Accelerator, ...]:
    """All known accelerators in the order of the data file."""
    rows = yaml.safe_load(files("drillyard.hardware").joinpath("accelerators.yaml").read_text(encoding="utf-8"))
    return tuple(
        Accelerator(
            name=row["name"],
            title=row["title"],
            reported_as=tuple(row["reported_as"]),
            peak_flops={precision: float(tflops) * 1e12 for precision, tflops in row["peak_tflops"].items()},
            memory_gb=float(row["memory_gb"]),
            source=row["source"],
            date=str(row["date"]),
            unverified=tuple(row.get("unverified", ())),
        )
        for row in rows
    )


def find_accelerator(name: str) -> Accelerator | None:
    """The accelerator with our name (`h100`) or the driver's (`NVIDIA H100 80GB HBM3`), in any case; None if unknown.

    The whole name must match: a partitioned GPU (`... MIG 1g.10gb`) or a variant that is not listed is not guessed at.
    """
    wanted = " ".join(name.split()).casefold()
    for accelerator in accelerators():
        if wanted in {known.casefold() for known in (accelerator.name, accelerator.title, *accelerator.reported_as)}:
            return accelerator
    return None
