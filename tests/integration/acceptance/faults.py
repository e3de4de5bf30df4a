"""Faults of one node, given from outside of the code, and what must be found: the check that names
the cause, and those that must follow from it."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.integration.acceptance.places import Accepted, wrap_python
from tests.integration.launch.sshd_hosts import SshHost, SshHosts

NODE_PROGRAM, RANK = "/files/acceptance run", "/torch_"
FLIPPED = """\
import sys

if any("torch_" in word for word in sys.orig_argv):
    import torch

    plain, seen = torch.Tensor.__matmul__, [0]

    def matmul(left, right):
        found = plain(left, right)
        if found.is_floating_point() and found.numel():
            seen[0] += 1
            if seen[0] == {call}:
                found.view(-1)[:1].view(torch.int32).bitwise_xor_(1 << {bit})
        return found

    torch.Tensor.__matmul__ = matmul
"""
"""A processor that gives one wrong bit."""
SHIFTED = """\
import time

plain = time.time_ns


def time_ns():
    try:
        with open({file!r}) as file:
            return plain() + int(float(file.read()) * 1e9)
    except ValueError:
        return plain()


time.time_ns = time_ns
time.time = lambda: time_ns() / 1e9
"""
"""A clock that is not the others': libfaketime would also break the sleeps of Python 3.11."""


@dataclass(frozen=True)
class Fault:
    """A kind of fault. `causes`: checks of which one must come first; `follow`: those that may fail
    because of it. `names_node`: the node is proven to be at fault."""

    name: str
    causes: tuple[str, ...]
    give: Callable[[SshHosts, SshHost, random.Random], contextlib.AbstractContextManager[None]]
    follow: tuple[str, ...] = ()
    names_node: bool = True


def _pids(host: SshHost, words: str) -> list[int]:
    return [pid for pid, command in host.processes().items() if words in command]


@contextlib.contextmanager
def _thread(work: Callable[[threading.Event], None]) -> Iterator[None]:
    over = threading.Event()
    thread = threading.Thread(target=work, args=(over,))
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


@contextlib.contextmanager
def slowed_rank(hosts: SshHosts, host: SshHost, draw: random.Random) -> Iterator[None]:
    """Stop one rank for half of the time, in turns."""
    rank, pause = draw.randrange(2), draw.uniform(0.03, 0.08)

    def is_slow(pid: int) -> bool:
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            return f"LOCAL_RANK={rank}".encode() in words
        return False

    def work(over: threading.Event) -> None:
        while not over.is_set():
            slow = [pid for pid in _pids(host, RANK) if is_slow(pid)]
            deadline = time.monotonic() + 0.5
            while time.monotonic() < deadline and slow:
                for number in (signal.SIGSTOP, signal.SIGCONT):
                    for pid in slow:
                        _signal(pid, number)
                    time.sleep(pause)
            over.wait(0.05)

    with _thread(work):
        yield


@contextlib.contextmanager
def _wrapped(host: SshHost, lines: str) -> Iterator[None]:
    """The host's Python with these lines before it, for the node program and what it starts."""
    private = host.directory / "private"
    before = {path: path.read_text(encoding="utf-8") for path in private.glob("python*")}
    wrap_python(private, f'case "$1 $2" in *{NODE_PROGRAM.replace(" ", "*")}*)\n{lines}\n;; esac')
    try:
        yield
    finally:
        for path, text in before.items():
            path.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def _site(host: SshHost, text: str) -> Iterator[None]:
    """The host's Python runs this text first, in the node program and all that it starts."""
    directory = host.directory / "site"
    directory.mkdir(exist_ok=True)
    (directory / "sitecustomize.py").write_text(text)
    with _wrapped(host, f"export PYTHONPATH={directory}"):
        yield


@contextlib.contextmanager
def _other_clock(host: SshHost, seconds: float) -> Iterator[Path]:
    """The host's clock is so much ahead, as its Python sees it; the file that it is read from."""
    file = host.directory / "clock"
    file.write_text(str(seconds))
    with _site(host, SHIFTED.format(file=str(file))):
        yield file


@contextlib.contextmanager
def clock_off(hosts: SshHosts, host: SshHost, draw: random.Random) -> Iterator[None]:
    """The clock of one node is 2 s ahead or behind."""
    with _other_clock(host, draw.choice((-2.0, 2.0))):
        yield


@contextlib.contextmanager
def clock_steps_back(hosts: SshHosts, host: SshHost, draw: random.Random) -> Iterator[None]:
    """The clock of one node is set back while checks run."""
    seconds = draw.uniform(0.5, 3.0)
    with _other_clock(host, 0.0) as file:

        def work(over: threading.Event) -> None:
            while not over.is_set() and not _pids(host, RANK):
                over.wait(0.1)
            over.wait(1.0)
            file.write_text(str(-seconds))

        with _thread(work):
            yield


@contextlib.contextmanager
def small_mtu(hosts: SshHosts, host: SshHost, draw: random.Random) -> Iterator[None]:
    """The link of one node takes smaller packets only."""
    host.run("ip", "link", "set", "eth0", "mtu", str(draw.randrange(700, 1400)))
    try:
        yield
    finally:
        host.run("ip", "link", "set", "eth0", "mtu", "1500")


@contextlib.contextmanager
def slow_link(hosts: SshHosts, host: SshHost, draw: random.Random) -> Iterator[None]:
    """The link of one node is slow, outwards."""
    rate = f"{draw.randrange(100, 300)}mbit"
    limit = ["root", "tbf", "rate", rate, "burst", "64k", "latency", "50ms"]
    host.run("tc", "qdisc", "add", "dev", "eth0", *limit)
    try:
        yield
    finally:
        host.run("tc", "qdisc", "del", "dev", "eth0", "root")


@contextlib.contextmanager
def flipped_bit(hosts: SshHosts, host: SshHost, draw: random.Random) -> Iterator[None]:
    """One value that one node computes has a wrong bit."""
    text = FLIPPED.format(call=draw.randrange(1, 4), bit=draw.randrange(0, 31))
    with _site(host, text):
        yield


@contextlib.contextmanager
def other_nccl_value(hosts: SshHosts, host: SshHost, draw: random.Random) -> Iterator[None]:
    """One node has another value of a variable of NCCL."""
    name, value = draw.choice(
        (("NCCL_ALGO", "Tree"), ("NCCL_IB_TC", "52"), ("NCCL_NTHREADS", "64"))
    )
    with _wrapped(host, f"export {name}={value}"):
        yield


@contextlib.contextmanager
def full_shared_memory(hosts: SshHosts, host: SshHost, draw: random.Random) -> Iterator[None]:
    """/dev/shm of one node is full."""
    host.run(
        "sh", "-c", "head -c 60M /dev/zero >/dev/shm/left; cat /dev/zero >>/dev/shm/left || true"
    )
    try:
        yield
    finally:
        host.run("rm", "-f", "/dev/shm/left")


@contextlib.contextmanager
def stopped_node(hosts: SshHosts, host: SshHost, draw: random.Random) -> Iterator[None]:
    """A node's program and all that it started stop for good, once checks run."""
    stopped: set[int] = set()
    wait = draw.uniform(0.0, 3.0)

    def work(over: threading.Event) -> None:
        while not over.is_set() and not _pids(host, RANK):
            over.wait(0.1)
        over.wait(wait)
        for pid in [*_pids(host, NODE_PROGRAM), *_pids(host, RANK)]:
            stopped.add(pid)
            _signal(pid, signal.SIGSTOP)

    with _thread(work):
        yield
    for pid in stopped:
        _signal(pid, signal.SIGKILL)


RANKS_TOGETHER = (
    *("collectives-node", "collectives-pairs", "slow-pairs", "collectives-all"),
    *("training-speed", "training-scaling", "bandwidth-scaling", "jitter"),
)
"""What a rank or a link that is slow slows."""
SPEEDS = (
    *("matmul", "memory-bandwidth", "host-device", "stragglers", "tcp-bandwidth", "storage"),
    *RANKS_TOGETHER,
)
"""What other work on this machine may slow."""
FAULTS = (
    Fault(
        "a slowed rank",
        ("stragglers",),
        slowed_rank,
        ("matmul", "memory-bandwidth", "host-device", *RANKS_TOGETHER),
    ),
    Fault("a clock 2 s off", ("clock",), clock_off),
    Fault("a clock that steps back", ("clock",), clock_steps_back),
    Fault("a small MTU", ("path-mtu",), small_mtu),
    Fault("a slow link", ("tcp-bandwidth",), slow_link, RANKS_TOGETHER),
    Fault("a flipped bit", ("bit-equality",), flipped_bit),
    # Of two nodes that differ none is proven to be the wrong one.
    Fault("another NCCL value", ("environment",), other_nccl_value, names_node=False),
    Fault("a full /dev/shm", ("host-limits",), full_shared_memory),
    Fault("a node stopped for good", ("connection", "join", "job"), stopped_node, ("*",)),
)
BY_NAME = {fault.name: fault for fault in FAULTS}


def judged(fault: Fault, node: str, found: Accepted) -> list[str]:
    """What is wrong with what was found of a fault of `node`; empty: nothing."""
    problems = []
    if found.code == 0:
        problems.append("it was not found")
    elif found.failed[:1] and found.failed[0] not in fault.causes:
        problems.append(f"{found.failed[0]} comes first")
    if others := [each for each in found.culprits if each != node]:
        problems.append(f"{', '.join(others)} is blamed")
    if fault.names_node and found.code != 0 and node not in found.culprits:
        problems.append(f"{node} is not blamed")
    known = {*fault.causes, *fault.follow}
    if "*" not in known and (more := [each for each in found.failed if each not in known]):
        problems.append(f"also failed: {', '.join(more)}")
    return problems
