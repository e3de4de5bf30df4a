"""The lists of Google's services that can hold a part of a cluster, and how each part is deleted.

One row per list. Rows are in the order in which things can be deleted: what uses another thing
comes first (https://cloud.google.com/compute/docs/reference/rest/v1 names the references).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Part:
    """Things that are described inside another one: node pools of a cluster. `key` is the field."""

    kind: str
    key: str
    delete: str
    goes_with_parent: bool = True
    """Whether deleting the other thing deletes it."""


@dataclass(frozen=True)
class Listing:
    """One list. `kind` is Terraform's name of what it holds; `items` the key of its answer.

    `links` are the fields by which a thing is attached to another: `networkInterfaces[].network`;
    `a|b`: the second where the first is missing.
    `delete` is the gcloud command, or two with && between them. Its words are filled in: {name},
    {parent} (the name of what a part is in), {place} (--zone=, --region= or --global),
    {policy_place}, {location}, {project}, {condition} and fields of the body.
    """

    service: str
    method: str
    items: str
    kind: str
    delete: str
    links: tuple[str, ...] = ()
    parent: Mapping[str, str] = field(default_factory=dict)
    part: Part | None = None
    ended: tuple[str, ...] = ()
    """States in which a thing is only a record of what was."""
    never_ours: bool = False
    """Reservations: bought for longer than a cluster, so no command deletes them."""

    @property
    def permission(self) -> str:
        """The right that the list needs
        (https://cloud.google.com/iam/docs/permissions-reference)."""
        if self.method == "projects.getIamPolicy":
            return "resourcemanager.projects.getIamPolicy"
        resource = self.method.split(".")[-2]
        return f"{self.service}.{_PERMISSIONS.get(resource, resource)}.list"


def _compute(
    collection: str, kind: str, delete: str, *links: str, part: Part | None = None
) -> Listing:
    """A list of Compute Engine over all its places: `disks.aggregatedList`."""
    resource = _RESOURCES.get(collection, collection)
    return Listing(
        "compute",
        f"{resource}.aggregatedList",
        collection,
        f"google_compute_{kind}",
        f"compute {delete}",
        links,
        part=part,
    )


def _global(
    resource: str, kind: str, delete: str, *links: str, part: Part | None = None
) -> Listing:
    """A list of what Compute Engine has once per project: `firewalls.list`."""
    return Listing(
        "compute",
        f"{resource}.list",
        "items",
        f"google_compute_{kind}",
        f"compute {delete}",
        links,
        part=part,
    )


_PERMISSIONS = {"networkFirewallPolicies": "firewallPolicies"}
"""Resources that permissions name otherwise."""
_RESOURCES = {"firewallPolicies": "networkFirewallPolicies"}
"""Lists whose key is not their resource's name."""
_INTERFACES = ("networkInterfaces[].network", "networkInterfaces[].subnetwork")
_NETWORKS = ("network", "subnetwork")
_ANYWHERE = {"parent": "projects/{project}/locations/-"}
_SERVICES_OF_URL_MAP = (
    "defaultService",
    "pathMatchers[].defaultService",
    "pathMatchers[].pathRules[].service",
    "pathMatchers[].routeRules[].service",
)

LISTINGS: tuple[Listing, ...] = (
    # Load balancers, from the address inwards.
    _compute(
        "forwardingRules",
        "forwarding_rule",
        "forwarding-rules delete {name} {place}",
        *_NETWORKS,
        "target",
        "backendService",
    ),
    _global(
        "globalForwardingRules",
        "global_forwarding_rule",
        "forwarding-rules delete {name} --global",
        "network",
        "target",
    ),
    _compute(
        "targetHttpProxies",
        "target_http_proxy",
        "target-http-proxies delete {name} {place}",
        "urlMap",
    ),
    _compute(
        "targetHttpsProxies",
        "target_https_proxy",
        "target-https-proxies delete {name} {place}",
        "urlMap",
    ),
    _compute(
        "targetTcpProxies",
        "target_tcp_proxy",
        "target-tcp-proxies delete {name} {place}",
        "service",
    ),
    _global("targetSslProxies", "target_ssl_proxy", "target-ssl-proxies delete {name}", "service"),
    _global(
        "targetGrpcProxies", "target_grpc_proxy", "target-grpc-proxies delete {name}", "urlMap"
    ),
    _compute(
        "targetInstances",
        "target_instance",
        "target-instances delete {name} {place}",
        "instance",
        "network",
    ),
    _compute("urlMaps", "url_map", "url-maps delete {name} {place}", *_SERVICES_OF_URL_MAP),
    _compute(
        "serviceAttachments",
        "service_attachment",
        "service-attachments delete {name} {place}",
        "natSubnets[]",
        "targetService",
    ),
    _compute(
        "backendServices",
        "backend_service",
        "backend-services delete {name} {place}",
        "network",
        "backends[].group",
    ),
    _compute("backendBuckets", "backend_bucket", "backend-buckets delete {name}"),
    _compute("targetPools", "target_pool", "target-pools delete {name} {place}", "instances[]"),
    _compute("healthChecks", "health_check", "health-checks delete {name} {place}"),
    _global("httpHealthChecks", "http_health_check", "http-health-checks delete {name}"),
    _global("httpsHealthChecks", "https_health_check", "https-health-checks delete {name}"),
    _compute(
        "networkEndpointGroups",
        "network_endpoint_group",
        "network-endpoint-groups delete {name} {place}",
        *_NETWORKS,
    ),
    _global(
        "globalNetworkEndpointGroups",
        "global_network_endpoint_group",
        "network-endpoint-groups delete {name} --global",
        "network",
    ),
    _compute("sslCertificates", "ssl_certificate", "ssl-certificates delete {name} {place}"),
    _compute("sslPolicies", "ssl_policy", "ssl-policies delete {name} {place}"),
    _compute("securityPolicies", "security_policy", "security-policies delete {name} {place}"),
    # Names: a zone goes when it is empty, a policy when nothing uses it.
    Listing(
        "dns",
        "managedZones.list",
        "managedZones",
        "google_dns_managed_zone",
        "dns record-sets import /dev/null --zone={name} --delete-all-existing"
        " && dns managed-zones delete {name}",
        (
            "privateVisibilityConfig.networks[].networkUrl",
            "privateVisibilityConfig.gkeClusters[].gkeClusterName",
        ),
        {"project": "{project}"},
    ),
    Listing(
        "dns",
        "policies.list",
        "policies",
        "google_dns_policy",
        "dns policies update {name} --networks= && dns policies delete {name}",
        ("networks[].networkUrl",),
        {"project": "{project}"},
    ),
    Listing(
        "dns",
        "responsePolicies.list",
        "responsePolicies",
        "google_dns_response_policy",
        "dns response-policies update {name} --networks= --gkeclusters="
        " && dns response-policies delete {name}",
        ("networks[].networkUrl", "gkeClusters[].gkeClusterName"),
        {"project": "{project}"},
    ),
    # The cluster and its nodes.
    Listing(
        "container",
        "projects.locations.clusters.list",
        "clusters",
        "google_container_cluster",
        "container clusters delete {name} --location={location}",
        ("networkConfig.network|network",),
        _ANYWHERE,
        Part(
            "google_container_node_pool",
            "nodePools",
            "container node-pools delete {name} --cluster={parent} --location={location}",
        ),
    ),
    _compute(
        "instanceGroupManagers",
        "instance_group_manager",
        "instance-groups managed delete {name} {place}",
        "instanceTemplate",
        "versions[].instanceTemplate",
    ),
    _compute(
        "instanceTemplates",
        "instance_template",
        "instance-templates delete {name} {place}",
        *(f"properties.{each}" for each in _INTERFACES),
    ),
    _compute("instances", "instance", "instances delete {name} {place}", *_INTERFACES),
    _compute(
        "instanceGroups",
        "instance_group",
        "instance-groups unmanaged delete {name} {place}",
        *_NETWORKS,
    ),
    # What outlives them.
    _compute(
        "instantSnapshots",
        "instant_snapshot",
        "instant-snapshots delete {name} {place}",
        "sourceDisk",
    ),
    _global("snapshots", "snapshot", "snapshots delete {name}", "sourceDisk"),
    _global("images", "image", "images delete {name}", "sourceDisk", "sourceSnapshot"),
    _global("machineImages", "machine_image", "machine-images delete {name}", "sourceInstance"),
    _compute("disks", "disk", "disks delete {name} {place}", "users[]"),
    _compute("storagePools", "storage_pool", "storage-pools delete {name} {place}"),
    _compute("resourcePolicies", "resource_policy", "resource-policies delete {name} {place}"),
    Listing(
        "file",
        "projects.locations.instances.list",
        "instances",
        "google_filestore_instance",
        "filestore instances delete {name} --location={location}",
        ("networks[].network",),
        _ANYWHERE,
    ),
    Listing(
        "lustre",
        "projects.locations.instances.list",
        "instances",
        "google_lustre_instance",
        "lustre instances delete {name} --location={location}",
        ("network",),
        _ANYWHERE,
    ),
    Listing(
        "parallelstore",
        "projects.locations.instances.list",
        "instances",
        "google_parallelstore_instance",
        "beta parallelstore instances delete {name} --location={location}",
        ("network",),
        _ANYWHERE,
    ),
    # Networks, from what is attached to the network itself.
    _compute(
        "packetMirrorings",
        "packet_mirroring",
        "packet-mirrorings delete {name} {place}",
        "network.url",
    ),
    _compute(
        "vpnTunnels",
        "vpn_tunnel",
        "vpn-tunnels delete {name} {place}",
        "vpnGateway",
        "targetVpnGateway",
        "router",
    ),
    _compute("vpnGateways", "ha_vpn_gateway", "vpn-gateways delete {name} {place}", "network"),
    _compute(
        "targetVpnGateways",
        "vpn_gateway",
        "target-vpn-gateways delete {name} {place}",
        "network",
    ),
    _compute(
        "interconnectAttachments",
        "interconnect_attachment",
        "interconnects attachments delete {name} {place}",
        "router",
    ),
    _compute(
        "routers",
        "router",
        "routers delete {name} {place}",
        "network",
        part=Part(
            "google_compute_router_nat",
            "nats",
            "compute routers nats delete {name} --router={parent} {place}",
        ),
    ),
    _global("routes", "route", "routes delete {name}", "network"),
    _global("firewalls", "firewall", "firewall-rules delete {name}", "network"),
    _compute(
        "firewallPolicies",
        "network_firewall_policy",
        "network-firewall-policies delete {name} {place}",
        part=Part(
            "google_compute_network_firewall_policy_association",
            "associations",
            "compute network-firewall-policies associations delete --name={name}"
            " --firewall-policy={parent} {policy_place}",
            goes_with_parent=False,
        ),
    ),
    _compute("addresses", "address", "addresses delete {name} {place}", *_NETWORKS, "users[]"),
    _global(
        "globalAddresses",
        "global_address",
        "addresses delete {name} --global",
        "network",
        "users[]",
    ),
    _compute(
        "networkAttachments",
        "network_attachment",
        "network-attachments delete {name} {place}",
        "subnetworks[]",
    ),
    _compute("subnetworks", "subnetwork", "networks subnets delete {name} {place}", "network"),
    _global(
        "networks",
        "network",
        "networks delete {name}",
        part=Part(
            "google_compute_network_peering",
            "peerings",
            "compute networks peerings delete {name} --network={parent}",
            goes_with_parent=False,
        ),
    ),
    # Things that have no network.
    Listing(
        "artifactregistry",
        "projects.locations.repositories.list",
        "repositories",
        "google_artifact_registry_repository",
        "artifacts repositories delete {name} --location={location}",
        (),
        {"parent": "projects/{project}/locations/{region}"},
    ),
    Listing(
        "cloudresourcemanager",
        "projects.getIamPolicy",
        "bindings",
        "google_project_iam_member",
        "projects remove-iam-policy-binding {project} --member={member} --role={role} {condition}",
        (),
        {"resource": "projects/{project}"},
    ),
    Listing(
        "iam",
        "projects.serviceAccounts.list",
        "accounts",
        "google_service_account",
        "iam service-accounts delete {email}",
        (),
        {"name": "projects/{project}"},
    ),
    Listing(
        "storage",
        "buckets.list",
        "items",
        "google_storage_bucket",
        "storage rm --recursive gs://{name}",
        (),
        {"project": "{project}"},
    ),
    Listing(
        "compute",
        "reservations.aggregatedList",
        "reservations",
        "google_compute_reservation",
        "",
        never_ours=True,
    ),
    Listing(
        "compute",
        "futureReservations.aggregatedList",
        "futureReservations",
        "google_compute_future_reservation",
        "",
        never_ours=True,
    ),
)
_IN_REGION = {"parent": "projects/{project}/locations/{region}"}
JOB_LISTINGS: tuple[Listing, ...] = (
    Listing(
        "aiplatform",
        "projects.locations.customJobs.list",
        "customJobs",
        "google_vertex_ai_custom_job",
        "ai custom-jobs cancel {name} --region={location}",
        ("jobSpec.network",),
        _IN_REGION,
        ended=(
            *("JOB_STATE_SUCCEEDED", "JOB_STATE_FAILED", "JOB_STATE_CANCELLED"),
            *("JOB_STATE_EXPIRED", "JOB_STATE_PARTIALLY_SUCCEEDED"),
        ),
    ),
    Listing(
        "aiplatform",
        "projects.locations.persistentResources.list",
        "persistentResources",
        "google_vertex_ai_persistent_resource",
        "ai persistent-resources delete {name} --region={location}",
        ("network",),
        _IN_REGION,
    ),
)
"""What runs of Vertex AI are. They come before all else: they use the bucket and the VPC, and cost
most."""
RESIZE_REQUESTS = Listing(
    "compute",
    "instanceGroupManagerResizeRequests.list",
    "items",
    "google_compute_resize_request",
    "compute instance-groups managed resize-requests delete {parent} --resize-requests={name}"
    " {place}",
)
