"""A real Slurm cluster on this machine: munged, slurmctld and four slurmd with eight made-up GPUs
each.

`.ci/tools/packages` installs Debian's packages. Everything lives in one directory and ends with
`stop`; other Slurms of the machine are not touched. It needs root: the daemons start processes as
other users, and the GPUs are device nodes. Jobs that are queued again wait for their credential to
expire (120 s by default), so that is set to the least here.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shlex
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.integration.waiting import until

NODES = ("n1", "n2", "n3", "n4")
GPUS_PER_NODE = 8
TIMEOUT_SECONDS = 480
_SLURMD_TIMEOUT_SECONDS = 10


class SlurmCluster:
    """Daemons in `directory`. `environment` makes a command speak to them."""

    nodes: tuple[str, ...] = NODES
    partition = "main"

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.munge = directory / "munge"
        self._user = pwd.getpwuid(os.getuid()).pw_name
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._changed: list[str] = []
        # A job that requeues itself calls scontrol, so SLURM_CONF is in the daemons' environment as
        # well.
        self.environment = os.environ | {"SLURM_CONF": str(directory / "slurm.conf")}
        # Where Debian has the daemons, which a user's PATH may leave out.
        self.environment["PATH"] = f"{os.environ['PATH']}:/usr/sbin"

    def start(self) -> None:
        """Start all daemons and wait until every node is idle."""
        self._lay_out()
        command = ["munged", "--foreground", "--key-file", str(self.munge / "key")]
        for option in ("socket", "pid-file", "seed-file"):
            command += [f"--{option}", str(self.munge / option)]
        self.start_daemon("munged", command, user="munge")
        until(
            lambda: (self.munge / "socket").exists(),
            f"munged does not start; its log is {self._log('munged')}",
        )
        self.start_services()
        self.start_daemon(
            "slurmctld", ["slurmctld", "-D", "-i", "-f", self.environment["SLURM_CONF"]]
        )
        for node in self.nodes:
            self.start_node(node)
        self._until_idle()

    def start_services(self) -> None:
        """Start what slurmctld needs besides munged."""

    def start_node(self, node: str, otherwise: str = "") -> None:
        """Start a node's slurmd; `otherwise`: a shell command that makes what the node sees another
        thing than what this machine sees, in a mount namespace of its own."""
        command = ["slurmd", "-D", "-N", node, "-f", self.environment["SLURM_CONF"]]
        if otherwise:
            slurmd = shutil.which("slurmd", path=self.environment["PATH"])
            script = f'{{ {otherwise}; }} && exec "$@"'
            command = ["unshare", "--mount", "sh", "-c", script, "sh", str(slurmd), *command[1:]]
            self._changed.append(node)
        self.start_daemon(node, command)

    def change(self, node: str, otherwise: str) -> None:
        """Have an idle node see something else, as `start_node` says."""
        self.kill_node(node)
        self.start_node(node, otherwise)
        until(lambda: self.states().get(node) == "idle", f"{node} does not come back")

    def unmount(self, node: str, directory: Path) -> None:
        """Take a directory away from an idle node."""
        self.change(node, f"mount -t tmpfs none {shlex.quote(str(directory))}")

    def kill_agent(self, node: str) -> None:
        """SIGKILL to the agent on a node."""
        here = self.processes(f"SLURMD_NODENAME={node}")
        agents = [
            pid
            for pid, said in here.items()
            if "/agent run " in said and not said.startswith("srun ")
        ]
        assert len(agents) == 1, agents
        os.kill(agents[0], signal.SIGKILL)

    def kill_node(self, node: str) -> None:
        """SIGKILL to a node's slurmd alone: what runs on the node goes on, and nobody hears of it
        any more."""
        self._daemons[node].kill()
        self._daemons.pop(node).wait()

    def stop_controller(self) -> None:
        """End slurmctld in order: killed, it would come back with a state in which the newest job
        has not begun."""
        self._daemons["slurmctld"].terminate()
        self._daemons.pop("slurmctld").wait()

    def start_controller(self) -> None:
        """slurmctld with the state that it left."""
        self.start_daemon("slurmctld", ["slurmctld", "-D", "-f", self.environment["SLURM_CONF"]])
        until(
            lambda: self.run("squeue", check=False).returncode == 0, "slurmctld does not come back"
        )

    def run(self, *command: object, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a command that speaks to this cluster."""
        words = [str(word) for word in command]
        return subprocess.run(
            words,
            capture_output=True,
            text=True,
            env=self.environment,
            timeout=TIMEOUT_SECONDS,
            check=check,
        )

    def states(self) -> dict[str, str]:
        """The nodes' states, as sinfo has them."""
        listed = self.run(
            "sinfo", "-h", "-N", "-p", self.partition, "-o", "%N %t", check=False
        ).stdout.split("\n")
        return dict(line.split() for line in listed if line.strip())

    def job(self, job_id: str, field: str = "%T") -> str:
        """A field of a job by squeue's letter; empty once Slurm has forgotten it."""
        done = self.run(
            "squeue", "-h", "-a", "--states=all", "-j", job_id, "-o", field, check=False
        )
        return done.stdout.strip()

    def elapsed_seconds(self, job_id: str) -> int:
        """How long a job's newest start has run."""
        done = self.run("squeue", "-h", "-j", job_id, "-O", "TimeUsed")
        *days, clock = done.stdout.strip().split("-")
        hours, minutes, seconds = [0, *map(int, clock.split(":"))][-3:]
        return ((int(days[0]) if days else 0) * 24 + hours) * 3600 + minutes * 60 + seconds

    def processes(self, word: str) -> dict[int, str]:
        """The jobs' processes that have `word` in their command line or environment."""
        found = {}
        for pid in self.left():
            with contextlib.suppress(OSError):
                command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
                if word.encode() in command + Path(f"/proc/{pid}/environ").read_bytes():
                    found[pid] = command.decode()
        return found

    def reset(self) -> None:
        """End all jobs and bring all daemons back: the next test finds the cluster as new."""
        if "slurmctld" not in self._daemons:
            self.start_controller()
        self.run("scancel", "--user", self._user, check=False)
        while self._changed:
            self.kill_node(self._changed.pop())
        for node in self.nodes:
            if node not in self._daemons:
                self.start_node(node)
        self._until_idle()

    def stop(self) -> None:
        """End every daemon and every process of a job that is left."""
        self.run("scancel", "--signal=KILL", "--user", self._user, check=False)
        while self._daemons:
            # The last one first: others are of use to it.
            _, daemon = self._daemons.popitem()
            daemon.kill()
            daemon.wait()
        self._kill_left()

    def left(self) -> list[int]:
        """Processes that were started by this cluster: those that have its configuration in their
        environment."""
        mark = f"SLURM_CONF={self.environment['SLURM_CONF']}".encode()
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if (
                    mark in (process / "environ").read_bytes().split(b"\0")
                    and int(process.name) != os.getpid()
                ):
                    found.append(int(process.name))
        return found

    def _until_idle(self) -> None:
        until(
            lambda: self.states() == dict.fromkeys(self.nodes, "idle"),
            f"nodes are not idle: {self.states()}",
        )

    def _kill_left(self) -> None:
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while left := [pid for pid in self.left() if not _is_zombie(pid)]:
            assert time.monotonic() < deadline, f"processes of the cluster do not end: {left}"
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)

    def start_daemon(self, name: str, command: list[str], user: str | None = None) -> None:
        """Start a daemon that ends with the cluster."""
        account = pwd.getpwnam(user) if user else None
        with self._log(name).open("ab") as log:
            self._daemons[name] = subprocess.Popen(
                [
                    shutil.which(command[0], path=self.environment["PATH"]) or command[0],
                    *command[1:],
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.environment,
                user=account.pw_uid if account else None,
                group=account.pw_gid if account else None,
                extra_groups=[] if account else None,
            )

    def _log(self, name: str) -> Path:
        return self.directory / f"{name}.log"

    def _lay_out(self) -> None:
        munge = pwd.getpwnam("munge")
        self.munge.mkdir(parents=True)
        (self.munge / "key").write_bytes(os.urandom(128))
        (self.munge / "key").chmod(0o400)
        for path in (self.munge, self.munge / "key"):
            os.chown(path, munge.pw_uid, munge.pw_gid)
        (self.directory / "state").mkdir()
        for node in self.nodes:
            (self.directory / f"spool-{node}").mkdir()
            for gpu in range(GPUS_PER_NODE):
                # Numbers for local use: Slurm wants a device node behind every GPU, and opens none.
                os.mknod(self.directory / f"{node}-gpu{gpu}", 0o020666, os.makedev(240, gpu))
        gres = [
            f"NodeName={n} Name=gpu File={self.directory}/{n}-gpu[0-{GPUS_PER_NODE - 1}]"
            for n in self.nodes
        ]
        (self.directory / "gres.conf").write_text("\n".join(gres) + "\n")
        (self.directory / "slurm.conf").write_text(self.configuration())

    def configuration(self) -> str:
        """slurm.conf."""
        controller, *ports = free_ports(1 + len(self.nodes))
        here = self.directory
        lines = [
            "ClusterName=drillyard-test",
            f"SlurmctldHost={socket.gethostname()}(127.0.0.1)",
            "SlurmUser=root",
            f"SlurmctldPort={controller}",
            "AuthType=auth/munge",
            "CredType=cred/munge",
            f"AuthInfo=socket={self.munge}/socket,cred_expire=5",
            f"StateSaveLocation={here}/state",
            f"SlurmdSpoolDir={here}/spool-%n",
            f"SlurmctldPidFile={here}/slurmctld.pid",
            f"SlurmdPidFile={here}/slurmd-%n.pid",
            "ProctrackType=proctrack/linuxproc",
            "TaskPlugin=task/none",
            "SelectType=select/cons_tres",
            "SelectTypeParameters=CR_Core",
            "MpiDefault=none",
            "PreemptType=preempt/partition_prio",
            "PreemptMode=CANCEL",
            "ReturnToService=2",
            f"SlurmdTimeout={_SLURMD_TIMEOUT_SECONDS}",
            "MessageTimeout=5",
            "KillWait=30",
            "MinJobAge=300",
            "SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1,sched_min_interval=100000",
            "JobAcctGatherType=jobacct_gather/none",
            "AccountingStorageType=accounting_storage/none",
            "GresTypes=gpu",
        ]
        lines += self.node_lines(ports)
        nodes = ",".join(self.nodes)
        lines.append(
            f"PartitionName=main Nodes={nodes} Default=YES MaxTime=60 PriorityTier=1"
            " PreemptMode=CANCEL"
        )
        lines.append(f"PartitionName=urgent Nodes={nodes} MaxTime=60 PriorityTier=9")
        return "\n".join(lines) + "\n"

    def node_lines(self, ports: Sequence[int]) -> Iterator[str]:
        """What slurm.conf says of the nodes: all are this machine."""
        facts = f"CPUs={os.cpu_count() or 1} RealMemory=2000 Gres=gpu:{GPUS_PER_NODE}"
        place = f"NodeHostname={socket.gethostname()} NodeAddr=127.0.0.1"
        for node, port in zip(self.nodes, ports, strict=True):
            yield f"NodeName={node} {place} Port={port} {facts}"


@contextlib.contextmanager
def slurm_cluster(make: Callable[[Path], Any] = SlurmCluster) -> Iterator[Any]:
    """A running cluster, a SlurmCluster, and nothing of it afterwards."""
    # Below the system's directory for temporary files: munge wants a socket whose parents everyone
    # may enter.
    directory = Path(tempfile.mkdtemp(prefix="drillyard-slurm-"))
    directory.chmod(0o755)
    cluster = make(directory)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
        shutil.rmtree(directory)


def free_ports(count: int) -> list[int]:
    """Ports of TCP that nobody listens on."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True
