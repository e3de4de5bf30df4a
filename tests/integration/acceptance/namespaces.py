"""A network of nodes on this machine: one network namespace per node, joined by a bridge in one
more. Nothing of it is in the machine's own namespace."""

from __future__ import annotations

import os
import subprocess
from itertools import count

_NUMBERS = count()


class NodeNetwork:
    """`nodes` hosts at 10.77.0.1 and up, each with its eth0."""

    def __init__(self, nodes: int) -> None:
        self._name = f"dy{os.getpid()}n{next(_NUMBERS)}"
        self._made: list[str] = []
        self._switch = f"{self._name}s"
        self._add(self._switch)
        run("ip", "-n", self._switch, "link", "add", "br0", "type", "bridge")
        run("ip", "-n", self._switch, "link", "set", "br0", "up")
        for rank in range(nodes):
            host = self.host(rank)
            self._add(host)
            ends = [f"port{rank}", "netns", self._switch, "type", "veth"]
            run("ip", "link", "add", *ends, "peer", "name", "eth0", "netns", host)
            for place, link in ((self._switch, f"port{rank}"), (host, "eth0"), (host, "lo")):
                run("ip", "-n", place, "link", "set", link, "up")
            run("ip", "-n", self._switch, "link", "set", f"port{rank}", "master", "br0")
            run("ip", "-n", host, "addr", "add", f"{self.address(rank)}/24", "dev", "eth0")

    def host(self, rank: int) -> str:
        """The namespace of a node."""
        return f"{self._name}h{rank}"

    def address(self, rank: int) -> str:
        return f"10.77.0.{rank + 1}"

    def prefixes(self) -> dict[int, list[str]]:
        """What runs a command on each node."""
        return {
            rank: ["ip", "netns", "exec", self.host(rank)] for rank in range(len(self._made) - 1)
        }

    def on_node(self, rank: int, *command: str) -> None:
        """Run a command on a node."""
        run("ip", "netns", "exec", self.host(rank), *command)

    def on_switch(self, *command: str) -> None:
        """Run a command where the other ends of the nodes' links are: port0, port1, ..."""
        run("ip", "netns", "exec", self._switch, *command)

    def remove(self) -> None:
        for name in reversed(self._made):
            subprocess.run(["ip", "netns", "del", name], check=False)

    def _add(self, name: str) -> None:
        run("ip", "netns", "add", name)
        self._made.append(name)


def run(*command: str) -> None:
    """Run a command that must succeed."""
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, f"{command}: {ended.stderr}"
