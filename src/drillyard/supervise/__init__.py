"""The ranks of one host: start, watch, restart, end; without torch.

`supervisor.supervise` runs any command as ranks, `supervise_training` a run config with it.
"""
