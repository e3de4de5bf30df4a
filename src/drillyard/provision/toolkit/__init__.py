"""Slurm clusters on Google Cloud, made by Google's Cluster Toolkit from a blueprint."""
