"""Facts about hardware as data files, each with its source and date, and their lookup.

from drillyard.hardware import catalog
machine = catalog().machine("a4-highgpu-8g")
catalog().accelerator_of(machine).peak("bf16").value      # FLOP/s, dense
machine.fact("network_gbps")                              # the value with source, date and whether it is unverified
"""

from drillyard.hardware.accelerators import Accelerator
from drillyard.hardware.bandwidths import Bandwidth, BusBandwidth
from drillyard.hardware.catalog import Catalog, accelerators, catalog, find_accelerator, load_catalog
from drillyard.hardware.facts import Fact, FactSource, combine, total
from drillyard.hardware.machines import Machine
from drillyard.hardware.network_stacks import NetworkStack
from drillyard.hardware.prices import Price
from drillyard.hardware.quotas import Quota, quota_needed, region_of

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
    "accelerators",
    "catalog",
    "combine",
    "find_accelerator",
    "load_catalog",
    "quota_needed",
    "region_of",
    "total",
]
