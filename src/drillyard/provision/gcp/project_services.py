"""The APIs of the project that the cluster, its nodes and the commands use."""

from __future__ import annotations

from collections.abc import Mapping

from drillyard.provision.terraform_document import TerraformDocument, because

VM_SERVICES = {
    "cloudresourcemanager.googleapis.com": "roles on the project",
    "compute.googleapis.com": "networks, and the nodes",
    "iam.googleapis.com": "the nodes' service account",
    "logging.googleapis.com": "logs of the nodes",
    "monitoring.googleapis.com": "metrics of nodes and GPUs",
    "storage.googleapis.com": "the bucket, and Terraform's state",
    "artifactregistry.googleapis.com": "images",
    "cloudasset.googleapis.com": "`drillyard cluster leaks` looks for what is left",
}
"""What a cluster of virtual machines needs, each with what needs it, in the order of creation."""


def service_address(service: str) -> str:
    """The Terraform address of a project service: google_project_service.compute."""
    return f"google_project_service.{service.partition('.')[0]}"


def add_project_services(document: TerraformDocument, services: Mapping[str, str]) -> None:
    """Enable the APIs, each with what needs it. `down` leaves them enabled: others may use them."""
    for service, need in services.items():
        document.add(
            "google_project_service",
            service.partition(".")[0],
            {
                "service": because(service, need),
                "disable_on_destroy": because(False, "others of the project may use it"),
            },
            name=service,
        )
