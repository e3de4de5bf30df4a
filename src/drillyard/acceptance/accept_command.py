"""`drillyard accept`: submit the acceptance job, wait for its end, read its evidence, judge it, and
leave nothing of the job behind.

The job runs once. A node that is lost, or a job that a scheduler starts again, ends it: what it
would observe then is not what was asked. Whatever ends without evidence is `incomplete`.
"""

from __future__ import annotations

import json
import math
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from drillyard.acceptance.check import Expected, Level
from drillyard.acceptance.evidence import MOST_BYTES, AcceptanceEvidence, parse_evidence
from drillyard.acceptance.job import acceptance_request, as_planned, expected_of
from drillyard.acceptance.judgement import Outcome, judge
from drillyard.acceptance.results import CheckResult, Status, verdict_of
from drillyard.config.cluster import ClusterConfig
from drillyard.config.run import RunConfig
from drillyard.errors import UserError
from drillyard.guarded_files import read_json
from drillyard.hardware import load_catalog
from drillyard.hardware.catalog import Catalog
from drillyard.launch.launcher import Launcher, launcher_for
from drillyard.launch.plan import Plan
from drillyard.launch.prepared_run import processes_per_node
from drillyard.launch.remote_files import print_notice
from drillyard.launch.request import LaunchRequest, LogSelection
from drillyard.launch.run_changes import ActiveRunError, cancel, forget
from drillyard.launch.run_status import Handle, RunStatus, State
from drillyard.launch.run_wait import statuses_until_over
from drillyard.launch.submission import (
    load_cluster,
    plan_requests,
    require_node_names,
    submit_plans,
)
from drillyard.programs import was_interrupted

EVIDENCE = "acceptance/evidence.json"
"""Path in the run directory."""
_SHOWN_LINES = 12


@dataclass(frozen=True)
class Acceptance:
    """What to check, and what is expected there."""

    request: LaunchRequest
    level: Level
    expected: Expected
    submission: str
    wait_seconds: float = math.inf
    """Longest wait for the end of the job, from its submission."""


def acceptance_of(
    cluster_file: Path,
    level: Level,
    *,
    nodes: int | None = None,
    pool: str | None = None,
    dry_run: bool = False,
    fixed_nodes: bool = False,
    run: RunConfig | None = None,
    hardware: Path | None = None,
    baseline_file: Path | None = None,
    exclude: Sequence[str] = (),
    wait_seconds: float = math.inf,
) -> Acceptance:
    """The acceptance of a cluster, or of one of its pools: on `nodes`, or on the idle ones where
    its launcher can say which those are. `fixed_nodes`: on as many as the config says instead.
    `run`: the run to come. `dry_run`: its plan is the same each time, and the cluster is not asked.
    Raises UserError."""
    overrides = [f"hardware={hardware}"] if hardware is not None else []
    cluster = load_cluster(cluster_file, nodes, overrides, pool=pool)
    facts = load_catalog(cluster.hardware)
    expected = expected_of(
        cluster,
        facts,
        baseline=None if baseline_file is None else read_baseline(baseline_file),
        checkpoint_bytes=None if run is None else _checkpoint_bytes(run, cluster, facts),
    )
    submission = "" if dry_run else secrets.token_hex(8)

    def request_on(count: int | None) -> LaunchRequest:
        chosen = cluster
        if count != nodes:
            chosen = load_cluster(cluster_file, count, overrides, pool=pool)
        return acceptance_request(
            chosen, level, expected, submission=submission, exclude=tuple(exclude)
        )

    request = request_on(nodes)
    require_node_names(request)
    if nodes is None and not fixed_nodes and not dry_run:
        idle = launcher_for(cluster).idle_nodes(request)
        if idle and len(idle) != cluster.nodes:
            print_notice(f"{cluster.name}: {len(idle)} nodes are idle, and all of them are checked")
            request = request_on(len(idle))
    return Acceptance(request, level, expected, submission, wait_seconds)


def read_baseline(path: Path) -> AcceptanceEvidence:
    """The evidence in an earlier acceptance.json. Raises UserError."""
    try:
        document = read_json(path, MOST_BYTES)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError):
        raise UserError(f"{path}: is not JSON; name an acceptance.json") from None
    found = document.get("evidence", document) if isinstance(document, dict) else document
    return parse_evidence(json.dumps(found).encode(), str(path))


def _checkpoint_bytes(run: RunConfig, cluster: ClusterConfig, facts: Catalog) -> float:
    """Bytes of one checkpoint of a training run on this cluster. Raises UserError."""
    from drillyard.estimation.model_source import ModelOptions, find_model
    from drillyard.estimation.request import EstimateRequest
    from drillyard.estimation.run_estimate import estimate_run
    from drillyard.estimation.run_time import saved_state
    from drillyard.estimation.target import cluster_target

    model, target = find_model(run, ModelOptions()), cluster_target(cluster, facts)
    found = estimate_run(EstimateRequest(config=run, model=model, target=target, facts=facts))
    return saved_state(found.setup).value * found.setup.world_size


def run_acceptance(acceptance: Acceptance) -> Outcome:
    """Run the job on the cluster, and judge what it observed. Raises UserError."""
    request = acceptance.request
    (plan,) = plan_requests([request])
    for warning in plan.warnings:
        print_notice(f"warning: {warning}")
    launcher = launcher_for(request.cluster)
    if short := launcher.nodes_short_of_gpus(request):
        return _short_of_gpus(acceptance, short)
    submit(request, plan)
    try:
        if was_interrupted(str(plan.handle)):
            raise KeyboardInterrupt
        return _outcome_of_job(acceptance, launcher, plan)
    except BaseException:
        _cancel(launcher, plan.handle)
        raise
    finally:
        _remove(launcher, plan.handle)


def submit(request: LaunchRequest, plan: Plan) -> None:
    """Submit the job. Raises UserError, also where one of its name is not over."""
    try:
        list(submit_plans(request.cluster, [plan]))
    except ActiveRunError as error:
        handle = plan.handle
        raise UserError(
            f"{str(error).splitlines()[0]}\nwait for it: drillyard runs wait {handle}; or end it:"
            f" drillyard runs cancel {handle}"
        ) from None


def _outcome_of_job(acceptance: Acceptance, launcher: Launcher[Any], plan: Plan) -> Outcome:
    """Wait for the end of a submitted job, and judge its evidence."""
    run = plan.handle.run
    names: tuple[str, ...] = ()
    early = None
    deadline = time.monotonic() + acceptance.wait_seconds
    for status in statuses_until_over(launcher, run):
        names = launcher.node_names(status) or names
        early = _ends_early(status, acceptance, deadline)
        if early is not None and not status.state.over:
            _cancel(launcher, plan.handle)
            break
    if len(names) != plan.nodes:
        names = ()
    evidence, problem = _read_evidence(launcher, run, acceptance.submission)
    if evidence is not None:
        expected = as_planned(acceptance.expected, plan)
        return judge(evidence.model_copy(update={"hosts": names}), expected)
    reason = early or _end_of(status)
    lines = _last_lines(launcher, status)
    return unjudged(acceptance, f"{reason}; {problem}", lines, names)


def _ends_early(status: RunStatus, acceptance: Acceptance, deadline: float) -> str | None:
    """Why the job is not waited for any longer."""
    if status.state is State.restarting or (status.attempt or 0) > 0:
        return f"the job was to be started again: {status.reason or 'a node was lost'}"
    if time.monotonic() > deadline:
        why = f" ({status.reason})" if status.reason else ""
        limit = f"{acceptance.wait_seconds:g} s (--wait-seconds)"
        return f"the job is {status.state}{why} and did not end within {limit}"
    return None


def _end_of(status: RunStatus) -> str:
    failure = status.failure
    where = f"{failure.node}: " if failure is not None and failure.node else ""
    reason = status.reason or (failure.reason if failure is not None else "")
    return f"the job {status.state}" + (f": {where}{reason}" if reason else "")


def _read_evidence(
    launcher: Launcher[Any], run: str, submission: str
) -> tuple[AcceptanceEvidence | None, str]:
    """What node 0 of this submission wrote, or why there is nothing."""
    pieces, offset = [], 0
    try:
        while piece := launcher.read(run, EVIDENCE, offset):
            pieces.append(piece)
            offset += len(piece)
        if not pieces:
            return None, "node 0 wrote no evidence"
        evidence = parse_evidence(b"".join(pieces), EVIDENCE)
    except UserError as error:
        return None, f"its evidence cannot be read: {str(error).splitlines()[0]}"
    if evidence.submission != submission:
        return None, "node 0 wrote no evidence"
    return evidence, ""


def _last_lines(launcher: Launcher[Any], status: RunStatus) -> tuple[str, ...]:
    """The last lines that the job printed, which often say why it ended."""
    if status.failure is not None and status.failure.lines:
        return status.failure.lines[-_SHOWN_LINES:]
    wanted = LogSelection(tail=_SHOWN_LINES, submitted_at=status.submitted_at)
    try:
        text = b"".join(launcher.logs(status.handle.run, wanted))
    except UserError:
        return ()
    return tuple(text.decode(errors="replace").splitlines()[-_SHOWN_LINES:])


def unjudged(
    acceptance: Acceptance, reason: str, lines: Sequence[str] = (), names: Sequence[str] = ()
) -> Outcome:
    """The outcome of a job that has no evidence: incomplete, with the reason."""
    result = CheckResult(
        check="job",
        metric="evidence",
        nodes=(),
        status=Status.incomplete,
        reason=reason,
        action="see the last lines, and run drillyard accept again",
        evidence=tuple(lines),
    )
    return Outcome(_no_evidence(acceptance, names), (result,), Status.incomplete, ())


def _short_of_gpus(acceptance: Acceptance, short: dict[str, str]) -> Outcome:
    """The outcome where nodes offer fewer GPUs than their machine has: a job would wait for ever.
    The nodes are ranks in the order given."""
    results = tuple(
        CheckResult(
            check="accelerator-count",
            metric="offered",
            nodes=(rank,),
            status=Status.fail,
            reason=f"{name} {why}; nothing was submitted",
            action=f"repair it, or check the others: --exclude {name}",
            culprits=(rank,),
        )
        for rank, (name, why) in enumerate(short.items())
    )
    evidence = _no_evidence(acceptance, tuple(short))
    return Outcome(evidence, results, verdict_of(results), tuple(range(len(short))))


def _no_evidence(acceptance: Acceptance, names: Sequence[str]) -> AcceptanceEvidence:
    return AcceptanceEvidence(
        level=acceptance.level.value,
        submission=acceptance.submission,
        hosts=tuple(names),
        started_at=time.time(),
        ended_at=time.time(),
        expected_nodes=max(acceptance.request.cluster.nodes, len(names)),
        processes_per_node=processes_per_node(acceptance.request),
        nodes=(),
        observations=(),
    )


def _cancel(launcher: Launcher[Any], handle: Handle) -> None:
    """Stop the job; where that fails, say so and go on."""
    try:
        cancel(launcher, handle.run)
        print_notice(f"{handle}: cancelled")
    except UserError as error:
        print_notice(f"{error}\n{handle} may still run: drillyard runs cancel {handle}")
    except KeyboardInterrupt:
        print_notice(f"{handle} may still run: drillyard runs cancel {handle}")
        raise


def _remove(launcher: Launcher[Any], handle: Handle) -> None:
    """Remove the scheduler's objects of the job; where that fails, say so."""
    if not launcher.keeps_record:
        return
    try:
        forget(launcher, handle.run)
    except UserError as error:
        first = str(error).splitlines()[0]
        print_notice(
            f"{handle}: its objects are not removed: {first}\nonce it is over:"
            f" drillyard runs forget {handle}"
        )


def without_nodes(outcome: Outcome, ranks: Sequence[int]) -> Status:
    """The verdict of an outcome without the results that involve these nodes alone or in pairs."""
    left = [each for each in outcome.results if not set(each.nodes) & set(ranks)]
    return verdict_of(left)


def names_of_culprits(outcome: Outcome) -> list[str]:
    """The nodes proven to be at fault, by their names."""
    return [outcome.evidence.name_of(rank) for rank in outcome.culprits]


def on_nodes(acceptance: Acceptance, nodes: int, exclude: Sequence[str]) -> Acceptance:
    """The same on another number of nodes and without those in `exclude`, as another submission."""
    submission = secrets.token_hex(8)
    cluster = acceptance.request.cluster.model_copy(update={"nodes": nodes})
    request = acceptance_request(
        cluster,
        acceptance.level,
        acceptance.expected,
        submission=submission,
        exclude=tuple(exclude),
    )
    return replace(acceptance, request=request, submission=submission)
