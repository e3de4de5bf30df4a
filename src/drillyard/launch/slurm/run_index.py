"""A look at all runs of a Slurm cluster: one command that reads the index and each state.json, then one squeue.

In this order: a job is submitted before it is noted, so the queue has every job that the notes name. The other way
round, a run that is noted between the two reads would look like one whose job Slurm has forgotten. More is read only
for runs that failed or that Slurm has forgotten: state.json once more (the job may have ended since), ended.json and
the accounts. run_status.py derives from all that what a run is doing.
"""

from __future__ import annotations

import json
import posixpath
from collections.abc import Sequence
from dataclasses import replace as changed
from typing import Any

from drillyard.errors import NotFoundError
from drillyard.launch.handles import Handle, parse_handle
from drillyard.launch.prepared_run import agent_files
from drillyard.launch.programs import Host, Programs, archive, require_success
from drillyard.launch.remote_files import Files, ReadRequest, ReadResult, UnreadableFile, open_files
from drillyard.launch.run_status import State
from drillyard.launch.slurm.commands import Slurm, SlurmJob
from drillyard.launch.slurm.job_script import ENDED
from drillyard.launch.slurm.run_status import SlurmRun, is_over, needs_accounts, status_of

_SECONDS = 120.0
_RECORD_BYTES = 1 << 20
AGENT = 'd=$(mktemp -d) && trap \'rm -rf "$d"\' EXIT && tar -x -C "$d" -f - && python3 "$d/agent" "$@"'


class RunIndex:
    """The runs of the cluster that is named so, as they are known on `host`."""

    def __init__(self, cluster: str, host: Host, slurm: Slurm, programs: Programs) -> None:
        self._cluster = cluster
        self._host = host
        self._slurm = slurm
        self._programs = programs
        self._opened: Files | None = None

    @property
    def files(self) -> Files:
        """The files of the host; the connection is made once."""
        if self._opened is None:
            self._opened = open_files(self._host, self._programs)
        return self._opened

    def all(self) -> list[SlurmRun]:
        """All runs of this cluster."""
        noted = self._noted()
        jobs = self._slurm.jobs()
        by_id = {job.job_id: job for job in jobs}
        newest = self._newest_by_run(jobs)
        known = []
        for seen in noted:
            entry = seen["entry"]
            run = str(entry["run"])
            own, other = by_id.get(str(entry.get("job_id"))), newest.pop(run, None)
            # One that was submitted by hand, from the script that lies there, is newer than the note.
            job = other if other is not None and (own is None or other.number > own.number) else own
            known.append(SlurmRun(Handle("slurm", self._cluster, run), entry, job, seen["state"]))
        known += [self._unnoted(run, job) for run, job in newest.items()]
        return self._with_ends(known)

    def _newest_by_run(self, jobs: Sequence[SlurmJob]) -> dict[str, SlurmJob]:
        """The newest job of each run that the queue tells by its comment; tasks of arrays are known by their notes."""
        newest: dict[str, SlurmJob] = {}
        prefix = f"slurm://{self._cluster}/"
        for job in sorted(jobs, key=lambda each: each.number):
            if job.comment.startswith(prefix) and "_" not in job.job_id:
                newest[parse_handle(job.comment).run] = job
        return newest

    def _noted(self) -> list[dict[str, Any]]:
        """The index of the head host, with each run's state.json."""
        argv = self._host.argv(["sh", "-c", AGENT, "sh", "list", "--cluster", self._cluster])
        result = self._programs.run(argv, stdin=archive(agent_files()), timeout=_SECONDS)
        told = json.loads(require_success(result, f"{self._host.title}: its runs cannot be listed").stdout)
        return [seen for seen in told if seen["entry"].get("platform") == "slurm" and seen["entry"].get("job_id")]

    def _unnoted(self, run: str, job: SlurmJob) -> SlurmRun:
        """A run that only the queue knows: its job was submitted by hand."""
        launch = posixpath.dirname(job.script)
        entry = {"run": run, "launch_directory": launch, "run_directory": posixpath.dirname(launch)}
        (state,) = self.records([posixpath.join(launch, "state.json")])
        return SlurmRun(Handle("slurm", self._cluster, run), entry, job, state)

    def _with_ends(self, known: list[SlurmRun]) -> list[SlurmRun]:
        """The same with what only ended.json, a newer state.json and the accounts know, read for all runs at once."""
        failed = [each for each in known if status_of(each).state is State.failed]
        launches = [each.entry["launch_directory"] for each in failed]
        found = self.records([posixpath.join(launch, name) for name in (ENDED, "state.json") for launch in launches])
        ends, states = found[: len(failed)], found[len(failed) :]
        ended = {
            # A state that its leader has not ended stays as `list` has judged it, which looks whether the leader lives.
            each.handle: changed(each, ended=end, state=state if state and is_over(state) else each.state)
            for each, end, state in zip(failed, ends, states, strict=True)
        }
        forgotten = [each for each in ended.values() if needs_accounts(each)]
        accounts = self._slurm.accounts(each.job_id for each in forgotten if each.job_id)
        for each in forgotten:
            ended[each.handle] = changed(each, job=accounts.get(each.job_id))
        return [ended.get(each.handle, each) for each in known]

    def records(self, paths: Sequence[str]) -> list[dict[str, Any] | None]:
        """JSON objects of files; None for one that is not there, not whole or not readable."""
        found: list[dict[str, Any] | None] = []
        for piece in self._pieces([ReadRequest(path, 0, _RECORD_BYTES) for path in paths]):
            try:
                told = json.loads(piece.data) if piece is not None else None
            except (ValueError, RecursionError):
                told = None
            found.append(told if isinstance(told, dict) else None)
        return found

    def _pieces(self, wishes: Sequence[ReadRequest]) -> list[ReadResult | None]:
        """What the files hold. A disk that fails under one run hides no other run, and not what Slurm knows of it."""
        try:
            return self.files.read(wishes)
        except UnreadableFile:
            if len(wishes) == 1:
                return [None]
        return [piece for wish in wishes for piece in self._pieces([wish])]

    def find(self, run: str) -> SlurmRun:
        """One run. Raises UserError where it is not known, with the names that are."""
        known = self.all()
        found = next((each for each in known if each.handle.run == run), None)
        if found is None:
            names = ", ".join(sorted(each.handle.run for each in known)[:8]) or "none yet"
            raise NotFoundError(f"there is no run '{run}'; {self._host.title} knows: {names}")
        return found
