"""The key of Nebius' object storage: in the environment alone, where Terraform has it from."""

from __future__ import annotations

import os

from drillyard.errors import UserError
from drillyard.provision.cluster_plan import ClusterPlan

KEY_VARIABLES = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")


def missing_variables() -> list[str]:
    """Those that are not set."""
    return [each for each in KEY_VARIABLES if not os.environ.get(each)]


def key_commands(plan: ClusterPlan) -> str:
    """What makes a key. The account must be in a group that has the role editor of the project."""
    return (
        f"nebius iam service-account create --parent-id {plan.project} --name terraform; nebius iam"
        f" v2 access-key create --parent-id {plan.project} --account-service-account-id ID"
    )


def require_key(plan: ClusterPlan) -> None:
    """Raise UserError where a part of the key is missing."""
    if missing := missing_variables():
        raise UserError(f"{missing_text(missing)}\n{key_fix(plan)}")


def missing_text(missing: list[str]) -> str:
    """What is wrong, for an error or a finding."""
    verb = "is" if len(missing) == 1 else "are"
    return (
        f"{' and '.join(missing)} {verb} not set: Terraform's state is in Nebius' object storage,"
        " which takes the key of a service account"
    )


def key_fix(plan: ClusterPlan) -> str:
    """What to type."""
    return f"{key_commands(plan)}; then export {'=... '.join(KEY_VARIABLES)}=..."
