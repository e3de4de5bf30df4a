"""The plan of a place for custom jobs of Vertex AI: resources, quotas, and what a run costs.

The service makes the machines for each run, so nothing stands, and nothing costs anything, while no
run goes on (stored data apart).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from drillyard.config.cluster import ClusterConfig
from drillyard.config.problems import Problem, raise_all
from drillyard.hardware.capacity import quota_needed
from drillyard.hardware.catalog import Catalog
from drillyard.launch.vertex.config import VertexConfig
from drillyard.launch.vertex.custom_job import service_of
from drillyard.provision.cluster_plan import ClusterPlan, PlannedResource, Pool
from drillyard.provision.gcp.names import state_bucket_name
from drillyard.provision.gcp.place_rules import place_problems
from drillyard.provision.gcp.project_services import add_project_services
from drillyard.provision.gcp.providers import required_providers
from drillyard.provision.gcp.settings import GoogleSettings, read_settings
from drillyard.provision.gcp.storage import add_bucket, add_bucket_access, add_registry
from drillyard.provision.pools import read_pools
from drillyard.provision.prices import cluster_prices
from drillyard.provision.terraform_document import TerraformDocument
from drillyard.provision.vertex.job_identity import add_job_identity, job_account, makes_account
from drillyard.provision.vertex.private_access import (
    add_private_access,
    makes_network,
    peering_range_name,
)
from drillyard.provision.vertex.vertex_rules import vertex_machine_problems, vertex_setting_problems

SERVICES = {
    "cloudresourcemanager.googleapis.com": "roles on the project",
    "iam.googleapis.com": "the service account of the jobs",
    "logging.googleapis.com": "logs of the jobs",
    "storage.googleapis.com": "the bucket, and Terraform's state",
    "artifactregistry.googleapis.com": "images",
    "cloudasset.googleapis.com": "`drillyard cluster leaks` looks for what is left",
    "aiplatform.googleapis.com": "the jobs",
}
"""APIs of the project, each with what needs it, in the order of creation."""
NETWORK_SERVICES = {
    "compute.googleapis.com": "the VPC of the jobs",
    "servicenetworking.googleapis.com": "the peering by which jobs are reached from the VPC",
}


def vertex_plan(cluster: ClusterConfig, facts: Catalog) -> ClusterPlan:
    """The plan. Raises one UserError with all that the config, the machine or the service's rules
    do not allow."""
    raise_all(vertex_problems(cluster, facts), cluster._origin.places)
    settings = read_settings(cluster, facts)
    project, region = settings.project, settings.region
    pool = _pool(settings)
    assert pool is not None, "refused by vertex_problems"
    document = TerraformDocument()
    services = {**SERVICES, **(NETWORK_SERVICES if makes_network(cluster) else {})}
    _render(document, settings, services)
    state_bucket = _state_bucket(settings)
    state = PlannedResource(
        "", "google_storage_bucket", state_bucket, region, labelled=True, made_by="drillyard"
    )
    # The boot disks of the jobs are those of the launch.
    disk_gib = cluster.section_as(VertexConfig).boot_disk_gb
    disks = settings.creation.model_copy(update={"disk_gib": disk_gib})
    return ClusterPlan(
        name=cluster.name,
        platform=cluster.platform,
        project=project,
        region=region,
        zone=pool.zone,
        pools=(pool,),
        terraform=document.as_json(
            {"google": {"project": project, "region": region}}, required_providers()
        ),
        state_bucket=state_bucket,
        resources=(state, *document.resources),
        prices=cluster_prices((pool,), disks, facts, controllers=False, way_out=False),
        quotas=tuple(quota_needed(cluster, facts)),
        services=tuple(services),
        warnings=tuple(_warnings(settings, pool)),
        fields=tuple(document.fields),
        labels=settings.labels,
        existing_bucket=cluster.storage.bucket if settings.creation.existing_bucket else None,
        job_network=_given_network(cluster),
        launch_settings=_launch_settings(cluster),
        job_service=service_of(cluster),
    )


def vertex_problems(cluster: ClusterConfig, facts: Catalog) -> list[Problem]:
    """What the config, the machine or the service's rules do not allow. A config without project,
    region, machine, consumption or bucket has the problems that its own check names, and no
    others."""
    location = cluster.location
    if location is None or location.project is None or location.region is None:
        return []
    settings = read_settings(cluster, facts)
    found, problems = read_pools(cluster, facts, per_run=True)
    # Of `cluster.pools` one rule says all.
    own = [each for each in problems if each.path[:2] != ("cluster", "pools")]
    pool = _pool(settings)
    if pool is None or not found or cluster.storage.bucket is None:
        return own
    places = list(place_problems(cluster, [pool], facts))
    reported = {each.path for each in (*own, *places)}
    of_machine = vertex_machine_problems(cluster, pool, facts)
    return [
        *own,
        *places,
        # A region that is not one is not said twice.
        *(each for each in of_machine if each.path not in reported),
        *vertex_setting_problems(cluster, settings.creation, _state_bucket(settings), facts),
    ]


def _pool(settings: GoogleSettings) -> Pool | None:
    """What the jobs run on; None where the machine is not known."""
    found, _ = read_pools(settings.cluster, settings.facts, per_run=True)
    return next((each for each in found if not each.key), None)


def _state_bucket(settings: GoogleSettings) -> str:
    return settings.creation.state_bucket or state_bucket_name(settings.project, settings.name)


def _render(
    document: TerraformDocument, settings: GoogleSettings, services: Mapping[str, str]
) -> None:
    """Add all resources in the order of creation."""
    cluster = settings.cluster
    add_project_services(document, services)
    if makes_network(cluster):
        add_private_access(document, settings)
    member = add_job_identity(document, settings)
    bucket = cluster.storage.bucket
    assert bucket is not None, "required by the platform"
    if not settings.creation.existing_bucket:
        made = add_bucket(document, settings)
        assert made is not None
        bucket = made[0]
    add_bucket_access(document, settings, bucket, member, "jobs")
    if settings.creation.registry:
        add_registry(document, settings)


def _given_network(cluster: ClusterConfig) -> str:
    """The VPC of the user's, also a shared one; empty where there is none."""
    network = cluster.section_as(VertexConfig).network
    return "" if network is None or makes_network(cluster) else network


def _launch_settings(cluster: ClusterConfig) -> dict[str, Any]:
    """The keys of `vertex:` with which `drillyard launch` uses what was made, also those that the
    config has."""
    section: dict[str, Any] = {"service_account": job_account(cluster)}
    if makes_network(cluster):
        section["network"] = cluster.section_as(VertexConfig).network
        section["reserved_ip_ranges"] = [peering_range_name(cluster.name)]
    return {"vertex": section}


def _warnings(settings: GoogleSettings, pool: Pool) -> Iterator[str]:
    """What cannot be undone, and what the plan cannot check."""
    cluster, section = settings.cluster, settings.cluster.section_as(VertexConfig)
    account = job_account(cluster)
    yield (
        "prices are those of Compute Engine's machines, while a run goes on; Vertex AI bills a"
        " management fee beside them: https://cloud.google.com/vertex-ai/pricing"
    )
    yield (
        f"who launches needs roles/aiplatform.user in {settings.project}, roles/storage.objectUser"
        f" on gs://{cluster.storage.bucket} and roles/iam.serviceAccountUser on {account}"
    )
    if settings.creation.existing_bucket:
        yield (
            f"storage.bucket: gs://{cluster.storage.bucket} must exist; the jobs may then write to"
            " it and delete"
        )
    if not makes_account(cluster):
        yield f"vertex.service_account: {account} must exist; it gets rights on the bucket alone"
    if section.network is not None and not makes_network(cluster):
        yield (
            f"vertex.network: {section.network} must exist and be peered with Google's services,"
            " and stays as it is; one of the cluster's own has its name:"
            f" projects/NUMBER/global/networks/{cluster.name}"
        )
    if pool.consumption == "reservation":
        yield (
            f"{', '.join(pool.reservations)}: must be shared with Vertex AI"
            " (--reservation-sharing-policy=ALLOW_ALL), and is billed whether jobs use it or not"
        )
