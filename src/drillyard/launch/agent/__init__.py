"""Node side of a launched run: one agent per node, which starts the command there as the leader's
agent directs.

The agent is shipped as source files and runs on the nodes' own Python: standard library only,
nothing newer than 3.9.
"""


def main() -> int:
    """Run the agent's command line; returns the exit code."""
    from .cli import main

    return main()
