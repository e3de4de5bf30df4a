"""The price of a run's GPUs: the user's own, or that of the machine in the run directory's
cluster.yaml.

List prices come from hardware/prices.yaml with their date. Billed hours are wall time without
waiting: queueing is free, failures and restarts are not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from drillyard.errors import UserError
from drillyard.guarded_files import is_there, require_inside

CLUSTER_FILE = "cluster.yaml"


@dataclass(frozen=True, slots=True)
class GpuPrice:
    """Dollars for one hour of one GPU, and where the figure comes from."""

    usd_per_hour: float
    source: str

    def cost(self, num_gpus: int, billed_seconds: float) -> float:
        """Dollars for `num_gpus` over that time."""
        return self.usd_per_hour * num_gpus * billed_seconds / 3600


def gpu_price(run_directory: Path | None, given: float | None) -> GpuPrice | None:
    """The price of a run; None if neither the user nor the run's cluster.yaml gives one.

    Raises UserError for a negative or non-finite price, and for a cluster.yaml that cannot be read.
    """
    if given is not None:
        if not (math.isfinite(given) and given >= 0):
            raise UserError(
                f"--price-per-gpu-hour {given:g}: give dollars for one GPU for one hour, such as"
                " 8.05"
            )
        return GpuPrice(given, "as given")
    if run_directory is None or not is_there(run_directory / CLUSTER_FILE):
        return None
    require_inside(run_directory, run_directory / CLUSTER_FILE)
    from drillyard.config.load import load_cluster_config
    from drillyard.hardware import catalog

    cluster = load_cluster_config(run_directory / CLUSTER_FILE, resolve_environment=False)
    machine = None if cluster.machine is None else catalog().find_machine(cluster.machine)
    if machine is None or cluster.consumption is None or machine.num_accelerators == 0:
        return None
    region = None if cluster.location is None else cluster.location.region
    price = catalog().price(machine.name, cluster.consumption, region)
    if price is None:
        return None
    fact = price.gpu_hour(machine)
    return GpuPrice(
        fact.value,
        f"{machine.name} {cluster.consumption}, list price of {fact.date or 'unknown date'}",
    )
