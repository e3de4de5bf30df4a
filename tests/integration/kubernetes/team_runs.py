"""A team's runs: their configs, their commands, and questions about them."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.integration.kubernetes.node_processes import processes
from tests.integration.kubernetes.team import Team

from drillyard.telemetry.jsonlines import decode

STEPS, EVERY = 120, 20
SETTINGS: dict[str, Any] = {
    "training__steps": STEPS,
    "checkpoint": {"every_steps": EVERY},
    "logging": {"every_steps": 1, "tensorboard": False},
}


def least_role(team: Team, **section: Any) -> dict[str, Any]:
    """The Role that `launch --explain` prints."""
    run, cluster = team.run_config("rights"), team.cluster_config(**section)
    explained = team.drillyard("launch", run, "--cluster", cluster, "--explain")
    lines = explained.stdout.split("Role = ", 1)[1].split("\n    why:")[0].splitlines()
    role: dict[str, Any] = yaml.safe_load("\n".join(line.removeprefix("    | ") for line in lines))
    role["metadata"]["namespace"] = team.name
    return role


@pytest.fixture(scope="module", autouse=True)
def rights(team: Team) -> None:
    """The rights that `launch --explain` lists, for the team's user."""
    role = least_role(team)
    binding = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": {"name": "alice", "namespace": team.name},
        "roleRef": {
            "apiGroup": "rbac.authorization.k8s.io",
            "kind": "Role",
            "name": role["metadata"]["name"],
        },
        "subjects": [{"kind": "ServiceAccount", "name": "alice", "namespace": team.name}],
    }
    team.cluster.apply(role, binding)


def command_run(team: Team, name: str, **workload: Any) -> Path:
    """NAME.yaml of a run that sleeps on each node, or of another workload."""
    path = team.directory / f"{name}.yaml"
    settings = {"command": ["sleep", "600"], "per": "node", **workload}
    path.write_text(yaml.safe_dump({"name": name, "workload": settings}))
    return path


def launch(team: Team, run: Path, *options: object, **section: Any) -> str:
    """Submit a run; its handle."""
    return team.drillyard(
        "launch", run, "--cluster", team.cluster_config(**section), *options
    ).stdout.strip()


def ended(team: Team, name: str) -> str:
    """The state of a run that is over, as `runs wait` waits for it."""
    team.drillyard("runs", "wait", handle(team, name), check=False)
    return str(status(team, name)["state"])


def handle(team: Team, name: str) -> str:
    return f"kubernetes://{team.name}/{name}"


def status(team: Team, name: str) -> dict[str, Any]:
    """What `runs status --json` prints."""
    found: dict[str, Any] = yaml.safe_load(
        team.drillyard("runs", "status", handle(team, name), "--json").stdout
    )
    return found


def restarts(team: Team, name: str) -> tuple[int, int]:
    """All restarts, and those that are counted."""
    found = team.jobset(name).get("status", {})
    return found.get("restarts", 0), found.get("restartsCountTowardsMax", 0)


def losses(team: Team, name: str, volume: Path | None = None) -> dict[int, str]:
    """The last loss logged for each step, as it was printed. A step done twice must have the same
    both times."""
    found: dict[int, str] = {}
    for line in (
        ((volume or team.shared) / "runs" / name / "metrics.jsonl").read_bytes().splitlines()
    ):
        record = decode(line)
        if "step" in record and "loss" in record:
            assert found.setdefault(record["step"], repr(record["loss"])) == repr(record["loss"])
    return found


def checkpoints(team: Team, name: str, volume: Path | None = None) -> list[Path]:
    """Finished checkpoints."""
    return sorted(
        ((volume or team.shared) / "runs" / name / "checkpoints").glob("step-*/manifest.json")
    )


def kill_a_rank(team: Team, pod: dict[str, Any]) -> None:
    os.kill(processes(pod)[-1], signal.SIGKILL)
