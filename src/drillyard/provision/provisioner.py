"""The registry's view of provisioning: which function plans the clusters of a platform.

A platform that `drillyard cluster` can create has `provisioner` in its facts
(`config/platforms.py`): the `module:name` of a function `(ClusterConfig, Catalog) -> ClusterPlan`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Protocol

from drillyard.config.cluster import ClusterConfig
from drillyard.config.load import load_cluster_config
from drillyard.config.platforms import platforms
from drillyard.config.problems import Problem, raise_all
from drillyard.errors import UserError
from drillyard.hardware import load_catalog
from drillyard.hardware.catalog import Catalog
from drillyard.launch.cluster_check import ClusterCheck, ClusterChecker
from drillyard.programs import Programs
from drillyard.provision.cluster_plan import ClusterPlan
from drillyard.provision.prices import prices_given, with_own_prices


class Provisioner(Protocol):
    """Plans a cluster: pure, without a cloud. Raises UserError for what cannot be created."""

    def __call__(self, cluster: ClusterConfig, facts: Catalog) -> ClusterPlan: ...


def plan_cluster(cluster: ClusterConfig, facts: Catalog | None = None) -> ClusterPlan:
    """The plan of the cluster that the config describes, by `facts`, or ours with the config's own
    `hardware` file over them. Raises UserError where its platform creates none, and for every
    mistake that the platform's rules find."""
    require_provisioner(cluster)
    provisioner: Provisioner = resolve_name(platforms()[cluster.platform].provisioner)
    return provisioner(cluster, facts or load_catalog(cluster.hardware))


def require_provisioner(cluster: ClusterConfig) -> None:
    """Raise UserError, with what to do instead, where the config's platform is one on which no
    cluster is created or completed."""
    facts = platforms()[cluster.platform]
    exists = facts.machines == "own or bought" and cluster.has_own_machines
    if not facts.provisioner or exists:
        able = [each for each, row in platforms().items() if row.provisioner]
        message = (
            f"{cluster.platform}: {facts.instead_of_provisioning}"
            if exists and facts.provisioner
            else f"{cluster.platform}: `drillyard cluster` takes platform {' or '.join(able)};"
            f" {facts.instead_of_provisioning}"
        )
        raise_all([Problem(("platform",), message)], cluster._origin.places)


def creation_rules(
    hardware: Path | None = None,
) -> Callable[[ClusterConfig], Iterator[Problem]]:
    """The rules of the config's platform for the creation of its cluster, by the facts of a
    `hardware` file in place of the config's own (UserError where it cannot be read). They raise
    UserError for a platform of which no cluster is created."""

    own = None if hardware is None else load_catalog(hardware)

    def problems(cluster: ClusterConfig) -> Iterator[Problem]:
        require_provisioner(cluster)
        try:
            facts = own or load_catalog(cluster.hardware)
        except UserError as error:
            yield Problem(("hardware",), str(error).replace("\n", "; "))
            return
        if name := platforms()[cluster.platform].provision_rules:
            yield from resolve_name(name)(cluster, facts)

    return problems


def require_created(plan: ClusterPlan) -> None:
    """Raise UserError where the cluster is one that somebody else has made."""
    if not plan.is_made_in_a_cloud:
        raise UserError(
            f"platform: {plan.platform}: cluster {plan.name} was not created by Drillyard, which"
            " removes and looks for nothing of a cloud there\nRemove its chart with: helm uninstall"
            " drillyard-cluster --namespace drillyard-system"
        )


def require_driven(plan: ClusterPlan, what: str) -> None:
    """Raise UserError where `what` (a command) does nothing for a cluster, since the recipe of
    somebody else makes it."""
    if plan.recipe is not None:
        raise UserError(
            f"cluster {plan.name}: {plan.recipe.name} makes, changes and removes it, so there is no"
            f" `drillyard cluster {what}` of it\nWrite its settings and commands: drillyard cluster"
            f" plan CLUSTER --output {plan.name}; then: bash {plan.name}/apply.sh"
        )


def check_nodes(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    hardware: Path | None = None,
    programs: Programs | None = None,
) -> ClusterCheck | None:
    """What is found on all nodes of the cluster that the config at `path` describes; None for a
    platform whose clusters are compared with a plan. Raises UserError as `plan_file`."""
    created = creation_rules(hardware)

    def rules(cluster: ClusterConfig) -> Iterator[Problem]:
        if not platforms()[cluster.platform].cluster_check:
            yield from created(cluster)

    cluster = load_cluster_config(path, overrides, resolve_environment=False, rules=rules)
    name = platforms()[cluster.platform].cluster_check
    if not name:
        return None
    check: ClusterChecker = resolve_name(name)
    return check(cluster, load_catalog(hardware or cluster.hardware), programs or Programs())


@dataclass(frozen=True)
class PlannedCluster:
    """A cluster config, the catalog with the user's hardware, and the plan of both."""

    cluster: ClusterConfig
    facts: Catalog
    plan: ClusterPlan


def plan_file(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    hardware: Path | None = None,
    prices: Sequence[str] = (),
) -> PlannedCluster:
    """The plan of the config at `path` with `overrides` (KEY=VALUE), the user's `hardware` in place
    of the config's own, and the user's `prices` (`--price`). Raises UserError."""
    cluster = load_cluster_config(
        path, overrides, resolve_environment=False, rules=creation_rules(hardware)
    )
    facts = load_catalog(hardware or cluster.hardware)
    plan = plan_cluster(cluster, facts)
    if prices:
        given = prices_given(prices, plan.pools, controllers=plan.has_kubernetes)
        plan = replace(plan, prices=with_own_prices(plan.prices, given))
    return PlannedCluster(cluster, facts, plan)
