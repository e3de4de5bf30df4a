"""Runs as custom jobs of Vertex AI: the job lives in the service, the run in a bucket, and nothing on this machine.

Submission writes the plan's files into the bucket and creates one CustomJob (vertex_request.py), through Google's own
client. Afterwards jobs are found by their labels, so another machine sees the same runs. The service says whether a
job waits, runs or has ended; state.json and the logs, which the agents write into the bucket, say the rest. Cloud
Logging has the same lines: `gcloud ai custom-jobs stream-logs ID --region REGION`, or `gcloud logging read
'resource.type="ml_job" resource.labels.job_id="ID"'`, with the id that `runs status` shows.

Limits: one submission per run at a time is a look before the request, not a lock; should two machines submit a run in
the same second, the fence of the agents lets the newer one go on and ends the other.
"""

from __future__ import annotations

import json
import posixpath
import secrets
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any

from drillyard.config.cluster import ClusterConfig
from drillyard.errors import NotFoundError, UserError
from drillyard.launch import registry
from drillyard.launch.handles import Handle
from drillyard.launch.launcher import Cancellation, Launcher, LaunchRequest, LogSelection
from drillyard.launch.plan import Call, Plan
from drillyard.launch.programs import Programs
from drillyard.launch.remote_files import artifacts_of, copy_files, print_notice, read_file
from drillyard.launch.run_status import RunStatus, State
from drillyard.launch.submit_secrets import names_in, secret_names, secrets_file
from drillyard.launch.vertex.bucket_paths import BucketPath
from drillyard.launch.vertex.custom_job import REQUEST_FILE, UPLOAD, plan_of
from drillyard.launch.vertex.run_status import is_over, job_id, status_of

if TYPE_CHECKING:
    from drillyard.launch.vertex.bucket_files import BucketFiles
    from drillyard.launch.vertex.service import CustomJobJson, Service

_PATIENCE_FOR_CANCEL_SECONDS = 600.0
_POLL_SECONDS = 2.0
_AT_ONCE = 16
_CONFIGS = ("run.yaml", "cluster.yaml", "job.json")


def launcher(cluster: ClusterConfig, programs: Programs) -> Launcher:
    """The launcher of a cluster on Vertex AI."""
    return VertexLauncher(cluster)


class VertexLauncher:
    """Runs of one cluster on Vertex AI."""

    capabilities = registry.LAUNCHERS["vertex"].capabilities

    def __init__(self, cluster: ClusterConfig) -> None:
        self._cluster = cluster

    @cached_property
    def _service(self) -> Service:
        from drillyard.launch.vertex.service import Service

        return Service(self._cluster)

    @cached_property
    def _files(self) -> BucketFiles:
        from drillyard.launch.vertex.bucket_files import BucketFiles

        return BucketFiles(self._cluster)

    def plan(self, request: LaunchRequest) -> Plan:
        """The files in the bucket and the one request. Pure."""
        if request.sync:
            registry.require("vertex", "sync", "--sync")
        if request.dependency is not None:
            registry.require("vertex", "dependency", "--after")
        return plan_of(request)

    def plan_sweep(self, requests: list[LaunchRequest]) -> list[Plan]:
        """A job per point: the service has no arrays."""
        return [self.plan(request) for request in requests]

    def submit(self, plan: Plan, *, replace: bool = False) -> Handle:
        """Write the files, create the job. Refused while the run is there and not over, unless `replace`."""
        from drillyard.launch.vertex.service import checked

        made_here = _made_at_submission(plan)
        for step in plan.steps:
            assert isinstance(step, Call)
            if step.method != UPLOAD:
                checked(step.body)
        self._make_way(plan.handle, replace)
        for step in plan.steps:
            assert isinstance(step, Call)
            if step.method == UPLOAD:
                sent = {file.path: file.content.encode() for file in plan.files if file.path in step.sends}
                self._files.write(_launch_of(plan.run_directory), {**sent, **made_here})
            else:
                with _uninterrupted(f"{plan.handle}: is submitted"):
                    self._service.create(step.body)
        return plan.handle

    def runs(self) -> list[RunStatus]:
        """The newest job of each run, newest first."""
        newest: dict[str, CustomJobJson] = {}
        for job in self._service.jobs():
            newest.setdefault(str(job.get("displayName")), job)
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            return list(pool.map(self._status, newest.values()))

    def status(self, run: str) -> RunStatus:
        """The newest job of a run, with what its agents say."""
        return self._status(self._newest(run))

    def logs(self, run: str, wanted: LogSelection) -> Iterator[bytes]:
        """The nodes' logs from the bucket, merged; the agents put new lines there every few seconds."""
        from drillyard.launch.logs.reader import run_logs

        job = self._newest(run)
        name = str(job["name"])
        launch = posixpath.join(self._directory(job), "launch")
        return run_logs(launch, [self._files], wanted, over=lambda: is_over(self._service.job(name)))

    def cancel(self, run: str) -> Cancellation:
        """Have the service end every job of a run that is not over."""
        jobs = [self._newest(run), *self._service.jobs(run)[1:]]
        before = self._status(jobs[0]).state if all(is_over(job) for job in jobs) else None
        for job in jobs:
            if not is_over(job):
                # Then the agents, too, call it cancelled; where that cannot be told, the service's word is enough.
                with suppress(UserError):
                    mark = {"submission": job_id(job), "at": time.time()}
                    launch = _launch_of(self._directory(job))
                    self._files.write(launch, {"cancelled": json.dumps(mark).encode() + b"\n"})
                    self._files.remove(launch.below("secrets.json"))
                self._service.cancel(str(job["name"]))
        return Cancellation(self._status(self._service.job(str(jobs[0]["name"]))), before)

    def resume(self, run: str) -> Handle:
        """Create the job of a run that is over again, as it was planned, from what is in the bucket."""
        job = self._newest(run)
        handle = Handle("vertex", self._cluster.name, run)
        if not is_over(job):
            raise UserError(
                f"{handle}: is not over ({self._status(job).state}); `drillyard runs cancel {handle}` ends it"
            )
        launch = _launch_of(self._directory(job))
        request = launch.below(REQUEST_FILE)
        planned = self._files.text(request)
        if planned is None:
            raise UserError(f"{request.uri}: is gone, so the run cannot be submitted again as it was; launch it anew")
        values = secrets_file(names_in([self._files.text(launch.below(name)) or "" for name in _CONFIGS]))
        with _uninterrupted(f"{handle}: is submitted"):
            self._files.write(launch, {values.path: values.content.encode()})
            self._service.create(json.loads(planned))
        return handle

    def artifacts(self, run: str) -> list[tuple[str, int]]:
        """Files of the run directory."""
        return artifacts_of(self._files, self._directory(self._newest(run)))

    def fetch(self, run: str, paths: list[str], destination: str) -> None:
        """Copy files of the run directory to a directory here."""
        copy_files(self._files, self._directory(self._newest(run)), paths, destination)

    def read(self, run: str, path: str, offset: int) -> bytes:
        """A piece of a file of the run directory."""
        return read_file(self._files, posixpath.join(self._directory(self._newest(run)), path), offset)

    def _make_way(self, handle: Handle, replace: bool) -> None:
        """End what is there of a run, or refuse. Returns when nothing of it is left."""
        there = [job for job in self._service.jobs(handle.run) if not is_over(job)]
        if there and not replace:
            state = self._status(there[0])
            raise UserError(
                f"{handle}: is there already and {state.state} (job {job_id(there[0])}): follow it with `drillyard "
                f"runs logs {handle}`, end it with `drillyard runs cancel {handle}`, or give --replace"
            )
        for job in there:
            self._service.cancel(str(job["name"]))
        deadline = time.monotonic() + _PATIENCE_FOR_CANCEL_SECONDS
        for job in there:
            while not is_over(self._service.job(str(job["name"]))):
                if time.monotonic() > deadline:
                    raise UserError(f"{handle}: the service has not ended job {job_id(job)} yet; try again in a while")
                time.sleep(_POLL_SECONDS)

    def _newest(self, run: str) -> CustomJobJson:
        jobs = self._service.jobs(run)
        if not jobs:
            known = list(dict.fromkeys(str(job.get("displayName")) for job in self._service.jobs()))
            names = f"the runs there are: {', '.join(known[:20])}" if known else "it has none yet"
            raise NotFoundError(f"cluster {self._cluster.name} has no run '{run}'; {names}")
        return jobs[0]

    def _status(self, job: CustomJobJson) -> RunStatus:
        bare = status_of(job, None, self._cluster.name)
        if bare.state in (State.queued, State.succeeded) or bare.run_directory is None:
            return bare
        return status_of(job, self._told(bare.run_directory), self._cluster.name)

    def _told(self, run_directory: str) -> dict[str, Any] | None:
        """The run's state.json; None where there is none or it cannot be read: the service's word stands alone."""
        with suppress(UserError, ValueError):
            told = json.loads(self._files.text(_launch_of(run_directory).below("state.json")) or "{}")
            return told if isinstance(told, dict) else None
        return None

    def _directory(self, job: CustomJobJson) -> str:
        directory = status_of(job, None, self._cluster.name).run_directory
        if directory is None:
            raise UserError(f"job {job_id(job)} has no directory in a bucket: it was not made by `drillyard launch`")
        return directory


def _launch_of(run_directory: str) -> BucketPath:
    return BucketPath.at(run_directory).below("launch")


def _made_at_submission(plan: Plan) -> dict[str, bytes]:
    """The files that are in no plan: how agents know each other, and the values of ${env:NAME}."""
    values = secrets_file(secret_names(plan.files))
    return {"secret": secrets.token_hex(32).encode() + b"\n", values.path: values.content.encode()}


@contextmanager
def _uninterrupted(done: str) -> Iterator[None]:
    """Ctrl-C waits: what is created is told. A handler, not a mask, which would hold back this thread's signals only:
    the service's client may have threads of its own."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: heard.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if heard:
        print_notice(f"{done}; Ctrl-C came too late to prevent it")
