"""From two config files to submitted runs: what `drillyard launch` and the functions `plan` and
`submit` share.

requests, plans = plan_launch(run, cluster)       # reads both files; one run, or one per point of a sweep
for line in check_memory(requests): print(line)   # raises DoesNotFitError
for handle in submit_plans(requests[0].cluster, plans): print(handle)
"""  # noqa: E501

from __future__ import annotations

import contextlib
import os
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from drillyard.config.cluster import ClusterConfig, on_pool
from drillyard.config.kernel_rules import num_gpus
from drillyard.config.load import load_cluster_config, load_launch_config
from drillyard.config.platforms import platforms, require_capability
from drillyard.config.run import RunConfig
from drillyard.config.sweep_grammar import SweepPoint, launch_points
from drillyard.config.yaml_document import read_document
from drillyard.errors import ConfigError, DoesNotFitError, NotFoundError, UserError
from drillyard.hardware import load_catalog
from drillyard.launch.cluster_registry import remember_cluster
from drillyard.launch.completion_cache import remember_run
from drillyard.launch.launcher import launcher_class, launcher_for
from drillyard.launch.plan import Plan
from drillyard.launch.request import LaunchRequest
from drillyard.launch.run_changes import submit
from drillyard.launch.run_status import Handle

_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._,\[\]-]*")


def plan_launch(
    run: Path,
    cluster: Path,
    *,
    overrides: Sequence[str] = (),
    nodes: int | None = None,
    pool: str | None = None,
    sweep: Sequence[str] = (),
    sync: bool = False,
    max_failures: int = 3,
    after: str | None = None,
    exclude: Sequence[str] = (),
) -> tuple[list[LaunchRequest], list[Plan]]:
    """Build the requests to launch and their plans: one of each, or one per point of a sweep.
    Changes nothing.

    Raises UserError for every mistake that can be found without asking the cluster.
    """
    config = load_cluster(cluster, nodes, pool=pool)
    first = load_launch_config(run, list(overrides), resolve_environment=False)
    facts = load_catalog(config.hardware)
    requests = []
    for point in launch_points(sweep, first.name) if sweep else [SweepPoint("", ())]:
        named = [*point.overrides, *([f"name={first.name}-{point.name}"] if point.name else [])]
        each = (
            load_launch_config(run, [*overrides, *named], resolve_environment=False)
            if named
            else first
        )
        requests.append(
            LaunchRequest(
                each,
                config,
                facts,
                os.getcwd(),
                sys.executable,
                sync,
                max_failures,
                after,
                exclude=tuple(exclude),
            )
        )
    return requests, plan_requests(requests)


def load_cluster(
    path: Path,
    nodes: int | None = None,
    overrides: Sequence[str] = (),
    *,
    pool: str | None = None,
) -> ClusterConfig:
    """The cluster config as a run on `pool` needs it (`config/cluster.py:on_pool`); where it is
    this machine and sets no ranks, with one per GPU, as `drillyard train` starts."""
    if not path.exists():
        raise NotFoundError(
            f"{path}: there is no such file; name the cluster config, or write one: drillyard init"
        )
    content = read_document(path).value
    platform = content.get("platform") if isinstance(content, dict) else None
    if isinstance(platform, str) and platform in platforms():
        # Refuse a platform without a launcher before asking for more of its config.
        launcher_class(platform, shlex.quote(str(path)))
    cluster = load_cluster_config(
        path, [*overrides, *([f"nodes={nodes}"] if nodes else [])], resolve_environment=False
    )
    cluster = on_pool(cluster, pool, nodes)
    here = platforms()[cluster.platform].is_this_machine
    if not here or cluster.processes_per_node is not None or cluster.machine is not None:
        return cluster
    return cluster.model_copy(update={"processes_per_node": num_gpus() or 1})


def plan_requests(requests: Sequence[LaunchRequest]) -> list[Plan]:
    """The plan of each request. Pure. Raises UserError for every mistake that can be seen without
    the scheduler."""
    first = requests[0]
    # Before the launcher is asked: a plug-in's plan need not call the checks.
    if first.sync:
        require_capability(first.cluster.platform, "sync", "--sync")
    if first.dependency is not None:
        require_capability(first.cluster.platform, "dependency", "--after")
    require_node_names(first)
    if len(requests) > 1:
        require_capability(first.cluster.platform, "queue", "--sweep")
        return launcher_for(first.cluster).plan_sweep(requests)
    return [launcher_for(first.cluster).plan(first)]


def require_node_names(request: LaunchRequest) -> None:
    """Raise ConfigError where the platform cannot exclude nodes, or a name is not a node's."""
    if request.exclude:
        require_capability(request.cluster.platform, "exclude", "--exclude")
    for node in request.exclude:
        if not _NODE.fullmatch(node):
            raise ConfigError(f"--exclude {node!r}: is not a node's name")


def check_memory(requests: Sequence[LaunchRequest], *, force: bool = False) -> Iterator[str]:
    """The estimate of each request as a line of text, once for requests of equal cost.

    Workloads and clusters without a `machine` have none. Raises DoesNotFitError, unless `force`,
    after the line of a request that does not fit. A request that cannot be estimated is launched
    all the same.
    """
    seen = set()
    for request in requests:
        run, machine = request.run, request.cluster.machine
        if not isinstance(run, RunConfig) or machine is None:
            continue
        cost = run.model_dump_json(
            exclude={"name": True, "training": {"optimizer", "schedule", "seed"}}
        )
        if cost in seen:
            continue
        seen.add(cost)
        line, fits = _estimate_line(run, request)
        yield line
        if not fits and not force:
            raise DoesNotFitError(
                f"{run.name}: does not fit on {machine}; nothing was submitted\n"
                "drillyard estimate says what would fit; --force launches it all the same"
            )


def _estimate_line(run: RunConfig, request: LaunchRequest) -> tuple[str, bool]:
    """The estimate for a person, and whether the run fits or may fit."""
    from drillyard.estimation.model_source import ModelOptions, find_model
    from drillyard.estimation.request import EstimateRequest
    from drillyard.estimation.run_estimate import estimate_run
    from drillyard.estimation.startup_estimate import startup_estimate
    from drillyard.estimation.target import cluster_target

    try:
        target = cluster_target(request.cluster, request.facts)
        model = find_model(run, ModelOptions())
        found = estimate_run(
            EstimateRequest(config=run, model=model, target=target, facts=request.facts)
        )
    except UserError as error:
        return f"Estimate: none: {str(error).splitlines()[0]}", True
    available = None if found.available_gib is None else found.available_gib.value
    summary = startup_estimate(found.setup, available, target.accelerator, target.machine)
    line = summary.line()
    if found.cost is not None and (dollars := found.cost.of_run) is not None:
        line += f"; about ${dollars.low.value:,.0f} to ${dollars.high.value:,.0f} in all"
    return line, summary.verdict != "does not fit"


def submit_plans(
    cluster: ClusterConfig, plans: Sequence[Plan], *, replace: bool = False
) -> Iterator[Handle]:
    """Register the cluster and submit the plans in order; yields each handle once it is submitted.

    `replace`: cancel a run of the same name first, if it was launched from this directory.
    """
    launcher = launcher_for(cluster)
    forget_cluster = remember_cluster(cluster)
    for plan in plans:
        try:
            handle = submit(launcher, plan, replace=replace)
        except UserError:
            # Or every `drillyard runs` from now on would ask a host whose name was mistyped once.
            has_runs = plan is not plans[0]
            with contextlib.suppress(UserError):
                has_runs = has_runs or bool(launcher.runs())
            if not has_runs:
                forget_cluster()
            raise
        # Another launch may have taken the same config off, before it could see this run.
        remember_cluster(cluster)
        remember_run(handle)
        yield handle
