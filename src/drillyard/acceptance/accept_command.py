"""`drillyard accept`: submit the acceptance job, wait for its end, read its evidence, judge it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from drillyard.acceptance.check import Level
from drillyard.acceptance.evidence import AcceptanceEvidence, parse_evidence
from drillyard.acceptance.job import acceptance_run, expected_of
from drillyard.acceptance.judgement import Outcome, judge
from drillyard.config.load import load_cluster_config
from drillyard.errors import UserError
from drillyard.hardware import load_catalog
from drillyard.launch.launcher import Launcher, launcher_for
from drillyard.launch.request import LaunchRequest
from drillyard.launch.run_wait import wait_for
from drillyard.launch.submission import plan_requests, submit_plans

EVIDENCE = "acceptance/evidence.json"


def request_of(path: Path, level: Level, nodes: int | None) -> LaunchRequest:
    """The launch request of the acceptance job."""
    overrides = [f"nodes={nodes}"] if nodes else []
    cluster = load_cluster_config(path, overrides, resolve_environment=False)
    facts = load_catalog(cluster.hardware)
    run = acceptance_run(cluster, level, expected_of(cluster, facts))
    return LaunchRequest(run, cluster, facts, os.getcwd(), sys.executable, max_failures=0)


def run_acceptance(request: LaunchRequest) -> Outcome:
    """Run the job on the cluster, and judge what it observed. Raises UserError."""

    (plan,) = plan_requests([request])
    (handle,) = submit_plans(request.cluster, [plan])
    launcher = launcher_for(request.cluster)
    wait_for(launcher, handle.run)
    evidence = read_evidence(launcher, handle.run)
    return judge(evidence, expected_of(request.cluster, request.facts))


def read_evidence(launcher: Launcher[Any], run: str) -> AcceptanceEvidence:
    """What node 0 wrote. Raises UserError where it wrote nothing."""
    pieces, offset = [], 0
    while piece := launcher.read(run, EVIDENCE, offset):
        pieces.append(piece)
        offset += len(piece)
    if not pieces:
        raise UserError(f"{run}: wrote no evidence; see drillyard runs logs {run}")
    return parse_evidence(b"".join(pieces), EVIDENCE)
