"""All checks, in the order in which they run and are reported."""

from __future__ import annotations

from drillyard.acceptance.check import Check, Level
from drillyard.acceptance.checks import (
    accelerator_count,
    accelerator_model,
    dcgm,
    ecc,
    environment,
    foreign_processes,
    gpu_limits,
    gpu_recovery,
    host_limits,
    kernel_command_line,
    kernel_log,
    network_interfaces,
    nvlink,
    pcie_link,
    remapped_rows,
    throttling,
    topology,
    versions,
    xids,
)

CHECKS: tuple[Check, ...] = (
    accelerator_count.CHECK,
    accelerator_model.CHECK,
    gpu_recovery.CHECK,
    xids.CHECK,
    ecc.CHECK,
    remapped_rows.CHECK,
    throttling.CHECK,
    gpu_limits.CHECK,
    pcie_link.CHECK,
    nvlink.CHECK,
    topology.CHECK,
    foreign_processes.CHECK,
    network_interfaces.CHECK,
    host_limits.CHECK,
    kernel_log.CHECK,
    versions.CHECK,
    environment.CHECK,
    kernel_command_line.CHECK,
    dcgm.CHECK,
)


def checks_of(level: Level) -> list[Check]:
    """The checks that run at a level."""
    return [check for check in CHECKS if check.level in level.includes]
