"""Which things of a project belong to a cluster, and by what that is known.

Evidence, strongest first: what is attached to the cluster's VPCs; the label of the cluster or GKE's
own (`goog-k8s-cluster-name` with its location); the exact name and place of the plan; a description
of ours; GKE's names (`gke-NAME-HASH...`). Then what uses, or was made by the same controller as, a
thing that is recognised. A label of another cluster outranks names, so `train` never takes what
`train-2` has, nor a cluster `train` of another region.

Names of load balancers contain a hash of the Kubernetes cluster that made them (`k8s1-HASH-...`,
`k8s-be-PORT--HASH`: https://github.com/kubernetes/ingress-gce, pkg/utils/namer): one of them on the
cluster's VPC tells whose the others are. What has such a name and no evidence at all is doubtful.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from drillyard.provision.cluster_plan import CLUSTER_LABEL, ClusterPlan, PlannedResource
from drillyard.provision.google.inventory import Inventory, Thing, path_in
from drillyard.provision.google.resource_marks import (
    BLUEPRINT_LABEL,
    DEPLOYMENT_LABEL,
    GKE_LOCATION_LABEL,
    GKE_NAME_LABEL,
    GKE_POOL_LABEL,
    MADE_BY_KUBERNETES,
    labels_of,
    metadata_of,
    plain_kind,
    region_of,
    tokens_of,
)

_NETWORK = "google_compute_network"
_DISK = "google_compute_disk"
_OF_NODES = (
    "google_compute_instance",
    "google_compute_instance_group_manager",
    "google_compute_instance_template",
    "google_compute_firewall",
    "google_compute_route",
    "google_compute_resource_policy",
    _DISK,
)
"""What GKE makes for nodes and deletes with them."""
_OF_CLUSTER = (
    "google_compute_address",
    "google_compute_forwarding_rule",
    "google_dns_managed_zone",
    "google_dns_response_policy",
)
"""What GKE makes for a cluster, and names for it: the endpoint of the control plane in the VPC, the
zone of Cloud DNS."""
_CONTROL_PLANE_PEERING = re.compile(r"gke-.*-peer$")
_HEX = "[0-9a-f]{8}"
_USED = ("sslCertificates", "healthChecks", "securityPolicy", "sslPolicy")
"""Fields by which a load balancer uses what Kubernetes made with it."""
Verdict = Literal["ours", "foreign"]


@dataclass
class Recognition:
    """Paths of the cluster's things with the reason, and what may be its own or another's."""

    ours: dict[str, str] = field(default_factory=dict)
    doubtful: dict[str, str] = field(default_factory=dict)


class Ownership:
    """The evidence of one plan about one inventory."""

    def __init__(self, plan: ClusterPlan, inventory: Inventory, number: str | None) -> None:
        self._plan = plan
        self._number = number
        self._things = {
            thing.path: thing
            for thing in inventory.things
            if not thing.row.never_ours and not _is_system_route(thing)
        }
        # Every managed group is listed as a group as well, and deleted as a managed one.
        for path in [each for each in self._things if "/instanceGroups/" in each]:
            if path.replace("/instanceGroups/", "/instanceGroupManagers/") in self._things:
                del self._things[path]
        self._planned: dict[tuple[str, str], list[PlannedResource]] = {}
        for each in plan.resources:
            key = plain_kind(each.kind), each.name.partition("@")[0]
            self._planned.setdefault(key, []).append(each)
        clusters = [each for each in plan.resources if each.kind == "google_container_cluster"]
        self.cluster_location = (clusters[0].location if clusters else None) or plan.region
        # One of virtual machines has no such name, and what GKE has named is of other clusters.
        self._is_gke = plan.has_kubernetes
        self.cluster_path = f"locations/{self.cluster_location}/clusters/{plan.name}"
        if not self._is_gke:
            self.cluster_path = ""
        self._networks = dict(self._own_networks())
        self._gke_name = re.compile(
            rf"^gke-{re.escape(plan.name)}-(?:(?:{'|'.join(self._pool_names())})-)?"
            # A second hash: the first one is the end of another cluster's name.
            rf"(?:{_HEX}(?:-(?:dynamic-)?pvc-|(?!.*-{_HEX}(?:-|$))(?:-|$))|pvc-)"
        )

    def recognise(self) -> Recognition:
        """Sort the things: by evidence, then by what follows from it until nothing new does. A
        proxy is ours by its URL map, that by a backend service, that by the group of our nodes."""
        found = Recognition()
        foreign: set[str] = set()
        for evidence in (self._own_evidence, self._by_name):
            for path, thing in self._things.items():
                if path in found.ours or path in foreign:
                    continue
                verdict, why = evidence(thing)
                if verdict == "ours":
                    found.ours[path] = why
                elif verdict == "foreign":
                    foreign.add(path)
            while self._spread(found.ours, foreign):
                pass
        for path, thing in self._things.items():
            if path in found.ours or path in foreign:
                continue
            if self._is_doubtful(thing, foreign):
                found.doubtful[path] = "made by some Kubernetes cluster: no label, not attached"
        return found

    def holder(self, thing: Thing, ours: Mapping[str, str]) -> Thing | None:
        """The thing whose deletion deletes this one, where that is one of `ours`."""
        if thing.part is not None and thing.part.goes_with_parent:
            return self._things.get(thing.parent)
        if thing.part is not None:
            own = self._things.get(self.cluster_path)
            return own if _CONTROL_PLANE_PEERING.match(thing.name) else None
        kind = plain_kind(thing.kind)
        if kind == _DISK and (node := self._instance_of(thing, ours)) is not None:
            return node
        of_nodes = kind in _OF_NODES and "pvc-" not in thing.name
        if of_nodes or (kind in _OF_CLUSTER and self.is_gke_name(thing.name)):
            cluster = self._things.get(self._gke_cluster(thing) or "")
            if cluster is not None and cluster.path in ours:
                pool = f"{cluster.path}/nodePools/{self._pool_of(thing)}"
                return self._things.get(pool, cluster)
        if kind == "google_compute_instance":
            made_by = self._path(metadata_of(thing.body).get("created-by", ""))
            if made_by is not None and made_by in ours:
                return self._things.get(made_by)
        return None

    def _pool_of(self, thing: Thing) -> str | None:
        """The node pool that a thing is of; a group has only the template that it uses."""
        linked = [self._things[path] for path in self._linked(thing) if path in self._things]
        names = (labels_of(each).get(GKE_POOL_LABEL) for each in (thing, *linked))
        return next((name for name in names if name), None)

    @property
    def has_cluster(self) -> bool:
        """Whether the GKE cluster of the plan is there."""
        return self.cluster_path in self._things

    def planned(self, thing: Thing) -> list[PlannedResource]:
        """What the plan makes of this kind, name and place."""
        named = self._planned.get((plain_kind(thing.kind), thing.name.partition("@")[0]), [])
        return [each for each in named if _same_place(each.location, thing.location)]

    def has_foreign_mark(self, thing: Thing) -> bool:
        """Whether a label or description says that something else made it."""
        return self._by_label(thing) == "foreign" or self._is_described_otherwise(thing)

    def _own_networks(self) -> Iterator[tuple[str, str]]:
        for (kind, name), _ in self._planned.items():
            if kind == _NETWORK:
                path = f"global/networks/{name}"
                thing = self._things.get(path)
                if thing is None or not self.has_foreign_mark(thing):
                    yield path, "named as the plan names it"
        for path, thing in self._things.items():
            if thing.kind == _NETWORK and self._is_described_as_ours(thing):
                yield path, "described as a part of this cluster"

    def _pool_names(self) -> list[str]:
        names = {each.name for each in self._plan.pools} | {"default-pool"}
        names |= {
            each.name for each in self._plan.resources if each.kind == "google_container_node_pool"
        }
        names |= {
            each.name
            for each in self._things.values()
            if each.part is not None and each.parent == self.cluster_path
        }
        # GKE cuts long names of pools in the names of nodes.
        cut = {name[:length] for name in names for length in range(8, len(name))}
        return [re.escape(name.rstrip("-")) for name in sorted(names | cut, key=len, reverse=True)]

    def _own_evidence(self, thing: Thing) -> tuple[Verdict | None, str]:
        """What the thing alone says. Networks it is attached to come first: they decide."""
        if thing.part is not None:
            return None, ""
        if thing.kind == _NETWORK:
            if thing.path in self._networks:
                return "ours", self._networks[thing.path]
            return (None if self._is_given(thing.path) else "foreign"), ""
        if thing.kind == "google_project_iam_member":
            return self._by_member(thing)
        attached = {path for path in self._linked(thing) if "/networks/" in f"/{path}"}
        if own := attached & self._networks.keys():
            return "ours", f"attached to network {_last(min(own))}"
        if thing.path == self.cluster_path and self._by_label(thing) != "foreign":
            return "ours", "the cluster of the plan"
        label = self._by_label(thing)
        if label == "ours":
            return "ours", "labelled as this cluster's"
        networks = [each for each in self._links(thing) if "/networks/" in f"/{each}"]
        if label == "foreign" or not all(map(self._is_given, networks)):
            return "foreign", ""
        return None, ""

    def _by_name(self, thing: Thing) -> tuple[Verdict | None, str]:
        """What its name says, where nothing stronger does."""
        if thing.part is not None:
            return None, ""
        if thing.kind == "google_storage_bucket":
            own = thing.name == self._plan.state_bucket
            return ("ours", "the bucket of Terraform's state") if own else (None, "")
        if self._is_described_otherwise(thing):
            return "foreign", ""
        if planned := self.planned(thing):
            # What others have in the user's VPC may have our names, and lacks our label.
            if any(map(self._is_given, self._links(thing))) and all(e.labelled for e in planned):
                return None, ""
            return "ours", "named as the plan names it"
        if self._is_described_as_ours(thing):
            return "ours", "described as a part of this cluster"
        if self.is_gke_name(thing.name):
            return "ours", "named by GKE for this cluster"
        if self._is_placement_of_slurm(thing):
            return "ours", "named by Slurm's controller for nodes of this cluster"
        return None, ""

    def _is_placement_of_slurm(self, thing: Thing) -> bool:
        """Whether it is a placement policy of a toolkit's cluster, which has no labels."""
        begin = f"{self._plan.name}-slurmgcp-managed-"
        return (
            self._plan.toolkit is not None
            and thing.kind == "google_compute_resource_policy"
            and thing.name.startswith(begin)
            and not self._by_other_place(thing)
        )

    def is_gke_name(self, name: str) -> bool:
        """Whether GKE names so what it makes for this cluster."""
        if not self._is_gke:
            return False
        longer = (
            f"gke-{other}-"
            for other in self._other_clusters
            if other.startswith(f"{self._plan.name}-")
        )
        return bool(self._gke_name.match(name)) and not any(map(name.startswith, longer))

    @property
    def _other_clusters(self) -> set[str]:
        if not hasattr(self, "_others"):
            things = self._things.values()
            self._others = {
                each.name for each in things if each.kind == "google_container_cluster"
            } | {name for each in things if (name := labels_of(each).get(GKE_NAME_LABEL))}
            self._others.discard(self._plan.name)
        return self._others

    def _by_label(self, thing: Thing) -> Verdict | None:
        labels = labels_of(thing)
        if (marked := labels.get(CLUSTER_LABEL)) is not None:
            return "ours" if marked == self._plan.name else "foreign"
        if self._plan.toolkit is not None and DEPLOYMENT_LABEL in labels:
            made_by = labels.get(BLUEPRINT_LABEL), labels[DEPLOYMENT_LABEL]
            return "ours" if made_by == (self._plan.name, self._plan.name) else "foreign"
        if (path := self._marked_cluster(thing)) is not None:
            return "ours" if path == self.cluster_path else "foreign"
        return None

    def _gke_cluster(self, thing: Thing) -> str | None:
        """The path of the GKE cluster that deletes it."""
        if (path := self._marked_cluster(thing)) is None and self.is_gke_name(thing.name):
            return self.cluster_path
        return path

    def _marked_cluster(self, thing: Thing) -> str | None:
        """The path of the GKE cluster that made it, by GKE's labels and metadata."""
        marks = labels_of(thing)
        name, location = marks.get(GKE_NAME_LABEL), marks.get(GKE_LOCATION_LABEL)
        if name is None:
            marks = metadata_of(thing.body) or metadata_of(thing.body.get("properties") or {})
            name, location = marks.get("cluster-name"), marks.get("cluster-location")
        if name is not None:
            if location is None:
                own = region_of(thing.location) in ("", region_of(self.cluster_location))
                location = self.cluster_location if own else thing.location
            return f"locations/{location}/clusters/{name}"
        return None

    def _by_member(self, thing: Thing) -> tuple[Verdict | None, str]:
        """A grant to a service account of the plan; one that is deleted leaves
        `deleted:serviceAccount:EMAIL?uid=...` (https://cloud.google.com/iam/docs/principal-identifiers)."""
        found = re.match(
            r"(?P<deleted>deleted:)?serviceAccount:(?P<email>[^?]+)", str(thing.body.get("member"))
        )
        email = found["email"] if found else ""
        name = email.partition("@")[0]
        planned = self._planned.get(("google_service_account", name), [])
        own = {each.name if "@" in each.name else self._email(name) for each in planned}
        account = self._things.get(f"iam:serviceAccounts/{email}")
        if found is None or email not in own or (account and self.has_foreign_mark(account)):
            return "foreign", ""
        kind = "deleted service account" if found["deleted"] else "service account"
        return "ours", f"granted to the {kind} {name} of the plan"

    def _email(self, account: str) -> str:
        return f"{account}@{self._plan.project}.iam.gserviceaccount.com"

    def _spread(self, ours: dict[str, str], foreign: set[str]) -> bool:
        """What follows from what is known: one step. Whether it was something new."""
        new: dict[str, str] = {}
        theirs: set[str] = set()
        tokens = {token for path in ours for token in tokens_of(_last(path))}
        tokens -= {token for path in foreign for token in tokens_of(_last(path))}
        used = set(self._used_by(ours))
        for path, thing in self._things.items():
            if path in ours or path in foreign:
                continue
            if thing.part is not None:
                if self._part_is_ours(thing, ours):
                    new[path] = f"part of {_last(thing.parent)}"
                continue
            linked = self._linked(thing)
            if own := [each for each in linked if self._is_ours(each, ours)]:
                new[path] = f"uses {_last(min(own))}"
            elif any(each in foreign for each in linked):
                theirs.add(path)
            elif path in used and MADE_BY_KUBERNETES.match(thing.name):
                new[path] = "used by a load balancer of this cluster"
            elif not self._by_other_place(thing) and tokens & set(tokens_of(thing.name)):
                new[path] = "made by this cluster's Kubernetes, by the hash in its name"
        ours.update(new)
        foreign |= theirs
        return bool(new or theirs)

    def _part_is_ours(self, thing: Thing, ours: Mapping[str, str]) -> bool:
        if thing.kind.endswith("_association"):
            return any(each in self._networks for each in self._linked(thing))
        return thing.parent in ours

    def _is_ours(self, path: str, ours: Mapping[str, str]) -> bool:
        """Also of things that are gone: a target pool names nodes that no longer exist."""
        if path in ours or path == self.cluster_path or path in self._networks:
            return True
        return path not in self._things and self.is_gke_name(_last(path))

    def _used_by(self, ours: Mapping[str, str]) -> Iterator[str]:
        for path in ours:
            thing = self._things.get(path)
            for key in _USED if thing else ():
                value = thing.body.get(key) if thing else None
                for each in value if isinstance(value, list) else [value]:
                    if isinstance(each, str) and (found := self._path(each)):
                        yield found

    def _is_doubtful(self, thing: Thing, foreign: set[str]) -> bool:
        if thing.part is not None or self._by_other_place(thing):
            return False
        if not re.match("pvc-|snapshot-|mcrt-", thing.name) and not any(tokens_of(thing.name)):
            return False
        theirs = {token for path in foreign for token in tokens_of(_last(path))}
        known = any(path in self._things for path in self._linked(thing))
        return not known and not theirs & set(tokens_of(thing.name))

    def _by_other_place(self, thing: Thing) -> bool:
        region = region_of(thing.location)
        return bool(region) and region != region_of(self.cluster_location)

    def _instance_of(self, disk: Thing, ours: Mapping[str, str]) -> Thing | None:
        for user in self._linked(disk):
            node = self._things.get(user)
            for each in node.body.get("disks") or () if node and node.path in ours else ():
                if each.get("autoDelete") and self._path(str(each.get("source"))) == disk.path:
                    return node
        return None

    def _is_described_as_ours(self, thing: Thing) -> bool:
        return thing.body.get("description") == f"drillyard cluster {self._plan.name}"

    def _is_described_otherwise(self, thing: Thing) -> bool:
        """Whether its description is not the one that the plan gives what has this name."""
        given = thing.body.get("description")
        planned = self._planned.get((plain_kind(thing.kind), thing.name.partition("@")[0]), [])
        described = {self.description(each) for each in planned} - {None}
        if given and described:
            return given not in described
        return (
            bool(given)
            and bool(re.fullmatch(r"drillyard cluster \S+", str(given)))
            and not self._is_described_as_ours(thing)
        )

    def description(self, planned: PlannedResource) -> str | None:
        """The description that the plan gives a resource."""
        if self._plan.toolkit is not None:
            is_vpc = planned.kind == _NETWORK
            return f"drillyard cluster {self._plan.name}" if is_vpc else None
        kind, _, label = planned.address.partition(".")
        body = self._plan.terraform.get("resource", {}).get(kind, {}).get(label, {})
        found = body.get("description")
        return found if isinstance(found, str) and "${" not in found else None

    def _is_given(self, address: str) -> bool:
        """Whether an address is that of the user's VPC, which says nothing of what is attached to
        it: others are, too."""
        given = self._plan.network
        if given is None:
            return False
        if given.project == self._plan.project:
            path = f"global/networks/{given.name}"
            return path in (address, self._path(address))
        # Some things name the host by its number.
        host = rf"projects/(?:{re.escape(given.project)}|[0-9]+)"
        return bool(re.search(rf"{host}/global/networks/{re.escape(given.name)}$", address))

    def _links(self, thing: Thing) -> list[str]:
        """Addresses that it names, as paths; those of other projects as they are."""
        return [self._path(each) or each for each in thing.linked()]

    def _linked(self, thing: Thing) -> list[str]:
        return [path for each in thing.linked() if (path := self._path(each))]

    def _path(self, address: str) -> str | None:
        return path_in(self._plan.project, self._number, address)


def _same_place(planned: str | None, found: str) -> bool:
    return not planned or not found or region_of(planned) == region_of(found)


def _last(path: str) -> str:
    return path.rpartition("/")[2]


def _is_system_route(thing: Thing) -> bool:
    """Routes that belong to the network itself: nobody can delete them, and they block nothing."""
    return thing.kind == "google_compute_route" and bool(
        thing.body.get("nextHopNetwork")
        or thing.body.get("nextHopPeering")
        or thing.name.startswith("default-route-")
    )
