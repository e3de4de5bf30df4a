"""The plan of a Slurm cluster: the files that Cluster Toolkit deploys, prices, quotas, and what the
config needs for `launch` once it is made."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from drillyard.config.cluster import ClusterConfig
from drillyard.config.problems import Problem, raise_all
from drillyard.hardware.capacity import quota_needed
from drillyard.hardware.catalog import Catalog
from drillyard.launch.slurm.config import SlurmConfig
from drillyard.provision.cluster_plan import (
    ClusterPlan,
    ExistingNetwork,
    PlannedResource,
    ToolkitDeployment,
)
from drillyard.provision.gcp.address_ranges import range_problems
from drillyard.provision.gcp.node_network import existing_network, is_shared, network_warning
from drillyard.provision.gcp.place_rules import place_problems
from drillyard.provision.gcp.settings import read_settings
from drillyard.provision.pools import read_pools
from drillyard.provision.toolkit.accounts import CONTROLLER, ROLES, account_email, account_of
from drillyard.provision.toolkit.blueprint import TERRAFORM_GROUPS, slurm_blueprint
from drillyard.provision.toolkit.deployment_files import deployment_files
from drillyard.provision.toolkit.settings import HOME, SlurmCluster, read_slurm_cluster
from drillyard.provision.toolkit.slurm_prices import slurm_prices
from drillyard.provision.toolkit.toolkit_rules import toolkit_problems

_SERVICES = (
    *("cloudresourcemanager.googleapis.com", "compute.googleapis.com", "iam.googleapis.com"),
    *("logging.googleapis.com", "monitoring.googleapis.com", "secretmanager.googleapis.com"),
    *("servicenetworking.googleapis.com", "storage.googleapis.com"),
)
_IAP = "iap.googleapis.com"
_TOOLKIT = "gcluster"


def slurm_plan(cluster: ClusterConfig, facts: Catalog) -> ClusterPlan:
    """The plan. Raises one UserError with all that the config, the machine or the rules do not
    allow."""
    raise_all(slurm_problems(cluster, facts), cluster._origin.places)
    settings = read_settings(cluster, facts)
    slurm = read_slurm_cluster(settings)
    assert slurm is not None, "refused by slurm_problems"
    made = slurm_blueprint(slurm)
    services = [*_SERVICES, slurm.home.service]
    if settings.creation.private_nodes:
        services.append(_IAP)
    nodes, host, data = slurm.ranges()
    own = nodes if settings.creation.network is None else None
    ranges = {settings.name: own, f"{settings.name}-host": host, f"{settings.name}-data": data}
    return ClusterPlan(
        name=cluster.name,
        platform=cluster.platform,
        project=settings.project,
        region=settings.region,
        zone=slurm.pool.zone,
        pools=(slurm.pool,),
        terraform={},
        state_bucket=slurm.state_bucket,
        resources=tuple(_resources(slurm, made.image_family)),
        prices=slurm_prices(slurm),
        quotas=tuple(quota_needed(cluster, facts)),
        services=tuple(services),
        warnings=tuple(_warnings(slurm)),
        fields=made.fields,
        labels=settings.labels,
        network=_existing_network(slurm),
        launch_settings={cluster.platform: _launch_section(slurm)},
        toolkit=ToolkitDeployment(
            files=deployment_files(slurm, made, services),
            ranges={name: str(each) for name, each in ranges.items() if each is not None},
            groups=TERRAFORM_GROUPS,
            controller=f"{settings.name}-controller",
            further_kinds=tuple(_further_kinds(slurm)),
            network_profile=slurm.data[0].profile if slurm.data else None,
        ),
    )


def _existing_network(slurm: SlurmCluster) -> ExistingNetwork | None:
    project, given = slurm.settings.project, slurm.settings.creation.network
    shared = given is not None and is_shared(given, project)
    return existing_network(
        slurm.settings,
        slurm.range_sizes.addresses,
        users=(f"serviceAccount:{account_email(slurm.settings.name, CONTROLLER, project)}",),
        needs_peering=shared or slurm.own.home == "lustre",
    )


def slurm_problems(cluster: ClusterConfig, facts: Catalog) -> list[Problem]:
    """What the config, the machine or the rules do not allow. A config without project, zone,
    machine or consumption has the problems that its own check names, and no others."""
    location = cluster.location
    if location is None or location.project is None or location.zone is None:
        return []
    _, problems = read_pools(cluster, facts)
    own = [each for each in problems if each.path[:2] != ("cluster", "pools")]
    slurm = read_slurm_cluster(read_settings(cluster, facts))
    if slurm is None:
        return own
    return [
        *own,
        *place_problems(cluster, [slurm.pool], facts),
        *toolkit_problems(slurm),
        *range_problems(slurm.settings.creation.ranges, slurm.range_sizes),
    ]


def _resources(slurm: SlurmCluster, family: str) -> Iterator[PlannedResource]:
    """What exists after the deployment, by the blueprint's modules."""
    name, region, zone = slurm.settings.name, slurm.settings.region, slurm.pool.zone

    def one(
        module: str, kind: str, called: str, where: str | None, labelled: bool
    ) -> PlannedResource:
        return PlannedResource(module, kind, called, where, labelled, made_by=_TOOLKIT)

    yield PlannedResource(
        "", "google_storage_bucket", slurm.state_bucket, region, True, made_by="drillyard"
    )
    if slurm.settings.creation.network is None:
        yield one("network", "google_compute_network", name, None, False)
        if slurm.settings.creation.private_nodes:
            yield one("network", "google_compute_router_nat", f"{name} (one)", region, False)
    for whose, roles in ROLES.items():
        email = account_email(name, whose, slurm.settings.project)
        module = account_of(whose)
        yield one(module, "google_service_account", email, None, False)
        for role in roles:
            called = f"roles/{role} serviceAccount:{email}"
            yield one(module, "google_project_iam_member", called, None, False)
    yield one("slurm-image", "google_compute_image", f"{family} (family)", None, True)
    if slurm.host:
        yield one("host-network", "google_compute_network", f"{name}-host", None, False)
    if slurm.data and slurm.data[0].profile is not None:
        yield one("rdma-network", "google_compute_network", f"{name}-rdma", None, False)
    elif slurm.data:
        for number in range(len(slurm.data)):
            called = f"{name}-gpu-{number}"
            yield one("gpu-networks", "google_compute_network", called, None, False)
    kind = (
        "google_filestore_instance" if slurm.own.home == "filestore" else "google_lustre_instance"
    )
    yield one("home", kind, f"{HOME} of {name}", zone, True)
    yield one("controller", "google_compute_instance", f"{name}-controller", zone, True)
    yield one("controller", "google_storage_bucket", f"files of {name}'s Slurm", region, True)
    yield one("login", "google_compute_instance", slurm.login_node, zone, True)
    if not slurm.pool.scales_from_zero:
        for number in range(slurm.pool.nodes):
            called = f"{name}-nodes-{number}"
            yield one("nodes", "google_compute_instance", called, zone, True)


def _further_kinds(slurm: SlurmCluster) -> Iterator[str]:
    """Of what the modules make that has no name of its own in the plan."""
    kinds, own = ["instance_template"], slurm.settings.creation.network is None
    if own or slurm.data:
        kinds += ["subnetwork", "firewall"]
    if own and slurm.settings.creation.private_nodes:
        kinds += ["router", "address"]
    yield "google_storage_bucket_iam_member"
    if own and slurm.own.home == "lustre":
        kinds.append("global_address")
        yield "google_service_networking_connection"
    yield from (f"google_compute_{each}" for each in kinds)


def _launch_section(slurm: SlurmCluster) -> dict[str, Any]:
    """The section `slurm:` of the file for `launch`: what the config has, and the made cluster's
    login node, partition and shared directory where it has none."""
    section = slurm.settings.cluster.section_as(SlurmConfig)
    made = {
        "login_host": f"USER@{slurm.login_node}",
        "config_file": "ssh_config",
        "directory": f"{HOME}/USER/project",
        "partition": slurm.partition,
    }
    return {**made, **section.model_dump(mode="json", exclude_unset=True, exclude_none=True)}


def _warnings(slurm: SlurmCluster) -> Iterator[str]:
    pool, name = slurm.pool, slurm.settings.name
    yield "name, location, cluster.ranges and cluster.head.home cannot be changed later"
    if pool.scales_from_zero:
        yield (
            f"{pool.name}: a job of flex-start needs a time limit (slurm.time_limit): its nodes go"
            " after it"
        )
    else:
        yield f"{pool.name}: its {pool.nodes} nodes are billed until they are removed, used or not"
    yield f"{HOME}: all data of runs is on it, and is deleted with the cluster"
    control = account_email(name, CONTROLLER, slurm.settings.project)
    yield (
        f"{control}: may use any service account of the project, as the toolkit has no narrower"
        f" role; jobs on {name} act as another one, which may write logs and metrics alone"
    )
    network = slurm.settings.creation.network
    yield from network_warning(slurm.settings)
    if network is not None and is_shared(network, slurm.settings.project):
        yield (
            f"cluster.network: no node comes before the controller's account may use the subnet."
            f" Once `up` has made the account: gcloud compute networks subnets"
            f" add-iam-policy-binding {network.subnet} --project={network.project}"
            f" --region={slurm.settings.region} --member=serviceAccount:{control}"
            " --role=roles/compute.networkUser"
        )
    if not slurm.settings.creation.private_nodes:
        yield "cluster.authorized_networks: must contain this machine, or no run can be launched"
