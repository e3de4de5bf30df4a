"""Slurm: what `drillyard launch` writes for it, submits and asks it."""
