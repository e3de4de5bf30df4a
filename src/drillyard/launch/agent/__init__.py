"""A launched run's part on the nodes: one agent per node, which starts the command there and follows the leader's.

The agent travels as source files and runs on the nodes' own Python: standard library only, nothing newer than 3.9.
"""
