"""Node side of an acceptance job: one program per node runs probes as node 0 directs, and node 0
writes what they found.

The files are shipped as source and run on the nodes' own Python: standard library only, nothing
newer than 3.9. Those named torch_*.py need PyTorch; where it is missing they say so.
"""


def main() -> int:
    """Run a verb of the node side; returns the exit code."""
    from .program import main

    return main()
