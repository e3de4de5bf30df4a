"""Where the nodes of a pool are, relative to each other.

Near each other they have fewer switches between them, and labels by which Kueue places pods. Rules:
the checks of Cluster Toolkit's module gke-node-pool, and
https://cloud.google.com/kubernetes-engine/docs/how-to/compact-placement.
"""

from __future__ import annotations

from drillyard.hardware.facts import cited
from drillyard.hardware.machines import Machine
from drillyard.provision.cluster_plan import Pool
from drillyard.provision.gcp.names import described, named
from drillyard.provision.gcp.placement import is_compact, nodes_of_domain
from drillyard.provision.gcp.settings import GoogleSettings
from drillyard.provision.terraform_document import Body, TerraformDocument, because, reference


def add_placement(document: TerraformDocument, settings: GoogleSettings, pool: Pool) -> Body:
    """The pool's block `placement_policy`, if it has one, and the policy that it refers to."""
    if nodes_of_domain(pool.machine) is not None:
        policy = _domain_policy(document, settings, pool.machine)
        why = "all nodes in one NVLink domain"
        block = [{"type": "COMPACT", "policy_name": reference(policy, "name")}]
        source = cited(pool.machine, "link_domain_accelerators")
        return {"placement_policy": because(block, why, source)}
    if is_compact(pool, settings.creation):
        why = "fewer switches between the nodes, and labels for topology-aware scheduling"
        source = "cluster.yaml: cluster.compact_placement"
        return {"placement_policy": because([{"type": "COMPACT"}], why, source)}
    return {}


def _domain_policy(document: TerraformDocument, settings: GoogleSettings, machine: Machine) -> str:
    topology = f"1x{machine.link_domain_accelerators}"
    label, name = f"domain_{topology}", f"{settings.name}-{topology}"
    address = f"google_compute_resource_policy.{label}"
    if any(each.address == address for each in document.resources):
        return address
    return document.add(
        "google_compute_resource_policy",
        label,
        {
            "name": named(name),
            "description": described(settings.name),
            "region": because(
                settings.region, "where the nodes are", "cluster.yaml: location.region"
            ),
            "workload_policy": because(
                [{"type": "HIGH_THROUGHPUT", "accelerator_topology": topology}],
                "nodes of one NVLink domain",
                cited(machine, "link_domain_accelerators"),
            ),
        },
        name=name,
        location=settings.region,
        after=["google_project_service.compute"],
    )
