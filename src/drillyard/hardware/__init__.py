"""Facts about hardware as data files, each with its source and date, and their lookup.

from drillyard.hardware import catalog
machine = catalog().machine("a4-highgpu-8g")
catalog().accelerator_of(machine).peak("bf16").value      # FLOP/s, dense
machine.fact("network_gbps")                              # the value with source, date and whether it is unverified
"""  # noqa: E501

from __future__ import annotations

import os

from drillyard.hardware.accelerators import Accelerator
from drillyard.hardware.bandwidths import Bandwidth, BusBandwidth
from drillyard.hardware.capacity import Quota, quota_needed, region_of
from drillyard.hardware.catalog import Catalog, catalog, find_accelerator
from drillyard.hardware.facts import Fact, FactSource, combine
from drillyard.hardware.machines import Machine, Price
from drillyard.hardware.network_stacks import NetworkStack

__all__ = [
    "Accelerator",
    "Bandwidth",
    "BusBandwidth",
    "Catalog",
    "Fact",
    "FactSource",
    "Machine",
    "NetworkStack",
    "Price",
    "Quota",
    "catalog",
    "combine",
    "find_accelerator",
    "load_catalog",
    "quota_needed",
    "region_of",
]


def load_catalog(path: str | os.PathLike[str] | None) -> Catalog:
    """Our catalog with the rows of the file at `path` laid over it; our own where `path` is None.

    Raises UserError with every mistake of the file, each with its line.
    """
    if path is None:
        return catalog()
    # Imported here: it brings the models of configs, which our own catalog does without.
    from drillyard.hardware.user_file import read_user_file

    return read_user_file(path)
