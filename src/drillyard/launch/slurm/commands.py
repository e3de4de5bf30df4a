"""Slurm's commands, and what they print: squeue, sacct, scancel, sinfo. One call each for any number of jobs.

`squeue --json` has another shape in each release (https://github.com/pytorch/torchx/issues/1101), and `--Format` cuts
values off; `--format` with a separator is the same since 2.x and cuts nothing. Times are asked for in Unix seconds
(SLURM_TIME_FORMAT), so that the login node's time zone does not matter.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from drillyard.errors import UnreachableError, UserError
from drillyard.launch.programs import Host, Programs, Result, require_success

_UNIX_TIMES = ("env", "SLURM_TIME_FORMAT=%s")
_SQUEUE_FORMAT = "%i|%T|%r|%V|%S|%e|%D|%N|%P|%o|%k"
_SACCT_FORMAT = "JobID,State,Reason,Submit,Start,End,NNodes,NodeList,Partition,ExitCode"
_SECONDS = 60.0
_NO_CONTROLLER = re.compile(r"Unable to contact slurm controller|Socket timed out|Zero Bytes were transmitted", re.I)
_ADVICE = {
    "account": "sacctmgr show associations user=$USER lists your accounts; set slurm.account in the cluster config",
    "partition": "sinfo -s lists the partitions; set slurm.partition in the cluster config",
    "qos": "sacctmgr show qos lists them; set slurm.qos in the cluster config",
    "time limit": "scontrol show partition shows its MaxTime; set slurm.time_limit in the cluster config",
    "node configuration": "sinfo -o '%P %D %c %m %G' shows what nodes have; compare nodes, machine and slurm.gres",
    "generic resource": "sinfo -o '%P %G' shows the GPUs' types; set slurm.gres as it is written there",
    "job array specification": "scontrol show config | grep MaxArraySize shows how many; sweep over fewer at a time",
    "constraint": "sinfo -o '%P %f' lists the features; set slurm.constraint in the cluster config",
}
"""Advice about a refusal of sbatch, by words of its message."""


class ControllerUnreachable(UnreachableError):
    """slurmctld does not answer now."""


@dataclass(frozen=True)
class SlurmJob:
    """A job, or a task of an array."""

    job_id: str
    """`12`, or `12_3` for task 3 of array 12."""
    state: str
    reason: str
    submitted_at: float | None
    started_at: float | None
    ended_at: float | None
    nodes: int
    node_list: str
    partition: str
    script: str = ""
    comment: str = ""
    """The handle of the run, where the job is one of ours."""
    note: str = ""
    """Why the job script queued the job again; it appends that to the comment."""
    exit_code: int | None = None

    @property
    def number(self) -> tuple[int, int]:
        """Sort key: later jobs have higher numbers."""
        array, _, task = self.job_id.partition("_")
        return int(array), int(task) if task.isdigit() else -1


class Slurm:
    """Slurm's commands on one host."""

    def __init__(self, host: Host, programs: Programs) -> None:
        self.host = host
        self._programs = programs

    def jobs(self) -> list[SlurmJob]:
        """Every job of this user that Slurm has not forgotten, tasks of arrays one by one. Raises UserError."""
        words = ["squeue", "--noheader", "--all", "--array", "--states=all", "--me", f"--format={_SQUEUE_FORMAT}"]
        return parse_squeue(self._ask([*_UNIX_TIMES, *words], "the queue cannot be read").stdout)

    def accounts(self, job_ids: Iterable[str]) -> dict[str, SlurmJob]:
        """The records of these jobs in Slurm's accounts; empty where the cluster keeps none."""
        ids = sorted(job_ids)
        if not ids:
            return {}
        words = ["sacct", "--allocations", "--noheader", "--parsable2", "--duplicates", f"--format={_SACCT_FORMAT}"]
        result = self._run([*_UNIX_TIMES, *words, f"--jobs={','.join(ids)}"])
        # "Slurm accounting storage is disabled" is no error: then only the run's own files are left.
        return {job.job_id: job for job in parse_sacct(result.stdout)} if result.returncode == 0 else {}

    def require_submitted(self, result: Result) -> None:
        """Raise UserError where the submitting program failed, with its words or those of sbatch, and what to do."""
        if result.returncode == 0:
            return
        stderr = result.stderr.lower()
        missing = "sbatch: not found" in stderr and result.returncode == 127
        advice = [text for words, text in _ADVICE.items() if words in stderr]
        if missing:
            advice = [f"sbatch is not installed on {self.host.title}; slurm.login_host names a node that has it"]
        what = "sbatch refused the job" if "sbatch:" in stderr else "nothing was submitted"
        require_success(result, f"{self.host.title}: {what}", advice[0] if advice else "")

    def cancel(self, job_id: str) -> None:
        """scancel; does nothing to a job that is over. Raises UserError."""
        result = self._run(["scancel", job_id])
        if result.returncode != 0 and not re.search(r"Invalid job id|already completing", result.stderr, re.I):
            self._require(result, f"job {job_id} cannot be cancelled")

    def signal_agents(self, job_id: str) -> None:
        """SIGTERM to all steps of a job, as before its time limit; where that does not work, `cancel` follows."""
        self._run(["scancel", "--signal=TERM", job_id])

    def unusable_nodes(self, partition: str) -> list[str]:
        """Nodes of a partition that are down or drained, with the reason; empty where sinfo fails."""
        words = ["sinfo", "--noheader", "--list-reasons", "--format=%N|%T|%E"]
        result = self._run([*words, *([f"--partition={partition}"] if partition else [])])
        rows = [line.split("|", 2) for line in result.stdout.splitlines() if line.count("|") >= 2]
        return [f"{nodes} {state.rstrip('*')} ({reason})" for nodes, state, reason in rows]

    def _ask(self, words: Sequence[str], what: str) -> Result:
        return self._require(self._run(words), what)

    def _require(self, result: Result, what: str) -> Result:
        missing = result.returncode == 127
        advice = f"Slurm's commands are not on {self.host.title}: set slurm.login_host to a node that has them"
        try:
            return require_success(result, f"{self.host.title}: {what}", advice if missing else "")
        except UserError as error:
            if result.unreachable or _NO_CONTROLLER.search(result.stderr):
                raise ControllerUnreachable(str(error)) from None
            raise

    def _run(self, words: Sequence[str]) -> Result:
        return self._programs.run(self.host.argv(words), timeout=_SECONDS)


def parse_squeue(text: str) -> list[SlurmJob]:
    """The jobs in what squeue printed with our format. A script's path may have `|` in it, a comment may not."""
    jobs = []
    for line in text.splitlines():
        job_id, state, reason, submitted, started, ended, nodes, node_list, partition, rest = line.split("|", 9)
        script, _, commented = rest.rpartition("|")
        comment, _, note = commented.partition(" ")
        jobs.append(
            SlurmJob(
                job_id=job_id,
                state=state.split()[0].upper(),
                reason="" if reason == "None" else reason,
                submitted_at=_time(submitted),
                started_at=_time(started),
                ended_at=_time(ended),
                nodes=_count(nodes),
                node_list="" if node_list == "(null)" else node_list,
                partition=partition,
                script="" if script == "(null)" else script,
                comment="" if comment == "(null)" else comment,
                note=note.strip(),
            )
        )
    return jobs


def parse_sacct(text: str) -> list[SlurmJob]:
    """The jobs in what sacct printed with our format: of a job that was queued again, its last start."""
    jobs = {}
    for line in text.splitlines():
        job_id, state, reason, submitted, started, ended, nodes, node_list, partition, code = line.split("|", 9)
        jobs[job_id] = SlurmJob(
            job_id=job_id,
            # `CANCELLED by 1000`
            state=state.split()[0].rstrip("+").upper(),
            reason="" if reason == "None" else reason,
            submitted_at=_time(submitted),
            started_at=_time(started),
            ended_at=_time(ended),
            nodes=_count(nodes),
            node_list="" if node_list == "None assigned" else node_list,
            partition=partition,
            exit_code=_exit_code(code),
        )
    return list(jobs.values())


def _time(text: str) -> float | None:
    return float(text) if text.isdigit() else None


def _count(text: str) -> int:
    """`4`, or `1-4` of a job with a range."""
    digits = re.match(r"\d+", text)
    return int(digits[0]) if digits else 0


def _exit_code(text: str) -> int | None:
    """`CODE:SIGNAL` as a shell's exit code."""
    code, _, number = text.partition(":")
    if not code.isdigit() or not number.isdigit():
        return None
    return 128 + int(number) if int(number) else int(code)
