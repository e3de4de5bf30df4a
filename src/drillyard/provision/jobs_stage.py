"""The part of `down` and `status` that asks the service of jobs (Vertex AI): which of the cluster's
go on, and whether what they need is there."""

from __future__ import annotations

from typing import Any

from drillyard.config.cluster import ClusterConfig, cluster_model
from drillyard.errors import UserError
from drillyard.launch.vertex.run_status import is_over, job_id
from drillyard.provision.clouds import state_bucket
from drillyard.provision.cluster_objects import ClusterObjects, PoolStatus, QueueStatus
from drillyard.provision.cluster_plan import ClusterPlan
from drillyard.provision.google.endpoints import endpoints

_BUCKET = "google_storage_bucket"


def require_programs(plan: ClusterPlan) -> None:
    """Nothing: jobs are asked for by Google's client, which `up` needs anyway."""


def running_jobs(plan: ClusterPlan) -> list[str]:
    """The custom jobs with the cluster's label that have not ended, of any user: run and job.
    Raises UnreachableError where the service does not answer, UserError where it refuses."""
    return [f"{job.get('displayName')} (job {job_id(job)})" for job in _active(plan)]


def jobs_status(plan: ClusterPlan) -> ClusterObjects:
    """Whether what jobs need is made, and what runs now. Raises UserError where nothing is made
    yet, or the state or the service cannot be read."""
    bucket = state_bucket(plan)
    state = {} if bucket.find() is None else bucket.resources()
    if not state:
        raise UserError(f"none is made yet, by {bucket.title}")
    missing = [
        f"{each.kind.removeprefix('google_').replace('_', ' ')} {each.name}: not made yet"
        for each in plan.made_by_terraform
        if each.address not in state
    ]
    (pool,) = plan.pools
    active = _active(plan)
    running = [each for each in active if each.get("state") == "JOB_STATE_RUNNING"]
    began = [(str(each["startTime"]), _nodes(each)) for each in running if each.get("startTime")]
    made_at = tuple(when for when, nodes in began for _ in range(nodes))
    nodes = sum(map(_nodes, running))
    status = PoolStatus(pool.name, nodes, nodes, None, True, made_at)
    queue = QueueStatus("Vertex AI", pool.name, True, "", len(running), len(active) - len(running))
    made = [str(each.attributes["time_created"]) for each in state.values() if each.kind == _BUCKET]
    return ClusterObjects(made[0] if made else "", (status,), (queue,), (), tuple(missing))


def _nodes(job: dict[str, Any]) -> int:
    pools = job.get("jobSpec", {}).get("workerPoolSpecs", [])
    return sum(int(each.get("replicaCount") or 0) for each in pools)


def _active(plan: ClusterPlan) -> list[dict[str, Any]]:
    from drillyard.launch.vertex.service import Service, ServiceDisabledError
    from drillyard.provision.google.api import google_apis

    try:
        jobs = Service(_cluster(plan)).jobs()
    except ServiceDisabledError as error:
        # As an `up` that ended early leaves it. That of another project, whose quota the
        # credentials use, says nothing of this one.
        if error.consumer not in (plan.project, google_apis(plan.project).number()):
            raise
        return []
    return [job for job in jobs if not is_over(job)]


def _cluster(plan: ClusterPlan) -> ClusterConfig:
    """What the client needs to know of the config: whose jobs, where, and the service's address."""
    address = endpoints().address("aiplatform") or plan.job_service
    assert address is not None
    return cluster_model().model_validate(
        {
            "name": plan.name,
            "platform": plan.platform,
            "location": {"project": plan.project, "region": plan.region},
            plan.platform: {"endpoint": address},
        }
    )
