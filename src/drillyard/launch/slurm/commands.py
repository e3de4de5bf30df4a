"""Slurm's commands and what they print (squeue, sacct, scancel, sinfo), and the runs of a cluster
by all its sources.

One call each for any number of jobs.

`squeue --json` has another shape in each release (https://github.com/pytorch/torchx/issues/1101),
and `--Format` cuts values off; `--format` with a separator is the same since 2.x and cuts nothing.
Times are asked for in Unix seconds (SLURM_TIME_FORMAT), so that the login node's time zone does not
matter.
"""

from __future__ import annotations

import contextlib
import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from drillyard.errors import ConfigError, UnreachableError, UserError
from drillyard.launch.agent.state_file import is_state, json_object
from drillyard.launch.prepared_run import SENT_AGENT, agent_files
from drillyard.launch.remote_files import ReadRequest, UnreadableFile, open_files
from drillyard.launch.run_status import Handle, State, parse_handle
from drillyard.launch.slurm.job_script import SCRIPT
from drillyard.launch.slurm.nodes import SINFO, SlurmNode, drain_command, parse_sinfo
from drillyard.launch.slurm.run_status import ENDED, SlurmJob, SlurmRun, is_over
from drillyard.programs import Host, Programs, Result, archive, require_success

_UNIX_TIMES = ("env", "SLURM_TIME_FORMAT=%s")
_SQUEUE_FORMAT = "%i|%T|%r|%V|%S|%e|%D|%N|%P|%o|%k"
_SACCT_FORMAT = "JobID,State,Reason,Submit,Start,End,NNodes,NodeList,Partition,ExitCode,JobName"
_SECONDS = 60.0
_AGENT_SECONDS = 120.0
_RECORD_BYTES = 1 << 20
_NO_CONTROLLER = re.compile(
    r"Unable to contact slurm controller|Socket timed out|Zero Bytes were transmitted", re.I
)
_FEATURES = "sinfo -o '%P %f' lists the features; set slurm.constraint in the cluster config"
_ADVICE = {
    "account": (
        "sacctmgr show associations user=$USER lists your accounts; set slurm.account in the"
        " cluster config"
    ),
    "partition": "sinfo -s lists the partitions; set slurm.partition in the cluster config",
    "qos": "sacctmgr show qos lists them; set slurm.qos in the cluster config",
    "time limit": (
        "scontrol show partition shows its MaxTime; set slurm.time_limit in the cluster config"
    ),
    "node configuration": (
        "sinfo -o '%P %D %c %m %G' shows what nodes have; compare nodes, machine and slurm.gres"
    ),
    "generic resource": (
        "sinfo -o '%P %G' shows the GPUs' types; set slurm.gres as it is written there"
    ),
    "job array specification": (
        "scontrol show config | grep MaxArraySize shows how many; sweep over fewer at a time"
    ),
    "constraint": _FEATURES,
    "feature specification": _FEATURES,
}
"""Advice about a refusal of sbatch, by words of its message."""


def advice_on(refusal: str) -> str:
    """What to do about a refusal of sbatch or srun; empty for one that is not known."""
    return next((text for words, text in _ADVICE.items() if words in refusal.lower()), "")


class Slurm:
    """Slurm's commands on a cluster's head host, and the runs that its queue, index and files show
    together."""

    def __init__(self, cluster: str, host: Host, programs: Programs) -> None:
        self.host = host
        self.files = open_files(host, programs)
        self._cluster = cluster
        self._programs = programs

    # Runs.

    def runs(self) -> list[SlurmRun]:
        """All runs of this cluster: one command reads the index and each state.json, then one
        squeue.

        In this order: a job is submitted before it is entered into the index, so the queue has
        every job of the index. In the other order, a run entered between the two would look like
        one whose job Slurm has forgotten. Only for runs that failed or that Slurm has forgotten it
        reads more: state.json again (the job may have ended since), ended.json, the index again
        where neither has the end, and the accounts.
        """
        listed = self._listed()
        jobs = sorted(self.jobs(), key=lambda each: each.number)
        by_id = {job.job_id: job for job in jobs}
        newest = {handle: job for job in jobs if (handle := self._handle_in(job)) is not None}
        runs = []
        for entry, state, problem in listed:
            if entry.get("platform") != "slurm" or not entry.get("job_id"):
                continue
            handle = Handle("slurm", self._cluster, str(entry["run"]))
            own, other = by_id.get(str(entry["job_id"])), newest.pop(handle, None)
            if own is not None and not is_job_of(own, handle, entry):
                own = None
            # A job that was submitted by hand, from the same script, is newer than the index.
            job = other if other is not None and (own is None or other.number > own.number) else own
            runs.append(SlurmRun(handle, entry, job, state, problem=problem))
        for handle, job in newest.items():
            # Submitted by hand, and not in the index.
            launch, script = posixpath.split(job.script)
            if script != SCRIPT:
                continue
            entry = {
                "run": handle.run,
                "launch_directory": launch,
                "run_directory": posixpath.dirname(launch),
            }
            (state,) = self.states([posixpath.join(launch, "state.json")])
            runs.append(SlurmRun(handle, entry, job, state))
        return self._with_ends(runs)

    def _handle_in(self, job: SlurmJob) -> Handle | None:
        """The run of this cluster that a job's comment names. Tasks of arrays are found by the
        index."""
        if "_" not in job.job_id:
            # A job that is not ours may have any comment.
            with contextlib.suppress(ConfigError):
                handle = parse_handle(job.comment)
                if (handle.platform, handle.cluster) == ("slurm", self._cluster):
                    return handle
        return None

    def _listed(self) -> list[tuple[dict[str, Any], dict[str, Any], str | None]]:
        """The index: each entry, the state of its run, and why there is none (agent/index.py)."""
        result = self.run_agent(["list", "--cluster", self._cluster])
        self._require(result, "its runs cannot be listed", "")
        return [
            (each["entry"], each["state"] or {}, each["problem"]) for each in result.printed_json()
        ]

    def _with_ends(self, runs: list[SlurmRun]) -> list[SlurmRun]:
        """The same with ended.json, a newer state.json and the accounts, read for all runs at
        once."""
        failed = [each for each in runs if each.status.state is State.failed]
        launches = [each.launch_directory for each in failed]
        found = self.states(
            [posixpath.join(launch, name) for name in (ENDED, "state.json") for launch in launches]
        )
        ends, states = found[: len(failed)], found[len(failed) :]
        ended = {
            # A state that is not final stays as `list` reported it, which checks whether the leader
            # is alive.
            each.handle: replace(each, ended=end, state=state if is_over(state) else each.state)
            for each, end, state in zip(failed, ends, states, strict=True)
        }
        # Their leaders lived when `list` looked, and their end could not be written: a disk that
        # takes nothing.
        silent = [
            each
            for each in ended.values()
            if each.job and each.own_state and not is_over(each.own_state) and not each.own_end
        ]
        again = {
            str(entry.get("run")): state for entry, state, _ in (self._listed() if silent else [])
        }
        for each in silent:
            ended[each.handle] = replace(each, state=again.get(each.handle.run) or each.state)
        forgotten = [each for each in ended.values() if each.needs_accounts]
        accounts = self.accounts(
            {each.job_id: job_name(each.handle, each.entry) for each in forgotten if each.job_id}
        )
        for each in forgotten:
            ended[each.handle] = replace(each, job=accounts.get(each.job_id))
        return [ended.get(each.handle, each) for each in runs]

    def records(self, paths: Sequence[str]) -> list[dict[str, Any]]:
        """JSON objects of files; empty for one that is missing, incomplete or unreadable.

        A failing disk under one run hides no other run, nor that run's job.
        """
        try:
            pieces = self.files.read([ReadRequest(path, 0, _RECORD_BYTES) for path in paths])
        except UnreadableFile:
            return (
                [{}]
                if len(paths) == 1
                else [found for path in paths for found in self.records([path])]
            )
        return [json_object(piece.data) if piece is not None else {} for piece in pieces]

    def states(self, paths: Sequence[str]) -> list[dict[str, Any]]:
        """The same of files that each are a state.json or ended.json; empty for another content."""
        return [found if is_state(found) else {} for found in self.records(paths)]

    def run_agent(self, words: Sequence[str]) -> Result:
        """Run a verb of the agent on the head host, from the source that is sent along."""
        argv = self.host.argv(["sh", "-c", SENT_AGENT, "python3", *words])
        return self._programs.run(argv, stdin=archive(agent_files()), timeout=_AGENT_SECONDS)

    # Commands.

    def jobs(self) -> list[SlurmJob]:
        """Every job of this user that Slurm has not forgotten, tasks of arrays one by one. Raises
        UserError."""
        words = [
            "squeue",
            "--noheader",
            "--all",
            "--array",
            "--states=all",
            "--me",
            f"--format={_SQUEUE_FORMAT}",
        ]
        return parse_squeue(
            self._require(self._run([*_UNIX_TIMES, *words]), "the queue cannot be read").stdout
        )

    def accounts(self, names: Mapping[str, str]) -> dict[str, SlurmJob]:
        """The records of jobs in Slurm's accounts, by their ids; empty where the cluster keeps
        none. `names`: id and name of each; a job of another name has got the id since."""
        ids = sorted(names)
        if not ids:
            return {}
        words = [
            "sacct",
            "--allocations",
            "--noheader",
            "--parsable2",
            "--duplicates",
            f"--format={_SACCT_FORMAT}",
        ]
        result = self._run([*_UNIX_TIMES, *words, f"--jobs={','.join(ids)}"])
        # "Slurm accounting storage is disabled" is no error: then only the run's own files are
        # left.
        return (
            {job.job_id: job for job in parse_sacct(result.stdout, names)}
            if result.returncode == 0
            else {}
        )

    def require_submitted(self, result: Result) -> None:
        """Raise UserError where the submitting program failed, with its words or those of sbatch,
        and what to do."""
        stderr = result.stderr.lower()
        advice = advice_on(stderr)
        if "sbatch: not found" in stderr and result.returncode == 127:
            advice = (
                f"sbatch is not installed on {self.host.title}; slurm.login_host names a node that"
                " has it"
            )
        what = "sbatch refused the job" if "sbatch:" in stderr else "nothing was submitted"
        self._require(result, what, advice)

    def cancel(self, job_id: str) -> None:
        """scancel; does nothing to a job that is over. Raises UserError."""
        result = self._run(["scancel", job_id])
        if result.returncode != 0 and not re.search(
            r"Invalid job id|already completing", result.stderr, re.I
        ):
            self._require(result, f"job {job_id} cannot be cancelled")

    def signal_agents(self, job_id: str) -> None:
        """SIGTERM to all steps of a job, as before its time limit; where that does not work,
        `cancel` follows."""
        self._run(["scancel", "--signal=TERM", job_id])

    def unusable_nodes(self, partition: str) -> list[str]:
        """Nodes of a partition that are down or drained, with the reason; empty where sinfo
        fails."""
        words = ["sinfo", "--noheader", "--list-reasons", "--format=%N|%T|%E"]
        words += [f"--partition={partition}"] if partition else []
        rows = [
            line.split("|", 2)
            for line in self._run(words).stdout.splitlines()
            if line.count("|") >= 2
        ]
        return [f"{nodes} {state.rstrip('*')} ({reason})" for nodes, state, reason in rows]

    def nodes(self, partition: str | None) -> list[SlurmNode]:
        """The nodes of a partition; None: of the default one. Raises UserError."""
        listed = self._require(self._run(SINFO), "its nodes cannot be listed")
        return parse_sinfo(listed.stdout, partition)

    def output(self, words: Sequence[str], what: str) -> str:
        """What one of Slurm's commands prints. Raises UserError with `what` where it fails."""
        return self._require(self._run(words), what).stdout

    def host_names(self, expressions: Sequence[str]) -> list[str]:
        """The nodes that Slurm's host lists name, such as n[1-3]. Raises UserError."""
        if not expressions:
            return []
        words = ["scontrol", "show", "hostnames", ",".join(expressions)]
        return self._require(self._run(words), "nodes cannot be looked up").stdout.split()

    def drain(self, node: str, reason: str) -> None:
        """Keep new jobs off a node. Raises UserError."""
        advice = "an operator of Slurm may do that; give them the command"
        self._require(self._run(drain_command(node, reason)), f"{node} cannot be drained", advice)

    def _require(self, result: Result, what: str, advice: str | None = None) -> Result:
        if advice is None and result.returncode == 127:
            advice = (
                f"Slurm's commands are not on {self.host.title}: set slurm.login_host to a node"
                " that has them"
            )
        try:
            return require_success(result, f"{self.host.title}: {what}", advice or "")
        except UserError as error:
            if _NO_CONTROLLER.search(result.stderr):
                raise UnreachableError(str(error)) from None
            raise

    def _run(self, words: Sequence[str]) -> Result:
        return self._programs.run(self.host.argv(words), timeout=_SECONDS)


def parse_squeue(text: str) -> list[SlurmJob]:
    """The jobs in what squeue printed with our format. A script's path may have `|` in it, a
    comment may not."""
    jobs = []
    for job, rest in _jobs(text):
        script, _, commented = rest.rpartition("|")
        comment, _, note = commented.partition(" ")
        script, comment = ("" if each == "(null)" else each for each in (script, comment))
        jobs.append(replace(job, script=script, comment=comment, note=note.strip()))
    return jobs


def is_job_of(job: SlurmJob, handle: Handle, entry: Mapping[str, Any]) -> bool:
    """Whether a job that has the id in a run's entry is that run's.

    Slurm gives an id again: after a reset of slurmctld it counts from 1. The comment is the handle,
    of an array's task that of the array's first run until the task is queued again; a site's plugin
    may replace it, and then the script's path decides.
    """
    is_task = "_" in job.job_id
    if job.comment in (str(handle), entry.get("comment")):
        return True
    if is_task and "comment" not in entry and job.comment.startswith(_cluster_prefix(handle)):
        # An earlier version has not noted which run was the first.
        return True
    launch = str(entry.get("launch_directory"))
    if is_task:
        runs, script = posixpath.dirname(posixpath.dirname(launch)), posixpath.dirname(job.script)
        return job.script != "" and posixpath.dirname(posixpath.dirname(script)) == runs
    return job.script == posixpath.join(launch, SCRIPT)


def job_name(handle: Handle, entry: Mapping[str, Any]) -> str:
    """Name of a run's job: of an array that of its first run; empty where an earlier version has
    not noted that."""
    if "comment" in entry:
        return parse_handle(str(entry["comment"])).run
    return "" if "_" in str(entry.get("job_id")) else handle.run


def _cluster_prefix(handle: Handle) -> str:
    return f"{handle.platform}://{handle.cluster}/"


def parse_sacct(text: str, names: Mapping[str, str] | None = None) -> list[SlurmJob]:
    """The jobs in what sacct printed with our format: of a job that was queued again, its last
    start. `names`: only jobs of these names, by their ids; empty: of any."""
    jobs = {}
    for job, rest in _jobs(text):
        exit_code, _, name = rest.partition("|")
        if name and (names or {}).get(job.job_id) not in ("", None, name):
            continue
        code, _, number = exit_code.partition(":")
        if code.isdigit() and number.isdigit():
            # `CODE:SIGNAL`, as a shell's exit code.
            job = replace(job, exit_code=128 + int(number) if int(number) else int(code))
        jobs[job.job_id] = job
    return list(jobs.values())


def _jobs(text: str) -> Iterator[tuple[SlurmJob, str]]:
    """The job of each line, from the fields that both programs print first, and the rest of the
    line."""
    # Some clusters wrap Slurm's commands in scripts that print something of their own.
    for line in (line for line in text.splitlines() if line.count("|") >= 9):
        job_id, state, reason, submitted, started, ended, nodes, node_list, partition, rest = (
            line.split("|", 9)
        )
        # `4`, or `1-4` of a job with a range.
        count = re.match(r"\d+", nodes)
        job = SlurmJob(
            job_id=job_id,
            # `CANCELLED by 1000`
            state=state.split()[0].rstrip("+").upper(),
            reason="" if reason == "None" else reason,
            submitted_at=_time(submitted),
            started_at=_time(started),
            ended_at=_time(ended),
            nodes=int(count[0]) if count else 0,
            node_list="" if node_list in ("(null)", "None assigned") else node_list,
            partition=partition,
        )
        yield job, rest


def _time(text: str) -> float | None:
    return float(text) if text.isdigit() else None
