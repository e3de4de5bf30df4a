"""Nebius, for `up`, `down`, `status`, `leaks` and `plan --check`."""

from __future__ import annotations

from collections.abc import Mapping

from drillyard.provision.adoption import body_of, resolve
from drillyard.provision.clouds import Cloud
from drillyard.provision.cluster_plan import ClusterPlan
from drillyard.provision.nebius import cli
from drillyard.provision.nebius.filesystems import SharedFilesystems
from drillyard.provision.nebius.leaks import find_leaks
from drillyard.provision.nebius.listings import BY_KIND
from drillyard.provision.nebius.preflight import check_project
from drillyard.provision.nebius.provider_errors import NEBIUS_KINDS
from drillyard.provision.nebius.state_bucket import NebiusStateBucket
from drillyard.provision.terraform_output import StateResource


def import_id(plan: ClusterPlan, address: str, state: Mapping[str, StateResource]) -> str | None:
    """The id that Nebius has given to a resource of the plan, by its name; None where there is no
    such thing, or what it would be in is not known."""
    body, listing = body_of(plan, address), BY_KIND.get(address.partition(".")[0])
    parent = resolve(str(body.get("parent_id", "")), state)
    if listing is None or not parent or "${" in parent:
        return None
    for each in cli.items(*listing.words, parent=parent):
        if cli.name_of(each) == body["name"]:
            return cli.id_of(each)
    return None


def _owned_by_state(plan: ClusterPlan) -> frozenset[str]:
    """`kind//name` of what the state has; empty where the bucket of the state does not exist."""
    bucket = NebiusStateBucket(plan)
    if bucket.find() is None:
        return frozenset()
    return frozenset(
        f"{each.kind}//{each.attributes['name']}" for each in bucket.resources().values()
    )


def _login() -> dict[str, str]:
    return {cli.TOKEN: cli.token()}


CLOUD = Cloud(
    state_bucket=NebiusStateBucket,
    data_stores=SharedFilesystems,
    check_project=check_project,
    find_leaks=find_leaks,
    owned_by_state=_owned_by_state,
    import_id=import_id,
    provider_environment=_login,
    error_kinds=NEBIUS_KINDS,
)
