"""What the errors of Terraform and Nebius' provider mean, and what to do about them.

Nebius answers with gRPC's codes, and names what is wrong by the details of its API
(https://github.com/nebius/api/blob/main/nebius/common/v1/error.proto).
"""

from __future__ import annotations

from drillyard.provision.provider_errors import KINDS, error_kind

_OF_TERRAFORM = ("stale-plan", "too-old", "network")
"""Kinds that mean the same with every provider."""

NEBIUS_KINDS = (
    error_kind(
        "storage-key",
        r"InvalidAccessKeyId|SignatureDoesNotMatch|AccessDenied|No valid credential sources",
        "The key of the state's bucket may not use it: export AWS_ACCESS_KEY_ID and"
        " AWS_SECRET_ACCESS_KEY of a service account with the role editor of project {project}.",
    ),
    error_kind(
        "credentials",
        r"Unauthenticated|UNAUTHENTICATED|token is (?:expired|invalid)",
        "Log in again: nebius profile create",
    ),
    error_kind(
        "quota",
        r"QuotaFailure|quota[^\n]{0,60}(?:exceeded|failure|limit)",
        "Ask for a higher quota, or for fewer nodes. What is granted: nebius quotas quota-allowance"
        " list --parent-id {project} --all",
    ),
    error_kind(
        "stockout",
        r"NotEnoughResources|not enough resources|ResourceExhausted|RESOURCE_EXHAUSTED",
        "The region has no machines left now. Repeat {command} later, set another nebius.fabric or"
        " location.region, or consumption: spot.",
        can_pass=True,
    ),
    error_kind(
        "permission",
        r"PermissionDenied|PERMISSION_DENIED|permission denied",
        "Your account must be in a group with the role editor of project {project}: nebius iam"
        " group-membership create --parent-id GROUP --member-id ACCOUNT",
    ),
    error_kind(
        "in-use",
        r"FailedPrecondition|FAILED_PRECONDITION|ResourceConflict|is (?:in use|attached)",
        "Something outside of Terraform's state uses it: drillyard cluster leaks lists what is"
        " left, with the commands that delete it.",
        can_pass=True,
    ),
    error_kind(
        "exists",
        r"AlreadyExists|ALREADY_EXISTS|already exists",
        "It was not made by this cluster's state. Delete it, or change the cluster's name.",
    ),
    *(each for each in KINDS if each.name in _OF_TERRAFORM),
    error_kind(
        "no-answer",
        r"code = Unavailable|DeadlineExceeded",
        "Check the network, then repeat {command}.",
        can_pass=True,
        unreachable=True,
    ),
)
"""Earlier rows win: a quota that is exceeded is ResourceExhausted, too."""
