"""The clouds that clusters are made in: what `up`, `down`, `status`, `leaks` and `plan --check` ask of
each, beside Terraform. The package of a cloud has it as CLOUD in its module `cloud`."""  # noqa: E501

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pkgutil import resolve_name

from drillyard.hardware.catalog import Catalog
from drillyard.provision.cluster_plan import ClusterPlan
from drillyard.provision.data_stores import DataStores
from drillyard.provision.leak_report import LeakReport
from drillyard.provision.project_findings import ProjectFinding
from drillyard.provision.provider_errors import ErrorKind
from drillyard.provision.state_bucket import StateBucket
from drillyard.provision.terraform_output import StateResource


@dataclass(frozen=True)
class Cloud:
    """One cloud. All functions raise UserError, UnreachableError where a service does not
    answer."""

    state_bucket: Callable[[ClusterPlan], StateBucket]
    data_stores: Callable[[ClusterPlan], DataStores]
    check_project: Callable[[ClusterPlan], Sequence[ProjectFinding]]
    find_leaks: Callable[[ClusterPlan, frozenset[str], Catalog], LeakReport]
    """What is left besides things of the state, `kind/location/name` each."""
    owned_by_state: Callable[[ClusterPlan], frozenset[str]]
    import_id: Callable[[ClusterPlan, str, Mapping[str, StateResource]], str | None]
    """What `terraform import` needs to find a resource of the plan, by its address and the state;
    None where it cannot be there."""
    provider_environment: Callable[[], dict[str, str]]
    """Variables by which Terraform's provider logs in; empty: it finds its credentials itself."""
    error_kinds: tuple[ErrorKind, ...]


def cloud_of(plan: ClusterPlan) -> Cloud:
    """The cloud that the plan's cluster is made in. Raises MissingExtraError where its client is
    not installed."""
    found: Cloud = resolve_name(f"drillyard.provision.{plan.cloud}.cloud:CLOUD")
    return found


def state_bucket(plan: ClusterPlan) -> StateBucket:
    """The bucket of the cluster's state."""
    return cloud_of(plan).state_bucket(plan)
