"""A Slurm of this machine that is configured as the blueprint of a plan configures it: its
slurm.conf, its prolog and epilog, slurmdbd on MariaDB, process tracking by cgroups.

What Cluster Toolkit's controller adds (cloud.conf, cgroup.conf, slurmdbd.conf) is written here as
its scripts write it (conf.py of schedmd-slurm-gcp-v6-controller), but that nodes are there from the
start. `HERE` has what differs on one machine, and why.

Cgroups: Slurm 22.05 takes those of version 1, in a directory of the cluster's own within each
controller. Where the machine has none (only version 2, whose plugin wants systemd), `lacks` says
so, and processes are tracked as in `slurm_cluster.py`.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import shlex
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.integration.launch.slurm_cluster import SlurmCluster, free_ports
from tests.integration.waiting import until
from tests.unit.provision.slurm_clusters import settings_of

from drillyard.provision.cluster_plan import ClusterPlan

_CGROUPS = Path("/sys/fs/cgroup")
_CONTROLLERS = ("cpuacct", "cpuset", "devices", "freezer", "memory")
CREDENTIAL_SECONDS = 5
_ACCOUNTS = "slurm_acct_db"


class MadeSlurm(SlurmCluster):
    """`plan`: of a cluster whose nodes are all there from the start. `programs`: a directory of
    stand-ins that prolog and epilog find first on PATH."""

    def __init__(self, directory: Path, plan: ClusterPlan, programs: Path) -> None:
        super().__init__(directory)
        self._plan, self._programs = plan, programs
        self._controller = settings_of(plan, "controller")
        partition = settings_of(plan, "partition")
        self.partition, self._partition_conf = (
            partition["partition_name"],
            partition["partition_conf"],
        )
        count = settings_of(plan, "nodes")["node_count_static"]
        # slurm-gcp's names: cluster, nodeset, number.
        self.nodes = tuple(f"{plan.name}-nodes-{number}" for number in range(count))
        self._cgroup = f"drillyard-{directory.name}"
        self.environment["MYSQL_UNIX_PORT"] = str(directory / "db.sock")

    @property
    def lacks(self) -> str:
        """What this machine lacks for process tracking by cgroups; empty: nothing."""
        missing = [each for each in _CONTROLLERS if not (_CGROUPS / each / "cgroup.procs").exists()]
        return f"no cgroup v1 controllers {', '.join(missing)}" if missing else ""

    def start_services(self) -> None:
        self._start_database()
        self.start_daemon("slurmdbd", ["slurmdbd", "-D"])
        until(
            lambda: self.run("sacctmgr", "-n", "show", "cluster", check=False).returncode == 0,
            "slurmdbd does not answer",
        )
        self.run("sacctmgr", "-i", "add", "cluster", self._plan.name)

    def in_cgroups(self) -> list[int]:
        """The processes in the cgroups of all jobs."""
        found = set()
        for controller in _CONTROLLERS:
            for path in (_CGROUPS / controller / self._cgroup).rglob("job_*/**/cgroup.procs"):
                with contextlib.suppress(OSError):
                    found |= {int(line) for line in path.read_text().split()}
        return sorted(found)

    def ends(self, job: str) -> list[str]:
        """How each start of a job ended, as sacct has it."""
        words = ("sacct", "-D", "-X", "-n", "-P", "-o", "State", "-j", job)
        return self.run(*words).stdout.splitlines()

    def stop(self) -> None:
        super().stop()
        for controller in _CONTROLLERS:
            _remove_cgroups(_CGROUPS / controller / self._cgroup)

    def configuration(self) -> str:
        controller, *ports = free_ports(1 + len(self.nodes))
        database_port = self._write_database_conf()
        self._write_cgroup_conf()
        self._write_scripts()
        (self.directory / "cloud.conf").write_text(
            "\n".join(self._cloud_conf(ports, database_port)) + "\n"
        )
        template = self._controller["slurm_conf_template"]
        text = template.format(
            name=self._plan.name,
            control_host=socket.gethostname(),
            control_addr="127.0.0.1",
            control_host_port=controller,
            # Debian's Slurm is older than auth/slurm.
            auth_key="munge",
            state_save=self.directory / "state",
            slurmlog=self.directory / "state",
            mpi_default="none",
            accounting_storage_host="localhost",
        )
        for key, value in self._here().items():
            text, count = re.subn(rf"^{key}=.*$", f"{key}={value}", text, flags=re.MULTILINE)
            assert count == 1, key
        return text.replace("include cloud.conf", f"include {self.directory}/cloud.conf")

    def _here(self) -> dict[str, str]:
        """Settings that differ on one machine."""
        here = {
            # Its own munged; a job that is queued again waits for so long.
            "AuthInfo": f"socket={self.munge}/socket,cred_expire={CREDENTIAL_SECONDS}",
            # Several nodes on one machine.
            "SlurmdSpoolDir": f"{self.directory}/spool-%n",
            "SlurmdPidFile": f"{self.directory}/slurmd-%n.pid",
            "SlurmctldPidFile": f"{self.directory}/state/slurmctld.pid",
        }
        if self.lacks:
            here |= {"ProctrackType": "proctrack/linuxproc", "TaskPlugin": "task/none"}
            here["JobAcctGatherType"] = "jobacct_gather/linux"
        return here

    def _cloud_conf(self, ports: list[int], database_port: int) -> Iterator[str]:
        parameters = self._controller["cloud_parameters"]
        yield f"PrologFlags={parameters['prolog_flags']}"
        yield f"Prolog={self.directory}/prolog.d/*"
        yield f"Epilog={self.directory}/epilog.d/*"
        yield "LaunchParameters=enable_nss_slurm,use_interactive_step"
        yield "SlurmctldParameters=cloud_dns,idle_on_node_suspend"
        yield "GresTypes=gpu"
        # So that tests are short: a loop each second, a lost node after ten.
        quick = ("batch_sched_delay=0", "sched_interval=1", "bf_interval=1")
        scheduler = [*parameters["scheduler_parameters"], *quick, "sched_min_interval=100000"]
        yield f"SchedulerParameters={','.join(scheduler)}"
        yield "SlurmdTimeout=10"
        yield "MinJobAge=2"
        yield f"AccountingStoragePort={database_port}"
        yield f"AccountingStoragePass={self.munge}/socket"
        yield from self.node_lines(ports)
        conf: dict[str, Any] = {"State": "UP", "DefMemPerCPU": 100, **self._partition_conf}
        words = " ".join(f"{key}={value}" for key, value in conf.items())
        yield f"PartitionName={self.partition} Nodes={','.join(self.nodes)} Default=YES {words}"

    def _write_scripts(self) -> None:
        """Prolog and epilog, which Slurm starts without PATH."""
        for kind in ("prolog", "epilog"):
            directory = self.directory / f"{kind}.d"
            directory.mkdir()
            for script in self._controller[f"{kind}_scripts"]:
                path = directory / script["filename"]
                first, rest = script["content"].split("\n", 1)
                found = f"export PATH={shlex.quote(str(self._programs))}:/usr/bin:/bin"
                path.write_text(f"{first}\n{found}\n{rest}")
                path.chmod(0o755)

    def _write_cgroup_conf(self) -> None:
        if self.lacks:
            return
        mounted = self.directory / "cgroup"
        mounted.mkdir()
        for controller in _CONTROLLERS:
            own = _CGROUPS / controller / self._cgroup
            own.mkdir()
            if controller == "cpuset":
                # A new one has no processors.
                for name in ("cpuset.cpus", "cpuset.mems"):
                    (own / name).write_text((own.parent / name).read_text())
            (mounted / controller).symlink_to(own)
        lines = [
            "CgroupPlugin=cgroup/v1",
            f"CgroupMountpoint={mounted}",
            *(f"Constrain{each}=yes" for each in ("Cores", "RamSpace", "Devices")),
            "ConstrainSwapSpace=no",
        ]
        (self.directory / "cgroup.conf").write_text("\n".join(lines) + "\n")

    def _write_database_conf(self) -> int:
        """Its port."""
        account = pwd.getpwnam("slurm")
        (port,) = free_ports(1)
        lines = [
            f"AuthType=auth/munge\nAuthInfo=socket={self.munge}/socket",
            f"DbdHost={socket.gethostname()}\nDbdAddr=127.0.0.1\nDbdPort={port}",
            f"SlurmUser=slurm\nPidFile={self.directory}/state/slurmdbd.pid",
            f"StorageType=accounting_storage/mysql\nStorageLoc={_ACCOUNTS}",
            "StorageHost=localhost\nStorageUser=slurm",
        ]
        conf = self.directory / "slurmdbd.conf"
        conf.write_text("\n".join(lines) + "\n")
        conf.chmod(0o600)
        key = self.directory / "state" / "jwt_hs256.key"
        key.write_bytes(os.urandom(32))
        key.chmod(0o600)
        for path in (conf, key, key.parent):
            os.chown(path, account.pw_uid, account.pw_gid)
        return port

    def _start_database(self) -> None:
        data, socket_file = self.directory / "db", self.environment["MYSQL_UNIX_PORT"]
        common = ["--no-defaults", "--user=root", f"--datadir={data}"]
        install = ["--auth-root-authentication-method=normal", "--skip-test-db"]
        subprocess.run(
            ["mariadb-install-db", *common, *install, "--innodb-log-file-size=8M"],
            check=True,
            capture_output=True,
        )
        self.start_daemon(
            "mariadbd",
            [
                *("mariadbd", *common, f"--socket={socket_file}", "--skip-networking"),
                *("--innodb-log-file-size=8M", "--innodb-flush-log-at-trx-commit=0"),
            ],
        )
        until(Path(socket_file).exists, "MariaDB does not start")
        sql = f"CREATE USER slurm@localhost; GRANT ALL ON {_ACCOUNTS}.* TO slurm@localhost"
        client = ["mariadb", "--no-defaults", "--user=root", f"--socket={socket_file}"]
        subprocess.run([*client, "-e", sql], check=True, capture_output=True)


def _remove_cgroups(directory: Path) -> None:
    """Remove a cgroup with all below it; the last processes may be on their way out."""
    for path in sorted(directory.rglob("*"), key=lambda each: -len(each.parts)):
        if path.is_dir():
            path.rmdir()
    if directory.exists():
        directory.rmdir()
