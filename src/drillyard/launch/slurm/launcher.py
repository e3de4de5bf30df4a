"""Platform `slurm`: runs as jobs of a Slurm cluster, from its login node or from a machine that reaches one by ssh.

The plan is slurm_plan.py's, the script slurm_script.py's, Slurm's commands are slurm_jobs.py's, and what a run is doing
is judged by state.py. Nothing is kept here: the queue has the jobs, the head host an index of what was submitted
(by whichever machine), and each run's files tell the rest. A look at all runs is one squeue and one command that reads
the files, however many runs there are.
"""

from __future__ import annotations

import json
import math
import posixpath
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace as changed
from pathlib import Path
from typing import Any

from drillyard.config.cluster import ClusterConfig
from drillyard.errors import UserError
from drillyard.launch.handles import Handle, parse_handle
from drillyard.launch.job import agent_files
from drillyard.launch.launcher import LogsWanted, Request
from drillyard.launch.logs.run import run_logs
from drillyard.launch.plan import File, Plan, Program
from drillyard.launch.programs import Programs, archive, archive_of_directory, require_success
from drillyard.launch.registry import LAUNCHERS
from drillyard.launch.remote import Files, Wish, copy_files, open_files, read_file, tell
from drillyard.launch.sending import names_in, secrets_file, undivided
from drillyard.launch.slurm.jobs import NoController, Slurm, SlurmJob
from drillyard.launch.slurm.plan import CARRY, POINTS, SUBMIT, host_of, plan_array, plan_of, submitting_step
from drillyard.launch.slurm.script import ENDED
from drillyard.launch.slurm.state import Known, is_over, needs_accounts, status_of
from drillyard.launch.states import RunStatus, State

_SECONDS = 120.0
_ASK_SECONDS = 10.0
"""Between two questions to Slurm by one who follows a run: every squeue takes a lock of the controller."""
_CANCEL_SECONDS = 300.0
_RECORD_BYTES = 1 << 20
_CONFIGS = ("run.yaml", "cluster.yaml", "job.json")
_AGENT = 'd=$(mktemp -d) && trap \'rm -rf "$d"\' EXIT && tar -x -C "$d" -f - && python3 "$d/agent" "$@"'
_INDEX = 'd="${XDG_STATE_HOME:-$HOME/.local/state}/drillyard/$0" && mkdir -p "$d" && exec tar -x -C "$d" -f -'


def launcher(cluster: ClusterConfig, programs: Programs) -> SlurmLauncher:
    """The launcher of a Slurm cluster."""
    return SlurmLauncher(cluster, programs)


class SlurmLauncher:
    """Runs of one Slurm cluster."""

    capabilities = LAUNCHERS["slurm"].capabilities

    def __init__(self, cluster: ClusterConfig, programs: Programs) -> None:
        self._cluster = cluster
        self._programs = programs
        self._host = host_of(cluster)
        self._slurm = Slurm(self._host, programs)
        self._opened: Files | None = None
        self._directories: dict[str, str] = {}

    def plan(self, request: Request) -> Plan:
        """What launching `request` would write and call. Pure."""
        return plan_of(request)

    def plan_sweep(self, requests: list[Request]) -> list[Plan]:
        """One plan per point; the first one submits all of them as an array job."""
        return plan_array(requests)

    def submit(self, plan: Plan, *, replace: bool = False) -> Handle:
        """Write the run's files and submit the job. Raises UserError, with nothing submitted.

        Of a sweep the first plan does that for all runs, and the others have nothing to do.
        """
        if not plan.steps:
            return plan.handle
        configs = [file.content for file in plan.files if posixpath.basename(file.path) in _CONFIGS]
        sent = (File("secret", secrets.token_hex(32) + "\n", 0o600), secrets_file(names_in(configs)))
        self._make_way([Handle("slurm", self._cluster.name, point["run"]) for point in _points(plan)], replace)
        for step in _programs(plan):
            if step.stage == CARRY:
                self._execute(step, plan, sent)
        with undivided(str(plan.handle)):
            for step in _programs(plan):
                if step.stage == SUBMIT:
                    self._submit(step, _points(plan))
                elif step.stage != CARRY:
                    self._execute(step, plan, sent)
        return plan.handle

    def runs(self) -> list[RunStatus]:
        """The runs of this cluster, newest first."""
        statuses = [status_of(known) for known in self._known()]
        return sorted(statuses, key=lambda each: (-(each.submitted_at or 0.0), each.handle))

    def status(self, run: str) -> RunStatus:
        """One run; where it waits for nodes, also those that are down."""
        known = self._find(run)
        status = status_of(known)
        if known.job is None or not _lacks_nodes(known.job, status):
            return status
        down = self._slurm.unusable_nodes(known.job.partition)
        return changed(status, reason=f"{status.reason}; down: {', '.join(down)}") if down else status

    def logs(self, run: str, wanted: LogsWanted) -> Iterator[bytes]:
        """Lines in order of time, with their node before them."""
        known = self._find(run)
        files = open_files(self._host, self._programs)
        try:
            yield from run_logs(known.entry["launch_directory"], [files], wanted, over=self._over(known))
        finally:
            files.close()

    def cancel(self, run: str) -> RunStatus:
        """Stop a run and wait until nothing of it runs; nothing happens to one that is over."""
        known = self._find(run)
        before = status_of(known)
        # One that is only marked as cancelled may still run: whoever marked it was interrupted.
        if before.state.over and (before.state is not State.cancelled or _is_gone(known)):
            return before
        launch = known.entry["launch_directory"]
        # Where the launch directory is gone there is nobody to tell either: Slurm ends the job all the same.
        words = ["python3", posixpath.join(launch, "agent"), "stop", "--mark-only"]
        self._programs.run(self._host.argv([*words, "--job", posixpath.join(launch, "job.json")]), timeout=_SECONDS)
        if known.job is not None:
            self._slurm.cancel(known.job.job_id)
        deadline = time.monotonic() + _CANCEL_SECONDS
        while not _is_gone(known := self._find(run)):
            if time.monotonic() > deadline:
                raise UserError(
                    f"{known.handle}: is cancelled, but Slurm has not ended its job {known.job_id} after "
                    f"{_CANCEL_SECONDS:.0f} s\nscontrol show job {known.job_id} tells on which nodes it still is"
                )
            time.sleep(0.5)
        if not known.own_state:
            self._note_cancelled(known)
        return status_of(known)

    def resume(self, run: str) -> Handle:
        """Submit a run that is over again; its trainer goes on from the newest checkpoint."""
        known = self._find(run)
        status = status_of(known)
        if not status.state.over:
            raise UserError(f"{known.handle}: is {status.state} and needs no resume")
        launch = known.entry["launch_directory"]
        with undivided(str(known.handle)):
            entry = {key: known.entry[key] for key in ("run", "launch_directory", "nodes") if key in known.entry}
            self._submit(submitting_step(self._host, launch), [entry])
        return known.handle

    def artifacts(self, run: str) -> list[tuple[str, int]]:
        """Files of the run directory: path relative to it, size in bytes."""
        return self._files.tree(self._run_directory(run))

    def fetch(self, run: str, paths: list[str], destination: str) -> None:
        """Copy files of the run directory to a directory here."""
        copy_files(self._files, self._run_directory(run), paths, destination)

    def read(self, run: str, path: str, offset: int) -> bytes:
        """The bytes of a file of the run directory from `offset` on."""
        return read_file(self._files, posixpath.join(self._run_directory(run), path), offset)

    # Submitting.

    def _make_way(self, handles: Sequence[Handle], replaces: bool) -> None:
        """Refuse runs that go on already, or end them."""
        wanted = set(handles)
        for known in self._known():
            handle, state = known.handle, status_of(known).state
            if handle not in wanted or state.over:
                continue
            if not replaces:
                raise UserError(
                    f"{handle}: is {state} already (job {known.job_id}), and nothing was submitted\n"
                    f"drillyard runs cancel {handle} ends it, launch --replace does so first; or give the run another "
                    "name"
                )
            self.cancel(handle.run)

    def _execute(self, step: Program, plan: Plan, sent: Sequence[File]) -> None:
        if step.sends_directory is not None:
            stdin = archive_of_directory(Path(step.sends_directory), self._programs)
        else:
            stdin = archive([each for each in (*plan.files, *sent) if each.path in step.sends])
        what = f"{plan.handle}: nothing was submitted: could not {step.purpose}"
        require_success(self._programs.run(step.argv, stdin=stdin), what)

    def _submit(self, step: Program, points: Sequence[Mapping[str, Any]]) -> None:
        """Submit, and enter the runs into the index, so that they are found when Slurm has forgotten the job."""
        job_id = self._slurm.submitted(self._programs.run(step.argv))
        now = time.time()
        entries = []
        for number, point in enumerate(points):
            own = f"{job_id}_{number}" if len(points) > 1 else job_id
            entry = {
                "run": point["run"],
                "cluster": self._cluster.name,
                "platform": "slurm",
                "launch_directory": point["launch_directory"],
                "run_directory": posixpath.dirname(point["launch_directory"]),
                "nodes": self._cluster.nodes,
                "job_id": own,
                "submitted_at": now,
            }
            entries.append(File(f"{point['run']}.json", json.dumps(entry | dict(point), indent=2) + "\n"))
        argv = self._host.argv(["sh", "-c", _INDEX, self._cluster.name])
        noted = self._programs.run(argv, stdin=archive(entries))
        if noted.returncode != 0:
            tell(f"job {job_id} is submitted, but could not be noted on {self._host.title}: {noted.stderr.strip()}")

    # What is known.

    @property
    def _files(self) -> Files:
        if self._opened is None:
            self._opened = open_files(self._host, self._programs)
        return self._opened

    def _known(self) -> list[Known]:
        """All runs of this cluster."""
        jobs = self._slurm.jobs()
        by_id = {job.job_id: job for job in jobs}
        newest = self._newest_by_run(jobs)
        known = []
        for seen in self._noted():
            entry = seen["entry"]
            run = str(entry["run"])
            own, other = by_id.get(str(entry.get("job_id"))), newest.pop(run, None)
            # One that was submitted by hand, from the script that lies there, is newer than the note.
            job = other if other is not None and (own is None or other.number > own.number) else own
            known.append(Known(Handle("slurm", self._cluster.name, run), entry, job, seen["state"]))
        known += [self._unnoted(run, job) for run, job in newest.items()]
        return self._with_ends(known)

    def _newest_by_run(self, jobs: Sequence[SlurmJob]) -> dict[str, SlurmJob]:
        """The newest job of each run that the queue tells by its comment; tasks of arrays are known by their notes."""
        newest: dict[str, SlurmJob] = {}
        prefix = f"slurm://{self._cluster.name}/"
        for job in sorted(jobs, key=lambda each: each.number):
            if job.comment.startswith(prefix) and "_" not in job.job_id:
                newest[parse_handle(job.comment).run] = job
        return newest

    def _noted(self) -> list[dict[str, Any]]:
        """The index of the head host, with each run's state.json."""
        argv = self._host.argv(["sh", "-c", _AGENT, "sh", "list", "--cluster", self._cluster.name])
        result = self._programs.run(argv, stdin=archive(agent_files()), timeout=_SECONDS)
        told = json.loads(require_success(result, f"{self._host.title}: its runs cannot be listed").stdout)
        return [seen for seen in told if seen["entry"].get("platform") == "slurm" and seen["entry"].get("job_id")]

    def _unnoted(self, run: str, job: SlurmJob) -> Known:
        """A run that only the queue knows: its job was submitted by hand."""
        launch = posixpath.dirname(job.script)
        entry = {"run": run, "launch_directory": launch, "run_directory": posixpath.dirname(launch)}
        (state,) = self._records([posixpath.join(launch, "state.json")])
        return Known(Handle("slurm", self._cluster.name, run), entry, job, state)

    def _with_ends(self, known: list[Known]) -> list[Known]:
        """The same with what only ended.json and the accounts tell, asked for all runs at once."""
        untold = [each for each in known if _asks_for_end(each)]
        ends = self._records([posixpath.join(each.entry["launch_directory"], ENDED) for each in untold])
        ended = {each.handle: changed(each, ended=end) for each, end in zip(untold, ends, strict=True)}
        forgotten = [each for each in ended.values() if needs_accounts(each)]
        accounts = self._slurm.accounts(each.job_id for each in forgotten if each.job_id)
        for each in forgotten:
            ended[each.handle] = changed(each, job=accounts.get(each.job_id))
        return [ended.get(each.handle, each) for each in known]

    def _records(self, paths: Sequence[str]) -> list[dict[str, Any] | None]:
        """JSON objects of files; None for one that is not there or not whole."""
        found: list[dict[str, Any] | None] = []
        for piece in self._files.read([Wish(path, 0, _RECORD_BYTES) for path in paths]):
            try:
                told = json.loads(piece.data) if piece is not None else None
            except ValueError:
                told = None
            found.append(told if isinstance(told, dict) else None)
        return found

    def _find(self, run: str) -> Known:
        known = self._known()
        found = next((each for each in known if each.handle.run == run), None)
        if found is None:
            names = ", ".join(sorted(each.handle.run for each in known)[:8]) or "none yet"
            raise UserError(f"{self._cluster.name}: there is no run '{run}'; {self._host.title} knows: {names}")
        return found

    def _run_directory(self, run: str) -> str:
        # It stays where it is; who follows a run's files asks every second, and need not ask the controller.
        if run not in self._directories:
            self._directories[run] = posixpath.dirname(str(self._find(run).entry["launch_directory"]))
        return self._directories[run]

    def _note_cancelled(self, known: Known) -> None:
        """Leave a word about a run that never began: Slurm forgets its job."""
        told = {"submission": known.job_id, "attempt": "0", "code": 130, "state": "cancelled"}
        text = json.dumps(told | {"reason": "cancelled in the queue", "at": round(time.time())}) + "\n"
        argv = self._host.argv(["sh", "-c", 'exec tar -x -C "$0" -f -', known.entry["launch_directory"]])
        self._programs.run(argv, stdin=archive([File(ENDED, text)]))

    def _over(self, known: Known) -> Callable[[], bool]:
        """Whether a run is over, for who follows it: its own word at once, Slurm's now and then.

        A controller or login node that does not answer is waited for.
        """
        path = posixpath.join(known.entry["launch_directory"], "state.json")
        asked_at = -math.inf
        away = False

        def over() -> bool:
            nonlocal asked_at, away
            try:
                (state,) = self._records([path])
                if is_over(changed(known, state=state).own_state):
                    return True
                if time.monotonic() - asked_at < _ASK_SECONDS:
                    return False
                asked_at = time.monotonic()
                answer = self.status(known.handle.run).state.over
            except NoController as error:
                if not away:
                    tell(f"{str(error).splitlines()[0]}; trying again until it is back")
                away = True
                return False
            if away:
                tell(f"{self._host.title}: Slurm answers again")
            away = False
            return answer

        return over


def _programs(plan: Plan) -> list[Program]:
    return [step for step in plan.steps if isinstance(step, Program)]


def _points(plan: Plan) -> list[Mapping[str, Any]]:
    """The runs that a plan submits, in the order of the array's tasks."""
    told = next((file.content for file in plan.files if file.path == POINTS), None)
    own = {"run": plan.handle.run, "launch_directory": plan.launch_directory, "nodes": plan.nodes}
    return [own] if told is None else list(json.loads(told))


def _lacks_nodes(job: SlurmJob, status: RunStatus) -> bool:
    lost = status.state is State.failed and "capacity" in (status.reason or "")
    return lost or job.reason.startswith(("ReqNodeNotAvail", "Resources", "BadConstraints", "NodeDown"))


def _asks_for_end(known: Known) -> bool:
    """Whether ended.json may tell more than is known: of a failure, or of a job that Slurm has forgotten."""
    return status_of(known).state is State.failed


def _is_gone(known: Known) -> bool:
    """Whether nothing of the run can be running: Slurm says of a job that ends that it is COMPLETING."""
    return known.job is None or (status_of(known).state.over and known.job.state not in ("RUNNING", "COMPLETING"))
