"""The ranks of one host: start, watch, restart, end; without torch.

`supervise` runs any command as ranks; `supervise_training` runs a run config with it. See supervisor.py for the idea.
"""

from drillyard.supervise.attempt import GracePeriods
from drillyard.supervise.launch_contract import EXIT_CHECKPOINTED, EXIT_NOT_SAVED, EXIT_USER_ERROR
from drillyard.supervise.rank_process import NodePlacement
from drillyard.supervise.stop_requests import STACKS_SIGNAL
from drillyard.supervise.supervisor import supervise
from drillyard.supervise.training_supervisor import is_started, supervise_training

__all__ = [
    "EXIT_CHECKPOINTED",
    "EXIT_NOT_SAVED",
    "EXIT_USER_ERROR",
    "STACKS_SIGNAL",
    "GracePeriods",
    "NodePlacement",
    "is_started",
    "supervise",
    "supervise_training",
]
