"""A program between a follower and its leader that passes on what they say, and changes it when a
test wants that."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import sys
import threading
from collections.abc import Callable

TO_LEADER, TO_NODE = "to the leader", "to the node"
Change = Callable[[str, bytes], bytes]

_CLONE_NEWNET = 0x40000000
# A network namespace begins with its loopback device down: SIOCSIFFLAGS with IFF_UP.
_IN_OWN_NETWORK = (
    "import fcntl, os, socket, struct, sys; fcntl.ioctl(socket.socket(), 0x8914,"
    " struct.pack('16sH14x', b'lo', 1)); os.execv(sys.argv[1], sys.argv[1:])"
)


def in_own_network(argv: list[str]) -> list[str]:
    """`argv` in a network namespace of its own, where it may listen on any port; needs root."""
    return ["unshare", "--net", sys.executable, "-c", _IN_OWN_NETWORK, *argv]


class Relay(threading.Thread):
    """Listens on `port` of this network and relays to `leader_port`, in the network of process
    `leader` if given.

    `change` gets a direction and what is to be passed on, and returns what is.
    """

    def __init__(
        self, port: int, leader_port: int, change: Change, leader: int | None = None
    ) -> None:
        super().__init__(daemon=True)
        self._server = socket.create_server(("127.0.0.1", port))
        self._leader_port = leader_port
        self._change = change
        self._leader = leader
        self._open: list[socket.socket] = [self._server]

    def run(self) -> None:
        if self._leader is not None:
            # Of this thread only. Sockets stay in the network in which they were made.
            descriptor = os.open(f"/proc/{self._leader}/ns/net", os.O_RDONLY)
            assert ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET) == 0
            os.close(descriptor)
        with contextlib.suppress(OSError):
            while True:
                node = self._server.accept()[0]
                try:
                    leader = socket.create_connection(("127.0.0.1", self._leader_port))
                except OSError:
                    node.close()
                    continue
                self._open += [node, leader]
                for direction, source, target in (
                    (TO_LEADER, node, leader),
                    (TO_NODE, leader, node),
                ):
                    threading.Thread(
                        target=self._pass_on, args=(direction, source, target), daemon=True
                    ).start()

    def _pass_on(self, direction: str, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(self._change(direction, data))
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Cut everything."""
        for each in self._open:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
