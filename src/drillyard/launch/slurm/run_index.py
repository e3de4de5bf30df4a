"""Finds the runs of a Slurm cluster: one command reads the index and each state.json, then one squeue.

In this order: a job is submitted before it is entered into the index, so the queue has every job of the index. In the
other order, a run entered between the two reads would look like one whose job Slurm has forgotten. Only for runs that
failed or that Slurm has forgotten it reads more: state.json again (the job may have ended since), ended.json and the
accounts. `run_status.py` derives the status from all of these.
"""

from __future__ import annotations

import json
import posixpath
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from drillyard.launch.prepared_run import agent_files
from drillyard.launch.programs import Host, Programs, archive, require_success
from drillyard.launch.remote_files import Files, ReadRequest, ReadResult, UnreadableFile, open_files
from drillyard.launch.run_status import Handle, State, parse_handle
from drillyard.launch.slurm.commands import Slurm, SlurmJob
from drillyard.launch.slurm.job_script import ENDED
from drillyard.launch.slurm.run_status import SlurmRun, is_over, needs_accounts, status_of

_SECONDS = 120.0
_RECORD_BYTES = 1 << 20
AGENT = 'd=$(mktemp -d) && trap \'rm -rf "$d"\' EXIT && tar -x -C "$d" -f - && python3 "$d/agent" "$@"'


class RunIndex:
    """The runs of a cluster, read on `host`."""

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
        indexed = self._indexed()
        jobs = self._slurm.jobs()
        by_id = {job.job_id: job for job in jobs}
        newest = self._newest_by_run(jobs)
        runs = []
        for seen in indexed:
            entry = seen["entry"]
            run = str(entry["run"])
            own, other = by_id.get(str(entry.get("job_id"))), newest.pop(run, None)
            # A job that was submitted by hand, from the same script, is newer than the index.
            job = other if other is not None and (own is None or other.number > own.number) else own
            runs.append(SlurmRun(Handle("slurm", self._cluster, run), entry, job, seen["state"]))
        runs += [self._submitted_by_hand(run, job) for run, job in newest.items()]
        return self._with_ends(runs)

    def _newest_by_run(self, jobs: Sequence[SlurmJob]) -> dict[str, SlurmJob]:
        """The newest job of each run named in a job's comment; tasks of arrays are found by the index."""
        newest: dict[str, SlurmJob] = {}
        prefix = f"slurm://{self._cluster}/"
        for job in sorted(jobs, key=lambda each: each.number):
            if job.comment.startswith(prefix) and "_" not in job.job_id:
                newest[parse_handle(job.comment).run] = job
        return newest

    def _indexed(self) -> list[dict[str, Any]]:
        """The index of the head host, with each run's state.json."""
        argv = self._host.argv(["sh", "-c", AGENT, "sh", "list", "--cluster", self._cluster])
        result = self._programs.run(argv, stdin=archive(agent_files()), timeout=_SECONDS)
        listed = json.loads(require_success(result, f"{self._host.title}: its runs cannot be listed").stdout)
        return [seen for seen in listed if seen["entry"].get("platform") == "slurm" and seen["entry"].get("job_id")]

    def _submitted_by_hand(self, run: str, job: SlurmJob) -> SlurmRun:
        """A run that is in the queue and not in the index."""
        launch = posixpath.dirname(job.script)
        entry = {"run": run, "launch_directory": launch, "run_directory": posixpath.dirname(launch)}
        (state,) = self.records([posixpath.join(launch, "state.json")])
        return SlurmRun(Handle("slurm", self._cluster, run), entry, job, state)

    def _with_ends(self, runs: list[SlurmRun]) -> list[SlurmRun]:
        """The same with ended.json, a newer state.json and the accounts, read for all runs at once."""
        failed = [each for each in runs if status_of(each).state is State.failed]
        launches = [each.entry["launch_directory"] for each in failed]
        found = self.records([posixpath.join(launch, name) for name in (ENDED, "state.json") for launch in launches])
        ends, states = found[: len(failed)], found[len(failed) :]
        ended = {
            # A state that is not final stays as `list` reported it, which checks whether the leader is alive.
            each.handle: replace(each, ended=end, state=state if state and is_over(state) else each.state)
            for each, end, state in zip(failed, ends, states, strict=True)
        }
        forgotten = [each for each in ended.values() if needs_accounts(each)]
        accounts = self._slurm.accounts(each.job_id for each in forgotten if each.job_id)
        for each in forgotten:
            ended[each.handle] = replace(each, job=accounts.get(each.job_id))
        return [ended.get(each.handle, each) for each in runs]

    def records(self, paths: Sequence[str]) -> list[dict[str, Any] | None]:
        """JSON objects of files; None for one that is missing, incomplete or unreadable."""
        found: list[dict[str, Any] | None] = []
        for piece in self._pieces([ReadRequest(path, 0, _RECORD_BYTES) for path in paths]):
            try:
                content = json.loads(piece.data) if piece is not None else None
            except (ValueError, RecursionError):
                content = None
            found.append(content if isinstance(content, dict) else None)
        return found

    def _pieces(self, wishes: Sequence[ReadRequest]) -> list[ReadResult | None]:
        """The files' contents. A failing disk under one run hides no other run, nor that run's job."""
        try:
            return self.files.read(wishes)
        except UnreadableFile:
            if len(wishes) == 1:
                return [None]
        return [piece for wish in wishes for piece in self._pieces([wish])]
