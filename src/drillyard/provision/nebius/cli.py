"""Nebius' own command line, by which its project is asked: the user's profile of `nebius` logs in.

Answers are the JSON of Nebius' API (https://github.com/nebius/api): `metadata` with id, name and
labels, `spec`, `status`; a list has them in `items`, and nothing where it is empty. What a field
lacks has its default, and whole numbers of 64 bits are texts.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any, Literal

from drillyard.errors import UnreachableError, UserError
from drillyard.programs import Programs, shown_text
from drillyard.provision.cluster_plan import CLUSTER_LABEL, ClusterPlan

PROGRAM = "nebius"
INSTALL = "https://docs.nebius.com/cli/install"
TOKEN = "NEBIUS_IAM_TOKEN"  # noqa: S105
_SECONDS = 180.0
"""A change of a bucket is waited for."""
Refusal = Literal["absent", "taken", "denied", "login", "other"]
_REFUSALS: tuple[tuple[Refusal, str], ...] = (
    ("login", r"Unauthenticated|no (?:current |active )?profile|token is (?:expired|invalid)"),
    ("denied", r"PermissionDenied|permission denied"),
    ("absent", r"\bNotFound\b|not found"),
    ("taken", r"AlreadyExists|already exists"),
)
"""By gRPC's codes, as the program prints them (https://grpc.io/docs/guides/status-codes)."""
_NO_ANSWER = re.compile(r"Unavailable|DeadlineExceeded|no such host|dial tcp|connection refused")
Item = Mapping[str, Any]


class NebiusError(UserError):
    """A refusal of Nebius. `refusal`: of which kind."""

    def __init__(self, text: str, refusal: Refusal) -> None:
        super().__init__(text)
        self.refusal = refusal


def call(*words: str) -> dict[str, Any]:
    """The answer of `nebius WORDS`. Raises NebiusError where it is refused, UnreachableError where
    Nebius does not answer, UserError where the program is missing."""
    command = (PROGRAM, *words)
    try:
        ended = Programs().run((*command, "--format", "json"), timeout=_SECONDS)
    except UnreachableError:
        raise
    except UserError:
        raise UserError(f"{PROGRAM}: is not installed\nInstall Nebius' CLI: {INSTALL}") from None
    if ended.returncode:
        raise _refused(" ".join(words), ended.stderr or ended.stdout)
    if not ended.stdout.strip():
        return {}
    found: dict[str, Any] = ended.printed_json()
    return found


def items(*words: str, parent: str) -> list[dict[str, Any]]:
    """All things of a list below `parent`. Raises as `call`."""
    found: list[dict[str, Any]] = call(*words, "list", "--parent-id", parent, "--all").get(
        "items", []
    )
    return found


def token() -> str:
    """What Terraform's provider logs in with, for 12 hours: the one of the environment, or a new
    one of the profile."""
    if given := os.environ.get(TOKEN):
        return given
    ended = Programs().run((PROGRAM, "iam", "get-access-token"), timeout=_SECONDS)
    if ended.returncode:
        raise _refused("iam get-access-token", ended.stderr)
    return ended.stdout.strip()


def name_of(item: Item) -> str:
    return str(item["metadata"].get("name", ""))


def id_of(item: Item) -> str:
    return str(item["metadata"]["id"])


def cluster_label(item: Item) -> str | None:
    """The name of the cluster that a thing belongs to, by its label."""
    found = (item["metadata"].get("labels") or {}).get(CLUSTER_LABEL)
    return None if found is None else str(found)


def is_ours(plan: ClusterPlan, item: Item) -> bool:
    """Whether a thing carries the label of the plan's cluster."""
    return cluster_label(item) == plan.name


def _refused(what: str, printed: str) -> UserError:
    text = shown_text(printed) or "without a message"
    said = f"{PROGRAM} {what}: {text}"
    if _NO_ANSWER.search(printed):
        return UnreachableError(f"{said}\nCheck the network, then repeat the command")
    refusal: Refusal = "other"
    for each, pattern in _REFUSALS:
        if re.search(pattern, printed, re.IGNORECASE):
            refusal = each
            break
    advice = "\nLog in: nebius profile create" if refusal == "login" else ""
    return NebiusError(said + advice, refusal)
