"""`drillyard cluster up`: from a cluster config to a cluster that takes runs, of Kubernetes, of
hosts that are reached by ssh, or of a service that makes the machines for each run.

Each step can be repeated, and the command continues wherever an earlier one ended: what exists is
in Terraform's state, or found again (`adoption.py`), and charts are installed over themselves. The
lock of the state is held from the first change to the last.
"""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drillyard.config.load import yaml_text
from drillyard.config.yaml_document import parse_document
from drillyard.errors import UserError
from drillyard.formatting import plural
from drillyard.provision.adoption import adopt, adopt_interrupted, body_of
from drillyard.provision.clouds import cloud_of, state_bucket
from drillyard.provision.cluster_plan import ClusterPlan
from drillyard.provision.cluster_session import Request, Session, Stages, session, terraform_program
from drillyard.provision.installer_images import (
    chosen_digests,
    given_digests,
    has_images,
    with_digests,
)
from drillyard.provision.launch_file import launch_values, with_values
from drillyard.provision.made_hosts import (
    MadeHost,
    launch_values_of_hosts,
    made_hosts,
    planned_hosts,
)
from drillyard.provision.node_request import (
    spent_requests,
    wait_for_nodes,
)
from drillyard.provision.prices import price_totals, require_prices
from drillyard.provision.provisioner import require_driven
from drillyard.provision.run_guards import DESTROYING, guard_runs
from drillyard.provision.terraform_output import (
    PlannedChanges,
    StateResource,
    changes_text,
)
from drillyard.provision.toolkit.gcluster import find_gcluster
from drillyard.provision.toolkit.toolkit_cluster import deploy
from drillyard.safe_files import describe_os_error, rewrite_file


@dataclass(frozen=True)
class MadeCluster:
    """A cluster that takes runs: its kubeconfig context, empty where it has no Kubernetes, and
    SECRET/KEY by the variable that `--secret` named; the hosts that it consists of."""

    context: str
    secrets: Mapping[str, str]
    hosts: tuple[MadeHost, ...] = ()
    settings: Mapping[str, Any] | None = None
    """What `launch` needs, where the plan alone does not know it."""


def bring_up(request: Request, stages: Stages, secrets: Sequence[str] = ()) -> MadeCluster:
    """Make the cluster, or what it lacks.

    Raises UserError for the first mistake, before anything is made where it can be found then;
    KeyboardInterrupt after Ctrl-C, once Terraform has saved the state.
    """
    plan = request.plan
    require_driven(plan, "up")
    for name in secrets:
        if not os.environ.get(name):
            raise UserError(f"--secret {name}: is not set on this machine: export {name}=...")
    if not plan.is_made_in_a_cloud:
        return _complete_existing(request, stages, secrets)
    if secrets and not plan.has_kubernetes:
        raise UserError(
            f"--secret {secrets[0]}: is kept on clusters of Kubernetes alone; other runs get it"
            " from the environment of `drillyard launch`: leave it out"
        )
    require_prices(plan)
    toolkit, program = None, None
    if plan.toolkit is not None:
        toolkit = find_gcluster()
    else:
        program = terraform_program(plan)
    stages.require_programs(plan)
    _check_project(request, stages)
    digests = _image_digests(request, stages)
    for warning in plan.warnings:
        request.report(f"warning: {warning}")
    for line in _prices_text(plan):
        request.report(line)
    request.confirm(f"Make cluster {plan.name} in project {plan.project}?")
    with _next_command(request):
        bucket = state_bucket(plan)
        if bucket.ensure():
            request.report(f"created {bucket.title}, the bucket of the state")
        if toolkit is not None:
            return MadeCluster("", {}, settings=deploy(request, stages, toolkit))
        assert program is not None
        with session(request, program) as opened:
            _apply(opened, stages)
            state = opened.bucket.resources()
            if plan.has_kubernetes:
                context = stages.write_context(plan, state[plan.control_plane].attributes)
                request.report(f"context {context} is in your kubeconfig")
                opened.require_lock()
                digests = _recorded_digests(opened, digests)
                stages.install_releases(with_digests(plan, digests), context)
                written = {name: stages.write_secret(context, name) for name in secrets}
                return MadeCluster(context, written)
        # The lock is released: nodes may come in days.
        return MadeCluster("", {}) if plan.login is None else _reach_hosts(request, stages, state)


def _reach_hosts(
    request: Request, stages: Stages, state: Mapping[str, StateResource]
) -> MadeCluster:
    assert request.plan.login is not None
    if request.plan.login.group is None:
        hosts = planned_hosts(request.plan, made_hosts(state))
    else:
        ask, down = stages.node_request, request.down_command
        hosts = tuple(wait_for_nodes(request.plan, state, ask, request.report, down))
    path = stages.write_login(request.plan, hosts)
    login = f"ssh -F {shlex.quote(str(path))} -l {request.plan.login.user} {hosts[0].name}"
    request.report(
        f"{plural(len(hosts), 'host')} made; drillyard cluster status says when they answer. By"
        f" hand: {login}"
    )
    return MadeCluster("", {}, hosts)


def _complete_existing(request: Request, stages: Stages, secrets: Sequence[str]) -> MadeCluster:
    """Install the charts on a cluster that somebody else has made."""
    from drillyard.provision.existing_objects import states_text
    from drillyard.provision.kubernetes_stage import context_name

    plan = request.plan
    if secrets:
        raise UserError(
            f"--secret {secrets[0]}: is for clusters that `up` creates; on this one make the Secret"
            f" yourself: kubectl create secret generic NAME --from-env-file=FILE"
        )
    stages.require_programs(plan)
    context = context_name(plan)
    compared = stages.compare_existing(plan, context)
    for line in states_text(compared.states):
        request.report(line)
    if compared.refusals:
        raise UserError("\n".join([*compared.refusals, "Nothing was changed."]))
    request.confirm(f"Install {len(plan.releases)} charts on context {context or 'in use'}?")
    stages.install_releases(compared.plan, context)
    return MadeCluster(context or "", {})


def separate_launch_values(plan: ClusterPlan, made: MadeCluster) -> dict[str, Any]:
    """The config for `launch` of a plan that has one of its own (`ClusterPlan.launch_platform`)."""
    if plan.login is not None:
        return launch_values_of_hosts(plan, made.hosts)
    values = dict(plan.launch_settings or {})
    if made.secrets:
        values["kubernetes"] = {**values["kubernetes"], "secrets": dict(made.secrets)}
    return values


@dataclass(frozen=True)
class LaunchConfig:
    """The text of the cluster config for `launch`. `in_place`: it is the user's own text with what
    it lacks; else one without comments, as it had to be written again."""

    text: str
    in_place: bool


def launch_config(
    path: Path, plan: ClusterPlan, made: MadeCluster, overrides: Sequence[str] = ()
) -> LaunchConfig:
    """The cluster config for `launch`: that at `path` with `overrides` (`--set`) and the settings
    that it lacks."""
    text = path.read_text(encoding="utf-8-sig")
    settings = dict(made.settings or plan.launch_settings or {})
    if made.secrets:
        settings["kubernetes"] = {**settings.get("kubernetes", {}), "secrets": dict(made.secrets)}
    values = launch_values(parse_document(text, str(path)), overrides, settings)
    changed = with_values(text, values)
    if changed is None:
        return LaunchConfig(yaml_text(values, width=100), in_place=False)
    return LaunchConfig(changed, in_place=True)


def write_launch_config(path: Path, config: LaunchConfig) -> bool:
    """Put the config into the user's file, which keeps its permissions, also behind a link; False:
    it would lose its comments, and stays as it is. Raises UserError where it cannot be written."""
    if config.in_place and config.text != path.read_text(encoding="utf-8-sig"):
        try:
            rewrite_file(path, config.text.encode())
        except OSError as error:
            raise UserError(f"{path}: cannot be written: {describe_os_error(error)}") from None
    return config.in_place


def _check_project(request: Request, stages: Stages) -> None:
    findings = stages.check_project(request.plan)
    for each in findings:
        if each.level != "error":
            request.report(f"{each.level}: {each.what}" + (f": {each.fix}" if each.fix else ""))
    errors = [each for each in findings if each.level == "error"]
    if errors:
        raise UserError(
            "\n".join(f"{each.what}\n{each.fix}".rstrip() for each in errors)
            + "\nNothing was made."
        )


def _image_digests(request: Request, stages: Stages) -> dict[str, str]:
    """The digests of the DaemonSets' images: before anything is made, as a registry that does not
    answer would stop `up` later."""
    if not has_images(request.plan):
        return {}
    recorded = state_bucket(request.plan).digests()
    return chosen_digests(request.plan, recorded, stages.image_digest, request.report)


def _recorded_digests(opened: Session, chosen: Mapping[str, str]) -> dict[str, str]:
    """Record them; what another `up` has recorded since they were chosen counts."""
    earlier = opened.bucket.digests()
    found = {image: earlier.get(image, digest) for image, digest in chosen.items()}
    opened.bucket.record_digests({**given_digests(opened.request.plan), **found})
    return found


def _prices_text(plan: ClusterPlan) -> list[str]:
    """What the cluster costs; the parts are in `drillyard cluster plan`."""
    total = price_totals(plan.prices)
    idle, full = (f"${each.value:,.2f} per hour" for each in (total.idle, total.full))
    unknown = f"; without {', '.join(total.unknown)}" if total.unknown else ""
    return [f"price: {idle} without runs, {full} with all nodes{unknown}"]


def _apply(opened: Session, stages: Stages) -> None:
    """Bring Terraform's resources to what the plan says."""
    request, terraform, bucket = opened.request, opened.terraform, opened.bucket
    adopt_interrupted(request.plan, terraform, bucket, request.report, recreate=True)
    _adopt_kept_data(opened)
    request.report(f"comparing {len(request.plan.made_by_terraform)} resources with what exists")
    spent = spent_requests(request.plan, bucket.resources, stages.node_request)
    changes = terraform.plan(replace=spent)
    if changes.is_empty:
        request.report("nothing to change")
        return
    for address, action in changes.drift.items():
        request.report(f"changed by others: {address} ({'gone' if action == 'delete' else action})")
    for line in changes_text(changes.wanted):
        request.report(line)
    guard_runs(opened, stages, changes)
    if changes.addresses("update", "replace", "delete"):
        destroyed = changes.addresses(*DESTROYING)
        cost = f", which destroys {len(destroyed)} of them" if destroyed else ""
        request.confirm(f"Change what exists{cost}?")
    opened.require_lock()
    apply_recorded(opened, changes)


def apply_recorded(opened: Session, changes: PlannedChanges) -> None:
    """Apply a saved plan, with a record of what it creates until every outcome is in the state."""
    creating = changes.addresses("create", "replace")
    opened.bucket.set_creating(creating)
    try:
        opened.terraform.apply(changes)
    finally:
        if creating and opened.terraform.saved_state:
            opened.bucket.set_creating([])


def _adopt_kept_data(opened: Session) -> None:
    """Take what an earlier `down` kept, since it had data, into the state again."""
    request, plan = opened.request, opened.request.plan
    state, stores = opened.bucket.resources(), cloud_of(plan).data_stores(plan)
    for each in plan.made_by_terraform:
        if each.kind != stores.kind or each.address in state:
            continue
        if stores.find(body_of(plan, each.address)["name"]) is not None:
            adopt(plan, opened.terraform, state, each.address, request.report)


@contextlib.contextmanager
def _next_command(request: Request) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        request.report(
            "interrupted; what was made is in the state\nGo on:"
            f" {request.command}\nOr remove it: {request.down_command}"
        )
        raise
