"""The ranks of one host: start, watch, restart, end; without torch.

`supervise` runs any command as ranks; `supervise_training` runs a run config with it. See supervisor.py for the idea.
"""

from drillyard.supervise.nodes import Node
from drillyard.supervise.round import EXIT_CHECKPOINTED, EXIT_NOT_SAVED, EXIT_USER_ERROR, Patience
from drillyard.supervise.signals import STACKS_SIGNAL
from drillyard.supervise.supervisor import supervise
from drillyard.supervise.training import is_begun, supervise_training

__all__ = [
    "EXIT_CHECKPOINTED",
    "EXIT_NOT_SAVED",
    "EXIT_USER_ERROR",
    "STACKS_SIGNAL",
    "Node",
    "Patience",
    "is_begun",
    "supervise",
    "supervise_training",
]
