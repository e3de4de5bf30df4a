"""Launches runs: a launcher makes a plan of a run and a cluster, and submits it; agents start and
restart the ranks."""
