"""The identities of nodes and runs in Google Cloud, and their rights.

Nodes have a service account with the role that Google keeps for them
(https://cloud.google.com/kubernetes-engine/docs/how-to/service-accounts) and may read images. Runs
are not the node: their Kubernetes service account is a principal of Workload Identity with rights
on the bucket alone (https://cloud.google.com/kubernetes-engine/docs/how-to/workload-identity).
"""

from __future__ import annotations

from drillyard.config.cluster import ClusterConfig
from drillyard.launch.kubernetes.config import KubernetesConfig
from drillyard.launch.kubernetes.created_cluster import PRIVILEGED, RESTRICTED, SERVICE_ACCOUNT
from drillyard.provision.gcp.settings import GoogleSettings
from drillyard.provision.gcp.storage import BUCKET_ROLE
from drillyard.provision.terraform_document import TerraformDocument, because

NODE_ROLES = {
    "roles/container.defaultNodeServiceAccount": "logs, metrics and what else every node does",
    "roles/artifactregistry.reader": "images of any repository of the project",
}


def run_identities(cluster: ClusterConfig) -> tuple[tuple[str, str], ...]:
    """The Kubernetes service accounts of runs, as namespace and name: those that a cluster of ours
    has, and the one that the config names."""
    section = cluster.section_as(KubernetesConfig)
    account = section.service_account or SERVICE_ACCOUNT
    own = (section.namespace,) if "namespace" in section.model_fields_set else ()
    return tuple(
        (namespace, account) for namespace in dict.fromkeys((RESTRICTED, PRIVILEGED, *own))
    )


def add_run_access(
    document: TerraformDocument,
    settings: GoogleSettings,
    bucket: str,
    project_number: str,
    made: str,
) -> None:
    """Let the runs read and write the bucket. `bucket`, `project_number`: names or expressions;
    `made`: the address of the cluster, which brings the pool of identities."""
    cluster, project = settings.cluster, settings.project
    assert cluster.storage.bucket is not None
    pool = f"projects/{project_number}/locations/global/workloadIdentityPools/{project}.svc.id.goog"
    for namespace, account in run_identities(cluster):
        subject = f"subject/ns/{namespace}/sa/{account}"
        document.add(
            "google_storage_bucket_iam_member",
            f"namespace_{namespace.replace('-', '_').replace('.', '__')}",
            {
                "bucket": because(
                    bucket, "run directories and data", "cluster.yaml: storage.bucket"
                ),
                "role": because(BUCKET_ROLE, "read, write and delete objects, and nothing else"),
                "member": because(
                    f"principal://iam.googleapis.com/{pool}/{subject}",
                    "pods of this service account and of no other, by Workload Identity",
                    "cluster.yaml: kubernetes.namespace, kubernetes.service_account",
                ),
            },
            name=f"{BUCKET_ROLE} {subject} on {cluster.storage.bucket}",
            after=[made],
        )
