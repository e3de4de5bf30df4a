"""Accelerators: dense peak FLOP/s by precision, memory and links. The facts are in
accelerators.yaml.

There is no default row: a run on an unknown accelerator has no MFU rather than a wrong one. The row
`cpu` has no peak, and no device name matches it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt

from drillyard.hardware.facts import CatalogRow, Fact, combine


class Accelerator(CatalogRow):
    """One model of GPU. Unknown values are None, or missing in a mapping from precision (bf16, fp8,
    ...) to TFLOP/s.

    `peak_tflops` and `sparse_tflops` are the vendor's, without and with 2:4 sparsity;
    `achievable_tflops` is the best published matmul rate. `memory_gb` is the size as sold,
    `memory_gib` the total that the driver reports. `gpu_link_gb_per_s` counts both directions, as
    vendors do, over all `gpu_links`; host link and host-device copies count one. Programs built
    with a CUDA before `min_cuda` have no code for it. `compute_capability`: NVIDIA's, such as 9.0.
    """

    name: str
    title: str
    aliases: tuple[str, ...] = ()
    reported_as: tuple[str, ...] = ()
    peak_tflops: dict[str, PositiveFloat] = Field(default={})
    sparse_tflops: dict[str, PositiveFloat] = Field(default={})
    achievable_tflops: dict[str, PositiveFloat] = Field(default={})
    memory_gb: PositiveFloat | None = None
    memory_gib: PositiveFloat | None = None
    memory_bandwidth_gb_per_s: PositiveFloat | None = None
    gpu_link: Literal["nvlink", "infinity-fabric"] | None = None
    gpu_link_gb_per_s: PositiveFloat | None = None
    gpu_links: PositiveInt | None = None
    host_link: str | None = None
    host_link_gb_per_s: PositiveFloat | None = None
    host_device_gb_per_s: PositiveFloat | None = None
    min_cuda: str | None = None
    compute_capability: str | None = Field(default=None, pattern=r"^\d+\.\d$")

    @property
    def source(self) -> str:
        """Source of the row; single fields may have another one, see `fact`."""
        return self.provenance.row.text

    @property
    def date(self) -> str | None:
        """The date of `source`."""
        return self.provenance.row.date

    @property
    def peak_flops(self) -> Mapping[str, float]:
        """Dense peak in FLOP/s by precision."""
        return {precision: tflops * 1e12 for precision, tflops in self.peak_tflops.items()}

    def peak(self, precision: str) -> Fact[float] | None:
        """Dense peak in FLOP/s at `precision`, or None where it is not known."""
        return (
            self.fact(f"peak_tflops.{precision}") * 1e12 if precision in self.peak_tflops else None
        )

    def achievable(self, precision: str) -> Fact[float] | None:
        """The best published matmul rate in FLOP/s at `precision`, or None."""
        return (
            self.fact(f"achievable_tflops.{precision}") * 1e12
            if precision in self.achievable_tflops
            else None
        )

    def host_device_bandwidth_gb_per_s(self) -> Fact[float] | None:
        """Pinned copies between host and device, one direction: as published, else the link's line
        rate, else None."""
        if self.host_device_gb_per_s is not None:
            return self.fact("host_device_gb_per_s")
        return None if self.host_link_gb_per_s is None else self.fact("host_link_gb_per_s")

    def one_way_link_gb_per_s(self) -> Fact[float] | None:
        """GPU to GPU inside a node, one direction: half of what vendors state."""
        if self.gpu_link_gb_per_s is None:
            return None
        return combine(self.gpu_link_gb_per_s / 2, self.fact("gpu_link_gb_per_s"))

    def is_called(self, name: str) -> bool:
        """Whether the whole of `name` is one of the row's names, in any case and spacing."""
        wanted = " ".join(name.split()).casefold()
        return wanted in {
            known.casefold() for known in (self.name, self.title, *self.aliases, *self.reported_as)
        }
