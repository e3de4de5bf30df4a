"""The machine that a cluster config names: whether it is known, and sold in the way that the config asks for.

`config` knows no machines, so what relates a cluster config to the catalog is judged here; every command that takes a
cluster's machine for real asks `machine_of`. A machine without a list of ways to buy it (a user's own row) may be had
in any way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from drillyard.errors import UserError
from drillyard.hardware.catalog import Catalog
from drillyard.hardware.machines import Machine

if TYPE_CHECKING:
    from drillyard.config.cluster import ClusterConfig


def machine_of(cluster: ClusterConfig, facts: Catalog) -> Machine:
    """The machine of `cluster`. UserError, at the line of the config, where it is missing, not known or not sold so."""
    if cluster.machine is None:
        raise _at(cluster, "machine", "missing: name the machine type, or give --machine")
    try:
        machine = facts.machine(cluster.machine)
    except UserError as error:
        raise _at(cluster, "machine", str(error)) from None
    unsold = consumption_problem(cluster.consumption, machine)
    if unsold is not None:
        raise _at(cluster, "consumption", unsold)
    return machine


def consumption_problem(consumption: str | None, machine: Machine) -> str | None:
    """Why `machine` cannot be had by `consumption`, or None where it can."""
    if consumption is None or not machine.consumption or consumption in machine.consumption:
        return None
    return f"{machine.name} cannot be had by '{consumption}'; it can by {', '.join(machine.consumption)}"


def _at(cluster: ClusterConfig, field: str, message: str) -> UserError:
    """An error about `field`, at its line where the config was read from a file; further lines stay as they are."""
    from drillyard.config.problems import Problem, dotted, location_of, problem_line

    first, newline, rest = message.partition("\n")
    problem, places = Problem((field,), first), cluster._origin.places
    where = (
        f"{dotted(problem.path)}: {first}"
        if places is None
        else problem_line(location_of(problem.path, places), problem)
    )
    return UserError(where + newline + rest)
