"""From a cluster config to a cluster, and back to nothing."""
