"""A project full of what a cluster `train` may leave behind, and of what only looks like it."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tests.unit.provision.google.google_cloud import NUMBER, PROJECT, GoogleCloud

from drillyard.provision.cluster_plan import ClusterPlan, PlannedResource

REGION, ZONE, ELSEWHERE = "us-central1", "us-central1-b", "us-east1-b"
OURS = {"drillyard-cluster": "train"}
THEIRS = {"drillyard-cluster": "train-2"}
GKE = {"goog-k8s-cluster-name": "train", "goog-k8s-cluster-location": REGION}
GKE_OTHERS = (
    {"goog-k8s-cluster-name": "train-2", "goog-k8s-cluster-location": REGION},
    {"goog-k8s-cluster-name": "train", "goog-k8s-cluster-location": ZONE},
    {"goog-k8s-cluster-name": "train", "goog-k8s-cluster-location": "europe-west4"},
)
DESCRIBED = "drillyard cluster train"
ACCOUNT = f"train-nodes@{PROJECT}.iam.gserviceaccount.com"


def with_identities(plan: ClusterPlan) -> ClusterPlan:
    """The plan with things that have no network."""
    more = (
        PlannedResource("google_service_account.nodes", "google_service_account", ACCOUNT),
        PlannedResource(
            "google_storage_bucket.runs", "google_storage_bucket", "acme-runs", REGION, True
        ),
        PlannedResource(
            "google_artifact_registry_repository.images",
            "google_artifact_registry_repository",
            "train",
            REGION,
            True,
        ),
    )
    have = {(each.kind, each.name) for each in plan.resources}
    new = tuple(each for each in more if (each.kind, each.name) not in have)
    return replace(plan, resources=(*plan.resources, *new))


def network(name: str, project: str = PROJECT) -> str:
    return f"https://www.googleapis.com/compute/v1/projects/{project}/global/networks/{name}"


@dataclass
class Seeds:
    """Adds things to a project. `expected` are the addresses of what `leaks` must find."""

    cloud: GoogleCloud
    draw: random.Random
    number: int = 0
    expected: set[tuple[str, str]] = field(default_factory=set)

    def hash(self, length: int = 8) -> str:
        # At least one digit, as almost every hash has.
        return "".join(self.draw.choices("0123456789abcdef", k=length - 1)) + "7"

    def name(self, stem: str) -> str:
        self.number += 1
        return f"{stem}{self.number}"

    def leak(self, service: str, path: str, /, **body: Any) -> str:
        self.expected.add((service, path))
        return self.cloud.add(service, path, **body)

    def fill(
        self,
        count: int,
        leaks: Sequence[Callable[[Seeds], None]] | None = None,
        decoys: Sequence[Callable[[Seeds], None]] | None = None,
    ) -> None:
        """Seed the VPC and at least `count` leaks, and a decoy for each; those of a GKE cluster by
        default."""
        self.vpc = self.leak(
            "compute", "global/networks/train", description=DESCRIBED, peerings=[{"name": "to-hub"}]
        )
        self.expected.add(("compute", "global/networks/train/peerings/to-hub"))
        self.subnet = self.leak("compute", f"regions/{REGION}/subnetworks/train", network=self.vpc)
        for name in ("train-2", "training", "default"):
            self.cloud.add("compute", f"global/networks/{name}")
        leaks, decoys = list(leaks or _LEAKS), list(decoys or _DECOYS)
        while len(self.expected) < count:
            self.draw.shuffle(leaks)
            for seed in leaks:
                seed(self)
                if len(self.expected) >= count:
                    break
            self.draw.shuffle(decoys)
            for decoy in decoys:
                decoy(self)


def _volumes(s: Seeds) -> None:
    uuid = f"{s.hash()}-{s.hash(4)}-{s.hash(4)}"
    mark = s.draw.choice([OURS, GKE, {**OURS, **GKE}])
    zone = s.draw.choice([ZONE, "us-central1-c"])
    disk = s.leak("compute", f"zones/{zone}/disks/pvc-{uuid}", labels=mark, sizeGb="100")
    s.leak("compute", f"global/snapshots/snapshot-{uuid}", sourceDisk=disk)
    s.leak("compute", f"zones/{zone}/instantSnapshots/now-{uuid}", sourceDisk=disk)
    s.leak("compute", f"global/images/{s.name('image-')}", sourceDisk=disk)
    s.leak("compute", f"regions/{REGION}/disks/pvc-{s.hash(12)}", labels=mark, sizeGb="200")
    s.leak("compute", f"zones/{zone}/disks/gke-train-{s.hash()}-dynamic-pvc-{uuid}", sizeGb="9")
    s.leak("compute", f"zones/{zone}/disks/gke-train-pvc-{uuid}", sizeGb="9")


def _nodes(s: Seeds) -> None:
    digest, end = s.hash(), s.hash(4)
    pool = s.draw.choice(["cpu", "train-on-demand", "default-pool"])
    marks = {**GKE, "goog-k8s-node-pool-name": pool}
    stem = f"gke-train-{pool}-{digest}"
    nics = [{"network": s.vpc, "subnetwork": s.subnet}]
    template = s.leak(
        "compute",
        f"global/instanceTemplates/{stem}",
        properties={"labels": marks, "networkInterfaces": nics},
    )
    s.leak("compute", f"zones/{ZONE}/instanceGroupManagers/{stem}-grp", instanceTemplate=template)
    disk = s.leak("compute", f"zones/{ZONE}/disks/{stem}-{end}", sizeGb="200", labels=marks)
    s.leak(
        "compute",
        f"zones/{ZONE}/instances/{stem}-{end}",
        networkInterfaces=nics,
        labels=marks,
        disks=[{"source": disk, "autoDelete": True}],
    )
    s.leak("compute", f"zones/{ZONE}/disks/gke-train-{pool}-{s.hash()}-x1y2", sizeGb="200")
    s.leak("compute", f"regions/{REGION}/resourcePolicies/gke-train-{pool}-{s.hash()}")


def _attached(s: Seeds) -> None:
    nic = [{"network": network("default")}, {"network": s.vpc}]
    node = s.leak("compute", f"zones/{ZONE}/instances/{s.name('bastion-')}", networkInterfaces=nic)
    s.leak("compute", f"zones/{ZONE}/targetInstances/{s.name('to-')}", instance=node)
    s.leak("compute", f"global/machineImages/{s.name('copy-')}", sourceInstance=node)
    s.leak(
        "compute",
        f"regions/{REGION}/instanceTemplates/{s.name('hand-')}",
        properties={"networkInterfaces": [{"subnetwork": s.subnet}]},
    )
    s.leak("compute", f"global/firewalls/{s.name('allow-ssh-')}", network=s.vpc)
    s.leak("compute", f"global/firewalls/gke-train-{s.hash()}-all", network=s.vpc)
    s.leak("compute", f"global/routes/{s.name('to-office-')}", network=s.vpc)
    s.leak("compute", f"regions/{REGION}/subnetworks/{s.name('more-')}", network=s.vpc)
    s.leak("compute", f"regions/{REGION}/addresses/{s.name('inside-')}", subnetwork=s.subnet)
    s.leak("compute", f"zones/{ZONE}/instanceGroups/{s.name('group-')}", network=s.vpc)
    old = s.leak(
        "compute",
        f"global/networks/{s.name('train-net-')}",
        description=DESCRIBED,
    )
    s.leak("compute", f"global/firewalls/{s.name('old-')}", network=old)
    nats = s.name("nat-")
    router = f"regions/{REGION}/routers/{s.name('router-')}"
    s.leak("compute", router, network=s.vpc, nats=[{"name": nats}])
    s.expected.add(("compute", f"{router}/nats/{nats}"))
    s.leak(
        "compute",
        f"regions/{REGION}/vpnTunnels/{s.name('tunnel-')}",
        router=f"projects/{PROJECT}/{router}",
    )
    s.leak("compute", f"regions/{REGION}/vpnGateways/{s.name('vpn-')}", network=s.vpc)
    s.leak("compute", f"regions/{REGION}/targetVpnGateways/{s.name('vpn-')}", network=s.vpc)
    s.leak(
        "compute",
        f"regions/{REGION}/interconnectAttachments/{s.name('line-')}",
        router=f"projects/{PROJECT}/{router}",
    )
    s.leak("compute", f"regions/{REGION}/packetMirrorings/{s.name('tap-')}", network={"url": s.vpc})
    s.leak(
        "compute", f"regions/{REGION}/networkAttachments/{s.name('join-')}", subnetworks=[s.subnet]
    )
    s.leak(
        "compute", f"regions/{REGION}/serviceAttachments/{s.name('psc-')}", natSubnets=[s.subnet]
    )
    policy = f"global/firewallPolicies/{s.name('policy-')}"
    s.cloud.add("compute", policy, associations=[{"name": "to-train", "attachmentTarget": s.vpc}])
    s.expected.add(("compute", f"{policy}/associations/to-train"))
    s.leak("compute", f"global/firewallPolicies/{s.name('own-')}", description=DESCRIBED)


def _web_load_balancer(s: Seeds) -> None:
    uid, end = s.hash(), s.hash()
    group = s.leak(
        "compute", f"zones/{ZONE}/networkEndpointGroups/k8s1-{uid}-runs-web-80-{end}", network=s.vpc
    )
    backend = s.leak(
        "compute",
        f"global/backendServices/k8s1-{uid}-runs-web-80-{end}",
        backends=[{"group": group}],
        healthChecks=[s.leak("compute", f"global/healthChecks/k8s1-{uid}-runs-web-80-{end}")],
    )
    urls = s.leak("compute", f"global/urlMaps/k8s2-um-{uid}-runs-web-{end}", defaultService=backend)
    certificate = s.leak("compute", f"global/sslCertificates/mcrt-{s.hash()}-{s.hash(4)}")
    proxy = s.leak(
        "compute",
        f"global/targetHttpsProxies/k8s2-ts-{uid}-runs-web-{end}",
        urlMap=urls,
        sslCertificates=[certificate],
    )
    s.leak("compute", f"global/targetHttpProxies/{s.name('mine-')}", urlMap=urls)
    rule = s.leak("compute", f"global/forwardingRules/k8s2-fs-{uid}-runs-web-{end}", target=proxy)
    s.leak("compute", f"global/addresses/{s.name('site-')}", users=[rule])
    s.leak("compute", f"global/targetSslProxies/{s.name('ssl-')}", service=backend)
    s.leak("compute", f"global/targetGrpcProxies/{s.name('grpc-')}", urlMap=urls)
    s.leak("compute", f"global/targetTcpProxies/{s.name('tcp-')}", service=backend)
    s.leak("compute", f"global/backendBuckets/{s.name('static-')}", description=DESCRIBED)
    s.leak("compute", f"global/networkEndpointGroups/{s.name('outside-')}", network=s.vpc)
    s.cloud.things["compute", f"global/backendServices/k8s1-{uid}-runs-web-80-{end}"].update(
        securityPolicy=s.leak("compute", f"global/securityPolicies/k8s1-{uid}-{s.hash()}")
    )
    s.cloud.things["compute", f"global/targetHttpsProxies/k8s2-ts-{uid}-runs-web-{end}"].update(
        sslPolicy=s.leak("compute", f"global/sslPolicies/k8s2-sp-{uid}-{s.hash()}")
    )
    s.leak("compute", f"global/httpsHealthChecks/k8s-be-30123--{uid}{s.hash()}")
    # Found by its hash alone: nothing names it any more.
    s.leak("compute", f"global/urlMaps/k8s2-um-{uid}-runs-gone-{s.hash()}")


def _service_load_balancer(s: Seeds) -> None:
    name, uid = "a" + s.hash(31), s.hash(16)
    node = f"https://www.googleapis.com/compute/v1/projects/{PROJECT}/zones/{ZONE}/instances"
    pool = s.leak(
        "compute",
        f"regions/{REGION}/targetPools/{name}",
        instances=[f"{node}/gke-train-cpu-{s.hash()}-abcd"],
    )
    s.leak("compute", f"regions/{REGION}/forwardingRules/{name}", target=pool)
    s.leak("compute", f"global/firewalls/k8s-fw-{name}", network=s.vpc)
    s.leak("compute", f"global/firewalls/k8s-{uid}-node-http-hc", network=s.vpc)
    s.leak("compute", f"global/httpHealthChecks/k8s-{uid}-node")
    s.leak("compute", f"regions/{REGION}/forwardingRules/{s.name('inner-')}", network=s.vpc)
    s.leak("compute", f"regions/{REGION}/addresses/{name}")


def _storage(s: Seeds) -> None:
    s.leak(
        "file",
        f"locations/{ZONE}/instances/{s.name('share-')}",
        networks=[
            {"network": s.draw.choice(["train", f"projects/{NUMBER}/global/networks/train"])}
        ],
    )
    s.leak("file", f"locations/{ZONE}/instances/pvc-{s.hash(12)}", labels=GKE)
    s.leak("lustre", f"locations/{ZONE}/instances/{s.name('lustre-')}", network=network("train"))
    s.leak("parallelstore", f"locations/{ZONE}/instances/{s.name('ps-')}", labels=OURS)
    s.leak("storage", f"b/{s.name('acme-data-')}", labels=OURS, location="US-CENTRAL1")
    s.leak("artifactregistry", f"locations/{REGION}/repositories/{s.name('r')}", labels=OURS)
    s.leak("compute", f"zones/{ZONE}/storagePools/{s.name('pool-')}", labels=OURS)
    zone = {"networks": [{"networkUrl": s.vpc}]}
    s.leak("dns", f"managedZones/{s.name('gke-zone-')}", privateVisibilityConfig=zone)
    s.leak("dns", f"policies/{s.name('dns-')}", networks=[{"networkUrl": s.vpc}])
    cluster = f"projects/{PROJECT}/locations/{REGION}/clusters/train"
    s.leak("dns", f"responsePolicies/{s.name('rpz-')}", gkeClusters=[{"gkeClusterName": cluster}])


def _clusters(s: Seeds) -> None:
    """The cluster itself, once; then clusters of other names in its VPC."""
    path = f"locations/{REGION}/clusters/train"
    if ("container", path) not in s.cloud.things:
        s.leak("container", path, location=REGION, resourceLabels=OURS, nodePools=[{"name": "cpu"}])
        s.expected.add(("container", f"{path}/nodePools/cpu"))
        s.leak("iam", f"serviceAccounts/{ACCOUNT}")
    name = s.name("visitor-")
    s.leak(
        "container",
        f"locations/{ZONE}/clusters/{name}",
        location=ZONE,
        network="train",
        networkConfig={"network": f"projects/{PROJECT}/global/networks/train"},
    )


def _requests(s: Seeds) -> None:
    name = f"gke-train-cpu-{s.hash()}-grp"
    group = f"zones/{ZONE}/instanceGroupManagers/{name}"
    s.leak("compute", group)
    s.leak("compute", f"{group}/resizeRequests/{s.name('gke-request-')}", state="ACCEPTED")


def _grants(s: Seeds) -> None:
    role = s.name("roles/custom.role")
    member = s.draw.choice(
        [f"serviceAccount:{ACCOUNT}", f"deleted:serviceAccount:{ACCOUNT}?uid={s.hash(21)}"]
    )
    s.cloud.bindings.append({"role": role, "members": [member, "user:ann@example.com"]})
    s.expected.add(("cloudresourcemanager", f"{role} {member}"))


_LEAKS: tuple[Callable[[Seeds], None], ...] = (
    _volumes,
    _nodes,
    _attached,
    _web_load_balancer,
    _service_load_balancer,
    _storage,
    _clusters,
    _grants,
    _requests,
)


def _volumes_of_others(s: Seeds) -> None:
    mark = s.draw.choice([*GKE_OTHERS, THEIRS])
    disk = s.cloud.add("compute", f"zones/{ZONE}/disks/pvc-{s.hash(12)}", labels=mark)
    s.cloud.add("compute", f"global/snapshots/{s.name('snapshot-')}", sourceDisk=disk)
    s.cloud.add("compute", f"zones/{ZONE}/disks/{s.name('train-')}", labels={"team": "train"})
    s.cloud.add("compute", f"zones/{ZONE}/disks/gke-train-2-{s.hash()}-dynamic-pvc-{s.hash()}")
    s.cloud.add("compute", f"zones/{ELSEWHERE}/disks/pvc-{s.hash(12)}")


def _nodes_of_others(s: Seeds) -> None:
    mark = s.draw.choice(GKE_OTHERS)
    stem = f"gke-{mark['goog-k8s-cluster-name']}-cpu-{s.hash()}"
    nics = [{"network": s.draw.choice([network("train-2"), network("train", "acme-host")])}]
    template = s.cloud.add(
        "compute",
        f"global/instanceTemplates/{stem}",
        properties={"labels": mark, "networkInterfaces": nics},
    )
    s.cloud.add(
        "compute", f"zones/{ZONE}/instanceGroupManagers/{stem}-grp", instanceTemplate=template
    )
    s.cloud.add(
        "compute", f"zones/{ZONE}/instances/{stem}-abcd", networkInterfaces=nics, labels=mark
    )
    s.cloud.add("compute", f"zones/{ZONE}/disks/{stem}-abcd", labels=mark)
    s.cloud.add(
        "compute", f"global/firewalls/gke-train-2-{s.hash()}-all", network=network("train-2")
    )
    s.cloud.add("compute", f"global/firewalls/gke-train-{s.hash()}-all", network=network("default"))
    s.cloud.add("compute", f"regions/{REGION}/resourcePolicies/gke-train-2-cpu-{s.hash()}")


def _attached_to_others(s: Seeds) -> None:
    for name in ("train-2", "training", "default"):
        s.cloud.add("compute", f"global/firewalls/{s.name('train-rule-')}", network=network(name))
    s.cloud.add("compute", "regions/us-east1/subnetworks/train", network=network("default"))
    s.cloud.add(
        "compute",
        f"global/routes/default-route-{s.hash()}",
        network=s.vpc,
        nextHopGateway=f"projects/{PROJECT}/global/gateways/default-internet-gateway",
    )
    s.cloud.add("compute", f"global/routes/{s.name('r-')}", network=s.vpc, nextHopNetwork=s.vpc)
    s.cloud.add(
        "compute",
        f"global/networks/{s.name('train-')}",
        description="drillyard cluster train-2",
        peerings=[{"name": "to-train", "network": s.vpc}],
    )
    s.cloud.add("compute", f"regions/{REGION}/addresses/{s.name('train-ip-')}")


def _load_balancer_of_others(s: Seeds) -> None:
    uid = s.hash()
    group = s.cloud.add(
        "compute",
        f"zones/{ZONE}/networkEndpointGroups/k8s1-{uid}-runs-web-80-{s.hash()}",
        network=network("train-2"),
    )
    backend = s.cloud.add(
        "compute", f"global/backendServices/k8s1-{uid}-runs-web-80", backends=[{"group": group}]
    )
    urls = s.cloud.add("compute", f"global/urlMaps/k8s2-um-{uid}-runs-web", defaultService=backend)
    s.cloud.add("compute", f"global/targetHttpProxies/k8s2-tp-{uid}-runs-web", urlMap=urls)
    s.cloud.add("compute", f"global/urlMaps/{s.name('train-')}", defaultService=f"{backend}-x")


def _storage_of_others(s: Seeds) -> None:
    s.cloud.add("storage", f"b/{s.name('acme-train-')}", labels=s.draw.choice([THEIRS, {}]))
    s.cloud.add(
        "file", f"locations/{ZONE}/instances/{s.name('train')}", networks=[{"network": "default"}]
    )
    s.cloud.add("artifactregistry", f"locations/{REGION}/repositories/{s.name('train-')}")
    zone = {"networks": [{"networkUrl": network("default")}]}
    s.cloud.add("dns", f"managedZones/{s.name('train-')}", privateVisibilityConfig=zone)
    s.cloud.add("iam", f"serviceAccounts/{s.name('train-2-')}@{PROJECT}.iam.gserviceaccount.com")
    members = [
        f"deleted:serviceAccount:train-2@{PROJECT}.iam.gserviceaccount.com?uid={s.hash(21)}",
        "serviceAccount:train-nodes@acme-host.iam.gserviceaccount.com",
    ]
    s.cloud.bindings.append({"role": s.name("roles/x"), "members": members})


def _other_clusters(s: Seeds) -> None:
    s.cloud.add("container", f"locations/{ZONE}/clusters/train", location=ZONE, network="default")
    s.cloud.add(
        "container",
        f"locations/{REGION}/clusters/train-2",
        location=REGION,
        resourceLabels=THEIRS,
        nodePools=[{"name": "cpu"}],
        network="train-2",
    )
    s.cloud.add(
        "container",
        f"locations/{ZONE}/clusters/{s.name('shared-')}",
        location=ZONE,
        network="train",
        networkConfig={"network": "projects/acme-host/global/networks/train"},
    )


_DECOYS: tuple[Callable[[Seeds], None], ...] = (
    _volumes_of_others,
    _nodes_of_others,
    _attached_to_others,
    _load_balancer_of_others,
    _storage_of_others,
    _other_clusters,
)


def _hosts(s: Seeds) -> None:
    """Virtual machines, with what belongs to them."""
    name = s.name("train-")
    nics = [{"network": s.vpc, "subnetwork": s.subnet}]
    disk = s.leak("compute", f"zones/{ZONE}/disks/{name}", sizeGb="200", labels=OURS)
    node = s.leak(
        "compute",
        f"zones/{ZONE}/instances/{name}",
        networkInterfaces=s.draw.choice([nics, [{"network": network("default")}]]),
        labels=OURS,
        disks=[{"source": disk, "autoDelete": True}],
    )
    s.cloud.things["compute", f"zones/{ZONE}/disks/{name}"]["users"] = [node]
    s.leak("compute", f"zones/{ZONE}/disks/{s.name('left-')}", sizeGb="9", labels=OURS)
    s.leak("compute", f"global/snapshots/{s.name('before-')}", sourceDisk=disk)
    s.leak("compute", f"regions/{REGION}/addresses/{s.name('of-')}", users=[node])
    s.leak("compute", f"regions/{REGION}/resourcePolicies/{s.name('near-')}", description=DESCRIBED)


def _groups(s: Seeds) -> None:
    """A group of machines, as somebody makes it in the VPC: with requests, and a machine of it."""
    name = s.name("train-group-")
    nics = [{"network": s.vpc, "subnetwork": s.subnet}]
    template = s.leak(
        "compute",
        f"{s.draw.choice(['global', f'regions/{REGION}'])}/instanceTemplates/{name}",
        properties={"labels": OURS, "networkInterfaces": nics},
    )
    group = f"zones/{ZONE}/instanceGroupManagers/{name}"
    made_by = s.leak("compute", group, instanceTemplate=template)
    s.leak("compute", f"{group}/resizeRequests/{s.name('request-')}", state="ACCEPTED")
    s.leak(
        "compute",
        f"zones/{ZONE}/instances/{name}-{s.hash(4)}",
        networkInterfaces=nics,
        labels=OURS,
        metadata={"items": [{"key": "created-by", "value": made_by}]},
    )


def _storage_of_hosts(s: Seeds) -> None:
    s.leak("storage", f"b/{s.name('acme-data-')}", labels=OURS, location="US-CENTRAL1")
    s.leak("artifactregistry", f"locations/{REGION}/repositories/{s.name('r')}", labels=OURS)
    s.leak(
        "file", f"locations/{ZONE}/instances/{s.name('share-')}", networks=[{"network": "train"}]
    )


def _gke_cluster_of_the_name(s: Seeds) -> None:
    """A GKE cluster `train` beside the machines `train`, in another VPC."""
    path = f"locations/{REGION}/clusters/train"
    if ("container", path) not in s.cloud.things:
        pools = [{"name": "cpu"}]
        s.cloud.add("container", path, location=REGION, nodePools=pools, network="default")
    nics, stem = [{"network": network("default")}], f"gke-train-cpu-{s.hash()}"
    marks = {"labels": GKE, "networkInterfaces": nics}
    s.cloud.add("compute", f"zones/{ZONE}/instances/{stem}-abcd", **marks)
    s.cloud.add("compute", f"zones/{ZONE}/disks/{stem}-abcd", labels=GKE)
    s.cloud.add("compute", f"zones/{ZONE}/disks/pvc-{s.hash(12)}", labels=GKE)
    s.cloud.add("compute", f"global/instanceTemplates/{stem}", properties=marks)
    s.cloud.add("compute", f"global/firewalls/gke-train-{s.hash()}-all", network=network("default"))
    s.cloud.add("compute", f"regions/{REGION}/resourcePolicies/gke-train-cpu-{s.hash()}")


OF_HOSTS = (_hosts, _groups, _attached, _storage_of_hosts, _grants)
BESIDE_HOSTS = (*_DECOYS, _gke_cluster_of_the_name)


def named(expected: tuple[str, str]) -> tuple[str, str]:
    """Name and location of a leak that is expected."""
    service, path = expected
    if service == "cloudresourcemanager":
        return path, ""
    place = re.match("(zones|regions|locations)/([^/]+)/", path)
    if service == "storage":
        return path.rpartition("/")[2], REGION
    return path.rpartition("/")[2], place[2] if place else ""
