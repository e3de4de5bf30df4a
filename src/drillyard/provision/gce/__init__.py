"""Clusters of virtual machines of Compute Engine, on which runs are launched by ssh."""
