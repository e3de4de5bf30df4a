"""All checks, in the order in which they run and are reported."""

from __future__ import annotations

from drillyard.acceptance.check import Check, Level
from drillyard.acceptance.checks import (
    accelerator_count,
    bandwidth_scaling,
    bit_equality,
    clock,
    connection,
    device_rates,
    names,
    path_mtu,
    peers,
    ports,
    stragglers,
    tcp_bandwidth,
    training_speed,
)

CHECKS: tuple[Check, ...] = (
    connection.CHECK,
    accelerator_count.CHECK,
    clock.CHECK,
    ports.CHECK,
    path_mtu.CHECK,
    names.CHECK,
    tcp_bandwidth.CHECK,
    bit_equality.CHECK,
    stragglers.CHECK,
    device_rates.MATMUL,
    device_rates.MEMORY,
    device_rates.HOST_DEVICE,
    peers.CHECK,
    training_speed.SPEED,
    training_speed.SCALING,
    bandwidth_scaling.CHECK,
    stragglers.JITTER,
)


def checks_of(level: Level) -> list[Check]:
    """The checks that run at a level."""
    return [check for check in CHECKS if check.level in level.includes]
