"""The ranks of one host: start, watch, restart, end; without torch.

`supervisor.supervise` runs any command as ranks, `training_supervisor.supervise_training` a run config with it.
"""
