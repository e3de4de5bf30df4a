"""The service account that the containers of custom jobs run as.

Without one they run as an agent of the service, which may read and write everything of the project
(https://cloud.google.com/vertex-ai/docs/general/custom-service-account). Images are pulled by the
service's own agent, which may read those of the project.
"""

from __future__ import annotations

from drillyard.config.cluster import ClusterConfig
from drillyard.launch.vertex.config import VertexConfig
from drillyard.provision.gcp.names import (
    LONGEST_SERVICE_ACCOUNT,
    service_account_email,
    shortened,
)
from drillyard.provision.gcp.node_identity import ServiceAccount, add_service_account
from drillyard.provision.gcp.settings import GoogleSettings
from drillyard.provision.terraform_document import TerraformDocument, reference

JOB_ROLES = {"roles/logging.logWriter": "logs of the jobs"}
TENSORBOARD_ROLES = {"roles/aiplatform.user": "vertex.tensorboard, which the jobs write to"}
"""https://cloud.google.com/vertex-ai/docs/experiments/tensorboard-training"""


def own_account(cluster: ClusterConfig) -> str:
    """The address of the account that is made where the config names no other."""
    assert cluster.location is not None and cluster.location.project is not None
    return service_account_email(_id(cluster), cluster.location.project)


def job_account(cluster: ClusterConfig) -> str:
    """The address of the account that the containers run as."""
    return cluster.section_as(VertexConfig).service_account or own_account(cluster)


def makes_account(cluster: ClusterConfig) -> bool:
    """Whether it is made here: the config names none, or the one that `up` has written into it."""
    return job_account(cluster) == own_account(cluster)


def add_job_identity(document: TerraformDocument, settings: GoogleSettings) -> str:
    """Add the account and its roles, where it is made here; an expression of its member."""
    cluster = settings.cluster
    if not makes_account(cluster):
        return f"serviceAccount:{job_account(cluster)}"
    tensorboard = cluster.section_as(VertexConfig).tensorboard
    roles = {**JOB_ROLES, **(TENSORBOARD_ROLES if tensorboard else {})}
    account = ServiceAccount(
        "jobs",
        _id(cluster),
        "the jobs",
        "an account of the jobs' own: without one they may read and write the whole project",
    )
    address, *_ = add_service_account(document, settings, account, roles)
    return reference(address, "member")


def _id(cluster: ClusterConfig) -> str:
    return shortened(cluster.name, "-jobs", LONGEST_SERVICE_ACCOUNT)
