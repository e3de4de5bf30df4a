"""slurm.conf of a made cluster: the template that the controller completes.

Cluster Toolkit's controller fills in the names in braces and adds cloud.conf, which has nodes,
partitions, prolog and the suspend and resume programs. It also sets there that a node that could
not be made becomes idle again once it is suspended (SlurmctldParameters=idle_on_node_suspend).
What a launch relies on is set here: accounts, process tracking by cgroups, preemption that queues
again. Values are those of slurm.conf(5).
"""

from __future__ import annotations

PROLOG_SECONDS = 600
"""The longest that a prolog may take: it waits for the daemon of the network stack."""
_CREDENTIAL_SECONDS = 120
"""A job that is queued again waits for so long (slurm.conf(5), cred_expire). It need not be as long
as a prolog, since with PrologFlags=Alloc a job's credentials are made after its prolog."""

SCHEDULER_PARAMETERS = (
    *("bf_continue", "salloc_wait_nodes", "ignore_prefer_validation"),
    "nohold_on_prolog_fail",
)
"""The toolkit's own, and one without which Slurm holds a job whose prolog has failed, until
somebody releases it."""

_SETTINGS: tuple[tuple[str, str], ...] = (
    ("ClusterName={name}", "the cluster's name"),
    ("SlurmctldHost={control_host}({control_addr})", "the controller"),
    ("SlurmctldPort={control_host_port}", "the controller's ports"),
    ("SlurmdPort=6818", "the nodes' port"),
    ("SlurmUser=slurm", "the user that the image has"),
    ("AuthType=auth/{auth_key}", "the key that the controller gives out"),
    (f"AuthInfo=cred_expire={_CREDENTIAL_SECONDS}", "so long waits a job that is queued again"),
    ("AuthAltTypes=auth/jwt", "tokens of the login nodes"),
    ("CredType=cred/{auth_key}", "as AuthType"),
    ("StateSaveLocation={state_save}", "on the controller's disk"),
    ("SlurmdSpoolDir=/var/spool/slurmd", "where the image has it"),
    ("SlurmctldPidFile=/var/run/slurm/slurmctld.pid", "where the image has it"),
    ("SlurmdPidFile=/var/run/slurm/slurmd.pid", "where the image has it"),
    ("SlurmctldLogFile={slurmlog}/slurmctld.log", "where the image has it"),
    ("SlurmdLogFile={slurmlog}/slurmd-%n.log", "one log of each node"),
    ("MpiDefault={mpi_default}", "what the image has"),
    ("SchedulerType=sched/backfill", "short jobs fill gaps"),
    ("SelectType=select/cons_tres", "GPUs are counted"),
    ("SelectTypeParameters=CR_Core_Memory", "cores and memory are counted"),
    ("ProctrackType=proctrack/cgroup", "no process outlives its job"),
    ("TaskPlugin=task/affinity,task/cgroup", "a job sees its own devices and cores"),
    ("JobAcctGatherType=jobacct_gather/cgroup", "what a job used is counted by its cgroup"),
    ("AccountingStorageType=accounting_storage/slurmdbd", "sacct knows how each run ended"),
    ("AccountingStorageHost={accounting_storage_host}", "slurmdbd's host"),
    ("AccountingStorageTRES=gres/gpu", "GPU hours are counted"),
    ("AccountingStoreFlags=job_comment", "runs are found by the comment of their job"),
    ("PreemptType=preempt/qos", "a QOS may preempt another one"),
    ("PreemptMode=REQUEUE", "a preempted run is queued again, and continues"),
    ("JobRequeue=1", "so is one whose node is lost"),
    ("ReturnToService=2", "a node that registers again takes jobs"),
    ("MaxNodeCount=64000", "no cluster is larger"),
    ("MessageTimeout=60", "calls wait for a busy controller"),
    (f"BatchStartTimeout={PROLOG_SECONDS}", "a job starts after its prolog"),
    (f"PrologEpilogTimeout={PROLOG_SECONDS}", "a prolog that hangs drains its node"),
)


def slurm_conf() -> str:
    """The template."""
    lines = [f"# {why}\n{setting}" for setting, why in _SETTINGS]
    return "\n".join([*lines, "# nodes, partitions, programs of the cloud\ninclude cloud.conf\n"])
