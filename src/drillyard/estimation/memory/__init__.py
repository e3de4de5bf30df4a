"""What a rank's memory holds at the worst moment of a training step, by parts, without torch."""

from drillyard.estimation.memory.estimate import MemoryEstimate, by_checkpointing, memory_estimate

__all__ = ["MemoryEstimate", "by_checkpointing", "memory_estimate"]
