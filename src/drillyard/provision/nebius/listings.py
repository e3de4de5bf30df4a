"""The kinds of things that a GPU cluster of Nebius consists of, with Terraform's name of each and the
words by which Nebius' CLI lists and deletes it, in the order of deletion."""  # noqa: E501

from __future__ import annotations

from dataclasses import dataclass

from drillyard.provision.nebius.instances import DISK_KIND, FILESYSTEM_KIND, GPU_CLUSTER_KIND, KIND
from drillyard.provision.nebius.managed_kubernetes import (
    CLUSTER_KIND,
    NODE_GROUP_KIND,
    RELEASE_KIND,
)
from drillyard.provision.nebius.nebius_plan import BUCKET_KIND

GROUP_KIND, RULE_KIND = "nebius_vpc_v1_security_group", "nebius_vpc_v1_security_rule"


@dataclass(frozen=True)
class ClusterKind:
    """One kind. `of`: the kind that its things are parts of, which lists them; empty: the
    project."""

    kind: str
    words: tuple[str, ...]
    of: str = ""
    billed: bool = False

    def deletion(self, identifier: str) -> str:
        """The command that deletes a thing of the kind."""
        at_once = " --ttl 0" if self.kind == BUCKET_KIND else ""
        return f"nebius {' '.join(self.words)} delete --id {identifier}{at_once}"


LISTINGS = (
    ClusterKind(RELEASE_KIND, ("applications", "v1alpha1", "k8s-release")),
    ClusterKind(NODE_GROUP_KIND, ("mk8s", "node-group"), of=CLUSTER_KIND, billed=True),
    ClusterKind(CLUSTER_KIND, ("mk8s", "cluster"), billed=True),
    ClusterKind(KIND, ("compute", "instance"), billed=True),
    ClusterKind(DISK_KIND, ("compute", "disk"), billed=True),
    ClusterKind(GPU_CLUSTER_KIND, ("compute", "gpu-cluster")),
    ClusterKind(FILESYSTEM_KIND, ("compute", "filesystem"), billed=True),
    ClusterKind(RULE_KIND, ("vpc", "security-rule"), of=GROUP_KIND),
    ClusterKind(GROUP_KIND, ("vpc", "security-group")),
    ClusterKind("nebius_vpc_v1_subnet", ("vpc", "subnet")),
    ClusterKind("nebius_vpc_v1_network", ("vpc", "network")),
    ClusterKind(BUCKET_KIND, ("storage", "bucket"), billed=True),
)
BY_KIND = {each.kind: each for each in LISTINGS}
