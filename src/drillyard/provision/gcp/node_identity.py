"""The service account that nodes run as: their own, as the project's default one may be an editor.

https://cloud.google.com/compute/docs/access/service-accounts
"""

from __future__ import annotations

from collections.abc import Mapping

from drillyard.provision.gcp.names import (
    LONGEST_SERVICE_ACCOUNT,
    described,
    service_account_email,
    shortened,
)
from drillyard.provision.gcp.project_services import service_address
from drillyard.provision.gcp.settings import GoogleSettings
from drillyard.provision.terraform_document import TerraformDocument, because, reference

SCOPES = ["https://www.googleapis.com/auth/cloud-platform"]
"""What the account may do is decided by its roles alone."""


def add_node_identity(
    document: TerraformDocument, settings: GoogleSettings, roles: Mapping[str, str]
) -> tuple[str, ...]:
    """The nodes' service account with roles on the project, each with what needs it: the address of
    the account, then those of the roles."""
    name, project = settings.name, settings.project
    account = shortened(name, "-nodes", LONGEST_SERVICE_ACCOUNT)
    email = service_account_email(account, project)
    why = "an account of the nodes' own: the project's default one may be an editor"
    address = document.add(
        "google_service_account",
        "nodes",
        {
            "account_id": because(account, why, "cluster.yaml: name"),
            "display_name": because(f"Nodes of {name}", "for people"),
            "description": described(name),
        },
        name=email,
        after=[service_address("iam.googleapis.com")],
    )
    granted = [
        document.add(
            "google_project_iam_member",
            role.partition("/")[2].replace(".", "_"),
            {
                "project": because(
                    project, "where the nodes are", "cluster.yaml: location.project"
                ),
                "role": because(role, need),
                "member": because(reference(address, "member"), "the nodes"),
            },
            name=f"{role} serviceAccount:{email}",
            after=[service_address("cloudresourcemanager.googleapis.com")],
        )
        for role, need in roles.items()
    ]
    return (address, *granted)
