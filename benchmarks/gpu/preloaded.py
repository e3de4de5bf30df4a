"""What rows import sooner or later: a fork server imports this module, and rows are its forks.

Forks share what was imported, so their garbage collections leave it out. Packages of which a
machine may have none come last: this import ends there, and the rows that need them fail by
themselves.
"""

from __future__ import annotations

from drillyard.cli.torch_import import import_without_collection

for _name in (
    *("training", "speed", "memory", "real_data"),
    # By the first graph, the first model of transformers, and HF Trainer.
    *("functorch.compile", "transformers.processing_utils", "transformers.trainer", "peft"),
):
    import_without_collection(_name)
