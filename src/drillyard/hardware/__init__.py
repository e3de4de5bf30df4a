"""Facts about hardware as data files, each with its source and date, and their lookup."""

from drillyard.hardware.accelerators import Accelerator, accelerators, find_accelerator

__all__ = ["Accelerator", "accelerators", "find_accelerator"]
