"""GPU clusters of Nebius on InfiniBand, on which runs are launched by ssh."""
