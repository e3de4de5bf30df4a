"""The configs a user writes: `run.yaml` (what to train) and `cluster.yaml` (where).

config = load_run_config("run.yaml", overrides=["training.steps=100"])
require_valid(config, num_ranks=8)
"""

from drillyard.config.checks import check_run, num_data_ranks, require_valid, resolve_accumulation, resolve_global_batch
from drillyard.config.cluster import ClusterConfig
from drillyard.config.load import load_cluster_config, load_launch_config, load_run_config, resolved_text, save_resolved
from drillyard.config.run import RunConfig, WorkloadRunConfig
from drillyard.config.run_identity import differences

__all__ = [
    "ClusterConfig",
    "RunConfig",
    "WorkloadRunConfig",
    "check_run",
    "differences",
    "load_cluster_config",
    "load_launch_config",
    "load_run_config",
    "num_data_ranks",
    "require_valid",
    "resolve_accumulation",
    "resolve_global_batch",
    "resolved_text",
    "save_resolved",
]
