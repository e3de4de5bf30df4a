"""Platform `vertex`: runs as custom jobs of Vertex AI; the job is in the service, the run directory
in a bucket.

Jobs are found by their labels, so every machine sees the same runs; one whose run directory is not
in the cluster's bucket is somebody else's and left alone. The service reports whether a
job waits, runs or has ended; state.json and the logs, which the agents write into the bucket, hold
the rest. Cloud Logging has the same lines: `gcloud ai custom-jobs stream-logs ID --region REGION`.
Of several launches of a name at once, the one that gets the submit lock makes its job; the others
are refused (submit_lock.py).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from drillyard.errors import UserError
from drillyard.launch.agent.state_file import is_state, json_object
from drillyard.launch.launcher import Launcher
from drillyard.launch.plan import Call, Plan, new_secret
from drillyard.launch.request import LaunchRequest
from drillyard.launch.run_status import Handle, RunStatus, State
from drillyard.launch.submit_lock import being_launched_error
from drillyard.launch.vertex.config import bucket_of, uri_of
from drillyard.launch.vertex.custom_job import REQUEST_FILE, plan_of
from drillyard.launch.vertex.run_status import is_made_here, is_over, job_id, status_of
from drillyard.launch.vertex.submit_lock import submit_lock
from drillyard.plan_files import PlanFile
from drillyard.programs import defer_interrupt, parallel_map

if TYPE_CHECKING:
    from drillyard.launch.vertex.bucket_files import BucketFiles
    from drillyard.launch.vertex.service import Service

_CANCEL_SECONDS = 600.0
_POLL_SECONDS = 2.0
_MAX_PARALLEL = 16


@dataclass(frozen=True)
class VertexRun:
    """A run, by its newest job."""

    job: dict[str, Any]
    status: RunStatus

    @property
    def job_title(self) -> str:
        return f"job {job_id(self.job)}"

    @property
    def launch_directory(self) -> str:
        """As containers see it."""
        return f"{self.status.run_directory}/launch"


class VertexLauncher(Launcher[VertexRun]):
    """Runs of one cluster on Vertex AI."""

    @cached_property
    def _service(self) -> Service:
        from drillyard.launch.vertex.service import Service

        return Service(self.cluster)

    _files: BucketFiles

    def plan(self, request: LaunchRequest) -> Plan:
        return plan_of(request)

    def check(self, plan: Plan) -> None:
        from drillyard.launch.vertex.service import parse_request

        for step in plan.steps[1:]:
            assert isinstance(step, Call)
            parse_request(step.body)

    def newest_submission(self, run: str) -> str | None:
        return next((job_id(job) for job in self._jobs(run)), None)

    @contextmanager
    def submit_lock(self, handle: Handle, seen: str | None) -> Iterator[None]:
        with submit_lock(self._files, self.cluster, handle, _CANCEL_SECONDS):
            newest = self.newest_submission(handle.run)
            if newest not in (None, seen):
                raise being_launched_error(handle, f"job {newest}")
            yield

    def drain(self, node: str, reason: str) -> str | None:
        instead = "the service chooses machines: launch again, and report this one to its support"
        raise UserError(self._cannot_drain(node, instead))

    def find(self, names: Collection[str] | None = None) -> list[VertexRun]:
        """All submissions of the runs of `names`; else the newest one of each run."""
        if names is not None:
            return [self._run_of(job) for name in names for job in self._jobs(name)]
        newest: dict[str, dict[str, Any]] = {}
        for job in self._jobs():
            newest.setdefault(str(job.get("displayName")), job)
        return parallel_map(self._run_of, list(newest.values()), _MAX_PARALLEL)

    def _jobs(self, run: str | None = None) -> list[dict[str, Any]]:
        """The jobs of this cluster, or of one run, newest first: those with its labels whose run
        directory is in its bucket."""
        labelled = self._service.jobs(run)
        bucket = bucket_of(self.cluster)
        return [
            job
            for job in labelled
            if is_made_here(job, bucket) and run in (None, job.get("displayName"))
        ]

    def files(self) -> BucketFiles:
        from drillyard.launch.vertex.bucket_files import BucketFiles

        return BucketFiles(self.cluster)

    def execute(self, plan: Plan, secrets_json: PlanFile, existing: Sequence[VertexRun]) -> None:
        self._await_end(existing)
        _, create = plan.steps
        assert isinstance(create, Call)
        sent = (*plan.files, new_secret(), secrets_json)
        self._files.write(
            plan.launch_directory, {file.path: file.content.encode() for file in sent}
        )
        with defer_interrupt(str(plan.handle)):
            self._service.create(create.body)

    def _await_end(self, runs: Sequence[VertexRun]) -> None:
        """Wait until the service has ended the jobs of runs that were cancelled."""
        deadline = time.monotonic() + _CANCEL_SECONDS
        for run in runs:
            while not is_over(self._service.job(run.job["name"])):
                if time.monotonic() > deadline:
                    what = f"{run.status.handle}: the service has not ended {run.job_title} yet"
                    raise UserError(f"{what}; try again later")
                time.sleep(_POLL_SECONDS)

    def resubmit(self, run: VertexRun, secrets_json: PlanFile) -> None:
        launch = run.launch_directory
        request = f"{launch}/{REQUEST_FILE}"
        planned = self._files.text(request)
        if planned is None:
            raise UserError(
                f"{uri_of(request)}: was deleted, so the run cannot be submitted again; launch its"
                " run config again"
            )
        with defer_interrupt(str(run.status.handle)):
            self._files.write(launch, {secrets_json.path: secrets_json.content.encode()})
            self._service.create(json.loads(planned))

    def may_still_run(self, run: VertexRun) -> bool:
        # Jobs of earlier submissions.
        return any(not is_over(job) for job in self._jobs(run.status.handle.run))

    def stop(self, run: VertexRun) -> RunStatus:
        for job in self._jobs(run.status.handle.run):
            if is_over(job):
                continue
            # So that the agents report it as cancelled; without a bucket the service's state is
            # enough.
            with suppress(UserError):
                record = {"submission": job_id(job), "at": time.time()}
                launch = self._run_of(job).launch_directory
                self._files.write(launch, {"cancelled": json.dumps(record).encode() + b"\n"})
                self._files.remove(f"{launch}/secrets.json")
            self._service.cancel(str(job["name"]))
        return self._run_of(self._service.job(str(run.job["name"]))).status

    def is_over(self, run: VertexRun) -> Callable[[], bool]:
        name = str(run.job["name"])
        return lambda: is_over(self._service.job(name))

    def _run_of(self, job: dict[str, Any]) -> VertexRun:
        """A job with the state.json of its run, where that is readable; else the service's state
        alone."""
        bare = status_of(job, {}, self.cluster.name)
        if bare.state in (State.queued, State.succeeded) or bare.run_directory is None:
            return VertexRun(job, bare)
        own: dict[str, Any] = {}
        with suppress(UserError):
            own = json_object(self._files.text(f"{bare.run_directory}/launch/state.json") or "")
        if not is_state(own):
            own = {}
        return VertexRun(job, status_of(job, own, self.cluster.name))
