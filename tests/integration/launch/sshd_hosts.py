"""Machines that are reached by ssh, on this one: real sshd on loopback ports with keys of their
own.

Each has its own processes, HOME and host name (namespaces of Linux, which take root), and its own
view of one directory, `private`, which is there under the same path on both and not shared;
everything else is shared storage. Every process that a host starts carries its mark in the
environment, so `processes` sees all that is left there.

`hosts_on_a_network`: each has an interface of its own, eth0, on a switch that connects them, and
they know each other's names; only their sshd listen on loopback.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from drillyard.supervise.sockets import free_port

_MARK = "DRILLYARD_TEST_HOST"
_SSHD = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin") or "/usr/sbin/sshd"


@dataclass
class SshHost:
    """One of the machines."""

    name: str
    directory: Path
    port: int
    private: Path
    namespace: str | None = None
    """Of its network; None: this machine's."""
    address: str = "127.0.0.1"
    _machine: subprocess.Popen[bytes] | None = field(default=None, repr=False)
    _server: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def home(self) -> Path:
        """HOME of what runs there."""
        return self.directory / "home"

    @property
    def mark(self) -> bytes:
        """What the environment of its processes holds."""
        return f"{_MARK}={self.directory}".encode()

    def power_on(self) -> None:
        """Have it there, with its server."""
        # Namespaces of its own for processes, mounts and the host's name. Its first process adopts
        # and reaps what its parents leave, and all end with it.
        names = self.directory.parent / "hosts"
        size = "-o size=64m" if self.namespace else ""
        inside = (
            f"mount --bind '{self.directory}/private' '{self.private}' && mount -t tmpfs"
            f" {size} shm /dev/shm && hostname {self.name}"
            + (f" && mount --bind '{names}' /etc/hosts" if self.namespace else "")
            + " && echo up && sleep infinity & wait"
        )
        unshare = ["unshare", "--mount", "--uts", "--pid", "--fork", "--mount-proc", "--kill-child"]
        self._machine = subprocess.Popen([*unshare, "sh", "-c", inside], stdout=subprocess.PIPE)
        assert self._machine.stdout is not None
        assert self._machine.stdout.readline() == b"up\n"
        self.plug_in()

    def power_off(self) -> None:
        """Have it gone, with all that runs there."""
        self.unplug()
        if self._machine is not None:
            self._machine.kill()
            self._machine.communicate()
            self._machine = None

    def plug_in(self) -> None:
        """Have it answer."""
        assert self._machine is not None
        (first,) = _children(self._machine.pid)
        enter = ["nsenter", "--target", str(first), "--mount", "--uts", "--pid", "--"]
        with (self.directory / "sshd.log").open("ab") as log:
            self._server = subprocess.Popen(
                [*enter, _SSHD, "-D", "-e", "-f", str(self.directory / "sshd_config")], stderr=log
            )
        _wait_for_port(self.port)

    def unplug(self) -> None:
        """Have it gone from the network; what runs there goes on."""
        if self._server is not None:
            servers = _children(self._server.pid)
            for process in [*servers, *self._sessions()]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            self._server.wait()
            self._server = None

    def run(self, *words: str) -> str:
        """The output of a program of this machine in the host's namespaces, which must succeed."""
        assert self._machine is not None
        (first,) = _children(self._machine.pid)
        enter = ["nsenter", "--target", str(first), "--mount", "--uts", "--pid"]
        network = [f"--net=/run/netns/{self.namespace}"] if self.namespace else []
        command = [*enter, *network, "--", *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    def cut_connections(self) -> None:
        """End every session, as a network that breaks for a moment; the server goes on to
        listen."""
        for session in self._sessions():
            with contextlib.suppress(ProcessLookupError):
                os.kill(session, signal.SIGKILL)

    def _sessions(self) -> list[int]:
        servers = _children(self._server.pid) if self._server is not None else []
        sessions = [session for server in servers for session in _children(server)]
        return [
            *sessions,
            *(
                below
                for session in sessions
                for below in _children(session)
                if _name(below) == "sshd"
            ),
        ]

    def processes(self) -> dict[int, str]:
        """The processes that were started there and still are, as pid -> command line; sessions of
        sshd left out."""
        found = {}
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                state = (process / "stat").read_text().rpartition(")")[2].split()[0]
                if state != "Z" and self.mark in (process / "environ").read_bytes().split(b"\0"):
                    words = (process / "cmdline").read_bytes().split(b"\0")
                    found[int(process.name)] = b" ".join(words).decode(errors="replace").strip()
        return found


@dataclass
class SshHosts:
    """Both machines and how they are reached."""

    directory: Path
    config_file: Path
    hosts: tuple[SshHost, ...]

    @property
    def names(self) -> list[str]:
        """For `ssh.hosts`."""
        return [host.name for host in self.hosts]

    @property
    def private(self) -> Path:
        """A directory that each host has for itself."""
        return self.hosts[0].private

    def processes(self) -> dict[int, str]:
        """What runs on either."""
        return {pid: command for host in self.hosts for pid, command in host.processes().items()}

    def nothing_left(self, seconds: float = 20.0) -> bool:
        """Whether nothing runs on either, at once or soon: the last session's shell may still be on
        its way out."""
        deadline = time.monotonic() + seconds
        while self.processes() and time.monotonic() < deadline:
            time.sleep(0.1)
        return not self.processes()

    def close_connections(self) -> None:
        """End the shared connections of this machine, so that the next command opens a new
        connection."""
        for host in self.hosts:
            host.cut_connections()


@contextlib.contextmanager
def two_hosts(directory: Path, names: Sequence[str] = ("h0", "h1")) -> Iterator[SshHosts]:
    """Two hosts, called h0 and h1 or by `names`, for as long as the context lasts; whatever was
    left running there is ended."""
    with _powered_on(directory, [(name, None, "127.0.0.1") for name in names]) as both:
        yield both


@contextlib.contextmanager
def hosts_on_a_network(directory: Path, count: int = 2) -> Iterator[SshHosts]:
    """Hosts h0, h1, ... with a network of their own, for as long as the context lasts."""
    prefix = f"dy{os.getpid()}"
    switch, namespaces = f"{prefix}s", [f"{prefix}h{number}" for number in range(count)]
    addresses = [f"10.99.0.{number + 1}" for number in range(count)]
    places = [(f"h{number}", namespaces[number], addresses[number]) for number in range(count)]
    directory.mkdir(parents=True, exist_ok=True)
    known = [f"{address} {name}" for name, _, address in places]
    (directory / "hosts").write_text("\n".join(["127.0.0.1 localhost", *known]) + "\n")
    try:
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", switch, "link", "set", "br0", "up")
        for number, namespace in enumerate(namespaces):
            port = f"port{number}"
            _ip("netns", "add", namespace)
            pair = ["type", "veth", "peer", "name", port, "netns", switch]
            _ip("link", "add", "eth0", "netns", namespace, *pair)
            _ip("-n", switch, "link", "set", port, "master", "br0", "up")
            _ip("-n", namespace, "addr", "add", f"{addresses[number]}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _ip("-n", namespace, "link", "set", device, "up")
        with _powered_on(directory, places) as hosts:
            yield hosts
    finally:
        for namespace in (*namespaces, switch):
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@contextlib.contextmanager
def _powered_on(
    directory: Path, places: Sequence[tuple[str, str | None, str]]
) -> Iterator[SshHosts]:
    """Hosts by name, network namespace and address."""
    directory.mkdir(parents=True, exist_ok=True)
    # sshd refuses to start without the directory of its privilege separation.
    Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    key = _key(directory / "user_key")
    private = directory / "private"
    private.mkdir()
    taken: set[int] = set()
    hosts = []
    for name, namespace, address in places:
        host = SshHost(name, directory / name, free_port(taken), private, namespace, address)
        _prepare(host, key)
        hosts.append(host)
    config = directory / "ssh_config"
    config.write_text(
        "".join(_client_lines(host, key, directory) for host in hosts), encoding="utf-8"
    )
    config.chmod(0o600)
    all_hosts = SshHosts(directory, config, tuple(hosts))
    try:
        for host in hosts:
            host.power_on()
        yield all_hosts
    finally:
        for host in hosts:
            host.power_off()


def _prepare(host: SshHost, key: Path) -> None:
    """Write what the host's sshd needs."""
    directory = host.directory
    for each in (host.home / "bin", directory / "private"):
        each.mkdir(parents=True)
    authorized = directory / "authorized_keys"
    authorized.write_text(key.with_suffix(".pub").read_text())
    host_key = _key(directory / "host_key")
    lines = [
        f"Port {host.port}",
        "ListenAddress 127.0.0.1",
        f"HostKey {host_key}",
        f"PidFile {directory}/sshd.pid",
        f"AuthorizedKeysFile {authorized}",
        "PasswordAuthentication no",
        "PermitRootLogin yes",
        "StrictModes no",
        "UsePAM no",
        "MaxStartups 400",
        "MaxSessions 100",
        f"SetEnv HOME={host.home} {_MARK}={directory} PATH={host.home}/bin:{os.environ['PATH']}",
    ]
    if host.namespace is not None:
        enter = f"exec nsenter --net=/run/netns/{host.namespace} --"
        lines.append(f'ForceCommand {enter} sh -c "$SSH_ORIGINAL_COMMAND"')
    (directory / "sshd_config").write_text("\n".join(lines) + "\n")


def _client_lines(host: SshHost, key: Path, directory: Path) -> str:
    return f"""\
Host {host.name} {host.name}-*
    HostName 127.0.0.1
    HostKeyAlias {host.name}
    Port {host.port}
    IdentityFile {key}
    IdentitiesOnly yes
    UserKnownHostsFile {directory}/known_hosts
    StrictHostKeyChecking accept-new
"""


def _key(path: Path) -> Path:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True)
    return path


def _wait_for_port(port: int) -> None:
    deadline = time.monotonic() + 60
    listening = f":{port:04X} 00000000:0000 0A"
    while listening not in Path("/proc/net/tcp").read_text():
        assert time.monotonic() < deadline, f"no sshd listens on port {port}"
        time.sleep(0.01)


def _children(pid: int) -> list[int]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            rest = (process / "stat").read_text().rpartition(")")[2].split()
            if int(rest[1]) == pid and rest[0] != "Z":
                found.append(int(process.name))
    return found


def _name(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""
