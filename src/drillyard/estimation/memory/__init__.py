"""Memory of a rank at the worst moment of a training step, by parts, without torch."""

from drillyard.estimation.memory.estimate import (
    MemoryEstimate,
    Verdict,
    memory_estimate,
    verdict_on,
)

__all__ = ["MemoryEstimate", "Verdict", "memory_estimate", "verdict_on"]
