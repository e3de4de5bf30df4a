"""The configs a user writes: `run.yaml` (what to train) and `cluster.yaml` (where).

from drillyard.config import load, run_checks
config = load.load_run_config("run.yaml", overrides=["training.steps=100"])
run_checks.require_valid(config, num_ranks=8)
"""
