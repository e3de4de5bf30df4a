"""The service account that nodes or jobs run as: their own, as the project's default one may be an
editor.

https://cloud.google.com/compute/docs/access/service-accounts
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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


@dataclass(frozen=True)
class ServiceAccount:
    """An account: its label in the document, its id, who uses it (`the nodes`), and why it is
    there."""

    label: str
    account: str
    users: str
    reason: str


def add_node_identity(
    document: TerraformDocument, settings: GoogleSettings, roles: Mapping[str, str]
) -> tuple[str, ...]:
    """The nodes' service account with roles on the project, each with what needs it: the address of
    the account, then those of the roles."""
    account = ServiceAccount(
        "nodes",
        shortened(settings.name, "-nodes", LONGEST_SERVICE_ACCOUNT),
        "the nodes",
        "an account of the nodes' own: the project's default one may be an editor",
    )
    return add_service_account(document, settings, account, roles)


def add_service_account(
    document: TerraformDocument,
    settings: GoogleSettings,
    account: ServiceAccount,
    roles: Mapping[str, str],
) -> tuple[str, ...]:
    """An account with roles on the project, each with what needs it: its address, then those of the
    roles."""
    name, project, users = settings.name, settings.project, account.users
    email = service_account_email(account.account, project)
    address = document.add(
        "google_service_account",
        account.label,
        {
            "account_id": because(account.account, account.reason, "cluster.yaml: name"),
            "display_name": because(f"{account.label.capitalize()} of {name}", "for people"),
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
                "project": because(project, f"where {users} are", "cluster.yaml: location.project"),
                "role": because(role, need),
                "member": because(reference(address, "member"), users),
            },
            name=f"{role} serviceAccount:{email}",
            after=[service_address("cloudresourcemanager.googleapis.com")],
        )
        for role, need in roles.items()
    ]
    return (address, *granted)
