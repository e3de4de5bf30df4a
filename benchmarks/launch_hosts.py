"""How long the checks of hundreds of hosts by ssh take, before a run starts on them.

    python benchmarks/launch_hosts.py [--hosts 100] [--repeats 3]

Two real sshd on this machine (as the tests start them; root) play all hosts: each has a name and a
connection of its own, made through a tiny proxy command. Timed is what `launch` does: 64 at a time,
the agent's archive to each, its answer back, the answers judged; with new connections, and with
those that the last check left open. Both ends of all connections share this machine's cores, so a
real cluster is faster: the figure is an upper bound.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.integration.launch.sshd_hosts import SshHosts, two_hosts

from drillyard.launch.agent.job import Job
from drillyard.launch.hosts import host_facts
from drillyard.launch.hosts.host_agents import ask_all
from drillyard.launch.hosts.plan import _PROBE
from drillyard.launch.prepared_run import agent_files
from drillyard.plan_files import PlanFile
from drillyard.programs import Host, Programs, archive


def configured(hosts: SshHosts, count: int, directory: Path) -> Path:
    """An ssh configuration in which c0, c1, ... are the two hosts in turn."""
    lines = []
    for number in range(count):
        host = hosts.hosts[number % len(hosts.hosts)]
        proxy = f'bash -c "exec 3<>/dev/tcp/127.0.0.1/{host.port}; cat <&3 & exec cat >&3"'
        lines += [f"Host c{number}", f"    ProxyCommand {proxy}", f"    HostKeyAlias {host.name}"]
    lines += ["Host *", f"    IdentityFile {hosts.directory}/user_key", "    IdentitiesOnly yes"]
    lines += [
        f"    UserKnownHostsFile {hosts.directory}/known_hosts",
        "    StrictHostKeyChecking accept-new",
    ]
    path = directory / "many"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def look(config: Path, count: int, directory: str) -> float:
    """Seconds for one check of all hosts; all must pass."""
    sent = archive([*agent_files(), PlanFile("secret", "x", 0o600)])
    names = [f"c{number}" for number in range(count)]
    words = ["sh", "-c", _PROBE, "python3", "--directory", directory, "--runs"]
    argvs = [Host(name, config_file=str(config)).argv(words) for name in names]
    started = time.perf_counter()
    answers = ask_all(names, argvs, Programs(), stdin=sent, seconds=600)
    problems = host_facts.judge(
        answers, Job("r", "c", "ssh", count, 1, "/r", "/r/launch", [], port=20000)
    )
    seconds = time.perf_counter() - started
    if problems:
        sys.exit("\n".join(problems))
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    count = arguments.hosts
    with tempfile.TemporaryDirectory() as temporary, two_hosts(Path(temporary) / "hosts") as hosts:
        config = configured(hosts, count, Path(temporary))
        new, again = [], []
        for _ in range(arguments.repeats):
            new.append(look(config, count, temporary))
            again.append(look(config, count, temporary))
            hosts.close_connections()
        print(
            f"{count} hosts, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, median of"
            f" {arguments.repeats}:"
        )
        for what, seconds in (("new connections", new), ("connections open", again)):
            low, high = min(seconds), max(seconds)
            print(f"  {what:22} {statistics.median(seconds):6.1f} s  ({low:.1f} to {high:.1f})")


if __name__ == "__main__":
    main()
