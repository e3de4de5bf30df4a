"""The service accounts of a Slurm cluster: of its controller, its login node and its nodes.

The project's default account may be an editor. Roles are the least that
https://github.com/GoogleCloudPlatform/cluster-toolkit/blob/v1.95.0/examples/hpc-enterprise-slurm.yaml
has; the controller's module lets all three read the cluster's own bucket. The controller makes
nodes that act as the nodes' account, for which the toolkit has a role on the whole project alone.
"""

from __future__ import annotations

from drillyard.provision.gcp.names import service_account_email
from drillyard.provision.terraform_document import Because, because
from drillyard.provision.toolkit.blueprint_document import BlueprintDocument

CONTROLLER, LOGIN, NODES = "control", "login", "nodes"
"""What an account's id ends with, after the cluster's name: 28 characters in all."""
_SOURCE = "modules/project/service-account"
_LOGS = ("logging.logWriter", "monitoring.metricWriter")
ROLES = {
    CONTROLLER: ("compute.instanceAdmin.v1", "iam.serviceAccountUser", *_LOGS),
    LOGIN: _LOGS,
    NODES: _LOGS,
}
"""The roles of each on the project."""
_NEEDS = {
    CONTROLLER: "it makes and deletes nodes, which act as the nodes' account",
    LOGIN: "logs and metrics of the login node",
    NODES: "logs and metrics of the nodes",
}


def account_of(whose: str) -> str:
    """The id of the module that makes an account."""
    return f"{whose}-account"


def account_email(cluster: str, whose: str, project: str) -> str:
    """The address of an account, as the module forms it."""
    return service_account_email(f"{cluster}-{whose}", project)


def add_accounts(document: BlueprintDocument) -> None:
    """Add the three modules; others get an account by using its module."""
    for whose, roles in ROLES.items():
        body = {
            "name": because(whose, "the end of its id, after the cluster's name"),
            "display_name": because(f"Slurm: {whose}", "for people"),
            "description": because("Made by Cluster Toolkit for drillyard", "for people"),
            "grant_xpn_roles": because(False, "it manages no shared VPC"),
            "project_roles": because(list(roles), _NEEDS[whose]),
        }
        document.add(account_of(whose), _SOURCE, body)


def bucket_viewers() -> Because:
    """Who reads the bucket of a startup script, beside who deploys."""
    member = f"$({account_of(NODES)}.service_account_iam_email)"
    return because([member], "who runs the script reads its parts from a bucket")
