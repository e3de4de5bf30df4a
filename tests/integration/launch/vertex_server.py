"""Vertex AI's custom jobs on this machine: the REST interface of JobService, judged by Google's own
types.

Every request is parsed into the protobuf that it claims to be, with unknown fields refused, and
held against the rules that the service documents; what breaks one is answered as the service does
it, with google.rpc details. A job goes through states when a test says so, or really runs:
`Replicas` starts the containers' command as processes of this host, one per replica, with
CLUSTER_SPEC and a directory in the place of /gcs.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from google.cloud.aiplatform_v1.types import CustomJob, JobState, ListCustomJobsResponse, Scheduling
from google.protobuf import json_format
from google.rpc import code_pb2, status_pb2

PROJECT, REGION = "my-project", "us-central1"
TERMINAL = ("SUCCEEDED", "FAILED", "CANCELLED", "EXPIRED")
_HTTP = {
    "INVALID_ARGUMENT": 400,
    "FAILED_PRECONDITION": 400,
    "PERMISSION_DENIED": 403,
    "NOT_FOUND": 404,
}
_HTTP |= {"RESOURCE_EXHAUSTED": 429, "UNAVAILABLE": 503}
_PATH = re.compile(
    r"/v1/projects/(?P<project>[^/]+)/locations/(?P<region>[^/]+)/customJobs(/(?P<id>\d+))?(?P<verb>:\w+)?"
)
_CLAUSE = re.compile(r"(?P<key>labels\.[\w-]+|state|display_name)=\"?(?P<value>[^\"\s]+)\"?")


class Refusal(Exception):
    """An answer other than 200."""

    def __init__(
        self, status: str, message: str, details: list[dict[str, Any]] | None = None
    ) -> None:
        super().__init__(message)
        self.body = {
            "error": {
                "code": _HTTP[status],
                "message": message,
                "status": status,
                "details": details or [],
            }
        }
        self.code = _HTTP[status]


def refuse_field(path: str, description: str) -> Refusal:
    """INVALID_ARGUMENT as the service details it."""
    bad = {
        "@type": "type.googleapis.com/google.rpc.BadRequest",
        "fieldViolations": [{"field": path, "description": description}],
    }
    return Refusal("INVALID_ARGUMENT", "List of found errors: 1. See details.", [bad])


@dataclass
class Vertex:
    """The service. `refuse_next`: answers to the next requests, whatever they ask."""

    jobs: dict[str, CustomJob] = field(default_factory=dict)
    requests: list[tuple[str, str]] = field(default_factory=list)
    """Method and path of each request, with its query."""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    """The custom jobs that were asked for, as they came over the wire."""
    refuse_next: list[Refusal] = field(default_factory=list)
    on_created: Callable[[CustomJob], None] | None = None
    on_cancelled: Callable[[CustomJob], None] | None = None
    loses_answer_to_create: bool = False
    """Makes the next job and closes the connection without a word."""
    page_size: int = 2
    """However many a client asks for: so paging is always used."""
    port: int = 0

    def __enter__(self) -> Vertex:
        service = self

        class Handler(_Handler):
            vertex = service

        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def newest(self) -> CustomJob:
        return list(self.jobs.values())[-1]

    def enter(self, job: CustomJob, state: str, error: tuple[int, str] | None = None) -> None:
        """The job comes into a state: QUEUED, PENDING, RUNNING, ..."""
        now = _now()
        job.state, job.update_time = JobState[f"JOB_STATE_{state}"], now
        if state == "RUNNING" and not job.start_time:
            job.start_time = now
        if state in TERMINAL:
            job.end_time = now
        if error is not None:
            job.error = status_pb2.Status(code=error[0], message=error[1])

    def create(self, project: str, region: str, body: bytes) -> CustomJob:
        self.bodies.append(json.loads(body))
        if (project, region) != (PROJECT, REGION):
            raise Refusal(
                "NOT_FOUND",
                f"The project or location projects/{project}/locations/{region} was not found.",
            )
        try:
            job = CustomJob(json_format.Parse(body, CustomJob.pb()(), ignore_unknown_fields=False))
        except json_format.ParseError as error:
            raise Refusal("INVALID_ARGUMENT", f"Invalid JSON payload received. {error}") from None
        for path, wrong in violations(job):
            raise refuse_field(path, wrong)
        number = str(4_000_000_000_000_000_000 + len(self.jobs) + 1)
        job.name = f"projects/123456789/locations/{region}/customJobs/{number}"
        job.create_time = _now()
        self.enter(job, "QUEUED")
        self.jobs[number] = job
        if self.on_created is not None:
            self.on_created(job)
        return job

    def list(self, query: dict[str, list[str]]) -> ListCustomJobsResponse:
        wanted = query.get("filter", [""])[0]
        clauses = [] if not wanted else wanted.split(" AND ")
        matching = [
            job for job in self.jobs.values() if all(_holds(job, clause) for clause in clauses)
        ]
        begin = int(query.get("pageToken", ["0"])[0] or 0)
        page = matching[begin : begin + self.page_size]
        more = begin + self.page_size < len(matching)
        return ListCustomJobsResponse(
            custom_jobs=page, next_page_token=str(begin + self.page_size) if more else ""
        )

    def get(self, number: str) -> CustomJob:
        if number not in self.jobs:
            raise Refusal("NOT_FOUND", f"The CustomJob {number} does not exist.")
        return self.jobs[number]

    def cancel(self, number: str) -> None:
        job = self.get(number)
        if job.state.name.removeprefix("JOB_STATE_") in TERMINAL:
            raise Refusal(
                "FAILED_PRECONDITION",
                f"The job is in state {job.state.name}, which cannot be cancelled.",
            )
        self.enter(job, "CANCELLING")
        if self.on_cancelled is not None:
            self.on_cancelled(job)
        else:
            self.enter(job, "CANCELLED", (code_pb2.CANCELLED, "CANCELED"))


def violations(job: CustomJob) -> Iterator[tuple[str, str]]:
    """What the service's documentation forbids, field by field."""
    if not job.display_name:
        yield "custom_job.display_name", "Required field is not set."
    if len(job.display_name) > 128:
        yield "custom_job.display_name", "must have no more than 128 characters."
    for key, value in job.labels.items():
        if (
            len(key) > 63
            or len(value) > 63
            or re.search("[^a-z0-9_-]", key + value)
            or not key[:1].isalpha()
        ):
            yield "custom_job.labels", f"Invalid label {key}: {value}"
    spec = job.job_spec
    if not spec.worker_pool_specs:
        yield "custom_job.job_spec.worker_pool_specs", "Required field is not set."
    for number, pool in enumerate(spec.worker_pool_specs):
        where = f"custom_job.job_spec.worker_pool_specs[{number}]"
        if number == 0 and pool.replica_count != 1:
            yield f"{where}.replica_count", "must be 1 for the chief worker pool."
        if pool.replica_count < 1:
            yield f"{where}.replica_count", "must be positive."
        if not pool.machine_spec.machine_type:
            yield f"{where}.machine_spec.machine_type", "Required field is not set."
        if bool(pool.machine_spec.accelerator_type) != bool(pool.machine_spec.accelerator_count):
            yield f"{where}.machine_spec", "accelerator_type and accelerator_count belong together."
        if not pool.container_spec.image_uri:
            yield f"{where}.container_spec.image_uri", "Required field is not set."
        if len(pool.container_spec.env) > 100:
            yield f"{where}.container_spec.env", "at most 100 environment variables."
        affinity = pool.machine_spec.reservation_affinity
        if affinity.reservation_affinity_type.name == "SPECIFIC_RESERVATION" and not (
            affinity.key and affinity.values
        ):
            yield f"{where}.machine_spec.reservation_affinity", "key and values are required."
        if any(
            not re.fullmatch("projects/[^/]+/zones/[^/]+/reservations/[^/]+", value)
            for value in affinity.values
        ):
            yield (
                f"{where}.machine_spec.reservation_affinity.values",
                "must be full resource names.",
            )
        spot = spec.scheduling.strategy in (
            Scheduling.Strategy.SPOT,
            Scheduling.Strategy.FLEX_START,
        )
        if spot and affinity.reservation_affinity_type.name == "SPECIFIC_RESERVATION":
            yield (
                f"{where}.machine_spec.reservation_affinity",
                "spot and flex-start use no reservation.",
            )
    scheduling = spec.scheduling
    seven_days = 7 * 24 * 3600
    if (
        scheduling.strategy == Scheduling.Strategy.FLEX_START
        and scheduling.timeout.total_seconds() > seven_days
    ):
        yield "custom_job.job_spec.scheduling.timeout", "at most 7 days with FLEX_START."
    if "max_wait_duration" in scheduling and scheduling.strategy != Scheduling.Strategy.FLEX_START:
        yield "custom_job.job_spec.scheduling.max_wait_duration", "only with FLEX_START."
    if spec.network and not re.fullmatch(r"projects/\d+/global/networks/[\w-]+", spec.network):
        yield "custom_job.job_spec.network", "must be projects/NUMBER/global/networks/NAME."
    if spec.tensorboard and not spec.service_account:
        yield "custom_job.job_spec.service_account", "required with tensorboard."
    output = spec.base_output_directory.output_uri_prefix
    if output and not output.startswith("gs://"):
        yield (
            "custom_job.job_spec.base_output_directory.output_uri_prefix",
            "must be a Cloud Storage URI.",
        )


class _Handler(BaseHTTPRequestHandler):
    vertex: Vertex
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self._answer(lambda parts, query: self._post(parts, body))

    def _get(self, parts: dict[str, str | None], query: dict[str, list[str]]) -> Any:
        return self.vertex.get(parts["id"]) if parts["id"] else self.vertex.list(query)

    def _post(self, parts: dict[str, str | None], body: bytes) -> Any:
        if parts["id"] and parts["verb"] == ":cancel":
            self.vertex.cancel(parts["id"])
            return None
        assert parts["id"] is None and parts["verb"] is None, parts
        job = self.vertex.create(str(parts["project"]), str(parts["region"]), body)
        if self.vertex.loses_answer_to_create:
            self.vertex.loses_answer_to_create = False
            raise ConnectionAbortedError
        return job

    def _answer(self, act: Callable[[dict[str, str | None], dict[str, list[str]]], Any]) -> None:
        url = urlsplit(self.path)
        self.vertex.requests.append((self.command, self.path))
        found = _PATH.fullmatch(url.path)
        try:
            if self.headers.get("Authorization"):
                raise Refusal("INVALID_ARGUMENT", "credentials over an unencrypted connection")
            if self.vertex.refuse_next:
                raise self.vertex.refuse_next.pop(0)
            if found is None:
                raise Refusal("NOT_FOUND", f"no such method: {url.path}")
            message = act(found.groupdict(), parse_qs(url.query))
            self._send(
                200,
                (
                    "{}"
                    if message is None
                    else type(message).to_json(message, use_integers_for_enums=False)
                ),
            )
        except Refusal as refusal:
            self._send(refusal.code, json.dumps(refusal.body))
        except ConnectionAbortedError:
            self.close_connection = True

    def _send(self, code: int, text: str) -> None:
        content = text.encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json; charset=UTF-8")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: object) -> None:
        """Say nothing."""


def _holds(job: CustomJob, clause: str) -> bool:
    found = _CLAUSE.fullmatch(clause.strip())
    if found is None:
        raise Refusal("INVALID_ARGUMENT", f"Invalid filter: {clause}")
    key, value = found["key"], found["value"]
    if key == "state":
        return job.state.name == value
    return (
        job.display_name == value
        if key == "display_name"
        else job.labels.get(key.partition(".")[2]) == value
    )


def _now() -> Any:
    from google.protobuf.timestamp_pb2 import Timestamp

    now = Timestamp()
    now.FromNanoseconds(time.time_ns())
    return now


class Replicas:
    """The replicas of a job as processes of this host. `place`: where their output goes; the job's
    paths are real."""

    def __init__(self, vertex: Vertex, job: CustomJob, place: Path) -> None:
        self._vertex = vertex
        self.job = job
        self._place = place
        counts = [int(pool.replica_count) for pool in job.job_spec.worker_pool_specs]
        self.places = [(pool, index) for pool, count in enumerate(counts) for index in range(count)]
        self._cluster = {
            f"workerpool{pool}": ["127.0.0.1:2222"] * count for pool, count in enumerate(counts)
        }
        self.processes = {place: self.start(*place) for place in self.places}
        self.restarts = 0

    def start(self, pool: int, index: int) -> subprocess.Popen[bytes]:
        """Start one replica's container command."""
        container = self.job.job_spec.worker_pool_specs[pool].container_spec
        command = [*container.command, *container.args]
        spec = {
            "cluster": self._cluster,
            "environment": "cloud",
            "task": {"type": f"workerpool{pool}", "index": index, "trial": ""},
            "job": "{}",
        }
        environment = {
            **os.environ,
            **{each.name: each.value for each in container.env},
            "CLUSTER_SPEC": json.dumps(spec),
            "CLOUD_ML_JOB_ID": self.job.name.rpartition("/")[2],
        }
        with (self._place / f"replica-{pool}-{index}.out").open("ab") as out:
            return subprocess.Popen(
                command, env=environment, stdout=out, stderr=out, start_new_session=True
            )

    def kill(self, pool: int, index: int) -> None:
        """What a lost machine is to the others."""
        self.processes[pool, index].kill()
        self.processes[pool, index].wait()

    def run(self, max_restarts: int = 5) -> None:
        """What the service does: a replica that ends with an error is started again, up to five
        times; the chief's exit with 0 is the job's end."""
        while self.processes[0, 0].poll() != 0:
            for place, process in self.processes.items():
                if process.poll() not in (None, 0):
                    if self.restarts >= max_restarts:
                        self.end()
                        name = f"workerpool{place[0]}-{place[1]}"
                        message = (
                            f"The replica {name} exited with a non-zero status of"
                            f" {process.returncode}."
                        )
                        self._vertex.enter(self.job, "FAILED", (code_pb2.INVALID_ARGUMENT, message))
                        return
                    self.restarts += 1
                    self.processes[place] = self.start(*place)
            time.sleep(0.05)
        self.end()
        self._vertex.enter(self.job, "SUCCEEDED")

    def end(self) -> None:
        """End what still runs."""
        for process in self.processes.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
        for process in self.processes.values():
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
