"""Places on which `drillyard accept` runs two nodes of two ranks each: hosts by ssh, Slurm, pods;
and what it found there."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from tests.integration.kubernetes.team import Team
from tests.integration.launch.desk import Desk
from tests.integration.launch.slurm_cluster import SlurmCluster
from tests.integration.launch.sshd_hosts import SshHosts

RANKS_PER_NODE = 2
WRAPPER = """\
#!/bin/sh
# The node's Python; a test may put lines before its last one.
{lines}
exec {python} "$@"
"""
FORKING = f"""\
case "$1 $2" in
    */files/acceptance" run") set -- {Path(__file__).with_name("forking_node.py")} "$@" ;;
esac
"""
"""Lines of a wrapper: the node side forks its probes."""


@dataclass(frozen=True)
class Accepted:
    """What `drillyard accept` printed and wrote."""

    code: int
    output: str
    document: dict[str, Any]

    @property
    def evidence(self) -> dict[str, Any]:
        found: dict[str, Any] = self.document["evidence"]
        return found

    @property
    def culprits(self) -> list[str]:
        """Names of the nodes that are blamed, the clearest case first."""
        return [each["name"] for each in self.document["culprits"]]

    @property
    def results(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.document["results"]
        return found

    @property
    def failed(self) -> list[str]:
        """Checks with a result that is neither good nor without meaning, in order."""
        bad = [each["check"] for each in self.results if each["status"] in ("fail", "incomplete")]
        return list(dict.fromkeys(bad))

    @property
    def form(self) -> list[tuple[str, str, tuple[int, ...], str]]:
        """The results without times, figures and names: the same on every place.

        That of `names` is left out: nodes of Slurm on one machine share its name.
        """
        return sorted(
            (each["check"], each["metric"], tuple(each["ranks"]), each["status"])
            for each in self.results
            if each["check"] != "names"
        )


class Place:
    """A place: how a command of drillyard is given there."""

    def __init__(
        self,
        directory: Path,
        give: Callable[..., subprocess.CompletedProcess[str]],
        desk: Desk | None = None,
    ) -> None:
        self.directory, self._give, self._desk = directory, give, desk

    @property
    def desk(self) -> Desk:
        """The user, where one sits there."""
        assert self._desk is not None
        return self._desk

    def accept(self, *options: object) -> Accepted:
        """Accept this place's cluster."""
        file = self.directory / "acceptance.json"
        file.unlink(missing_ok=True)
        given = self._give("accept", "cluster.yaml", "--output", file, *options)
        output = given.stdout + given.stderr
        assert file.exists(), output
        return Accepted(given.returncode, output, json.loads(file.read_text(encoding="utf-8")))


def ssh_place(
    hosts: SshHosts, directory: Path, order: tuple[int, ...] = (0, 1), lines: str = ""
) -> Place:
    """The hosts, in this order of ranks. Their Python is a script that each has for itself, with
    these lines, FORKING for example."""
    for host in hosts.hosts:
        wrap_python(host.directory / "private", lines)
        # A shim of pyenv would put its own directories first on the agent's PATH.
        wrap_python(host.home / "bin")
    ssh = {
        "hosts": [hosts.names[number] for number in order],
        "config_file": str(hosts.config_file),
        "rendezvous_host": hosts.hosts[order[0]].address,
    }
    cluster = {
        "name": "pair",
        "platform": "ssh",
        "nodes": len(order),
        "processes_per_node": RANKS_PER_NODE,
        "python": str(hosts.private / "python"),
        "ssh": ssh,
    }
    desk = Desk(directory, cluster)
    return Place(directory, desk.say, desk)


def wrap_python(directory: Path, lines: str = "") -> None:
    """Write `python` and `python3` into a directory: this Python, after the lines of a shell
    script."""
    for name in ("python", "python3"):
        path = directory / name
        path.write_text(WRAPPER.format(lines=lines, python=sys.executable), encoding="utf-8")
        path.chmod(0o755)


def forking_python(directory: Path) -> str:
    """A Python beside a directory with which the node side of an acceptance job forks its
    probes."""
    private = directory.with_name(f"{directory.name}-private")
    private.mkdir(parents=True)
    wrap_python(private, FORKING)
    return str(private / "python")


def slurm_place(
    cluster: SlurmCluster,
    directory: Path,
    nodes: int = 2,
    ranks: int = RANKS_PER_NODE,
    exclude: Sequence[str] = (),
    **more: object,
) -> Place:
    """Nodes of a Slurm cluster, which fork the probes."""
    private = Path(forking_python(directory)).parent
    settings = {
        "name": "quad",
        "platform": "slurm",
        "nodes": nodes,
        "processes_per_node": ranks,
        "python": sys.executable,
        "slurm": {"partition": "main", "exclude": list(exclude)},
    }
    desk = Desk(directory, settings | more)
    desk.environment["SLURM_CONF"] = cluster.environment["SLURM_CONF"]
    # The job has the PATH of who submits it.
    desk.environment["PATH"] = f"{private}:{desk.environment['PATH']}"
    return Place(directory, desk.say, desk)


def kubernetes_place(team: Team) -> Place:
    """Pods of a team."""
    path = team.cluster_config()
    config = yaml.safe_load(path.read_text(encoding="utf-8"))
    path.write_text(yaml.safe_dump(config | {"processes_per_node": RANKS_PER_NODE}))

    def say(*arguments: object) -> subprocess.CompletedProcess[str]:
        return team.drillyard(*arguments, check=False)

    return Place(team.directory, say)
