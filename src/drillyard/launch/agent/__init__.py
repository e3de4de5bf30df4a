"""The agent: one per node of a launched run, the same on every launcher. Standard library only; it travels as files.

The agent of node 0 leads. See leader.py for the idea and contract.py for what happens after each round.
"""
