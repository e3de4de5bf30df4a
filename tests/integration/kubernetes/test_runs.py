"""Runs in real pods, as a user with rights in one `restricted` namespace: what each disturbance
leads to.

JobSet restarts; both of its counters are asserted: all restarts, and those that count towards
--max-failures.
"""

from __future__ import annotations

import json
import os
import random
import shlex
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.integration.kubernetes.cluster import Cluster, tool
from tests.integration.kubernetes.node_processes import bucket_on_nodes, processes
from tests.integration.kubernetes.team import Team, until
from tests.integration.tiny_run import write_rows

from drillyard.telemetry.jsonlines import decode

STEPS, EVERY = 120, 20
ATTEMPT = "jobset.sigs.k8s.io/restart-attempt"
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


@pytest.fixture(scope="module")
def undisturbed(team: Team, rights: None) -> dict[int, str]:
    """Losses by step of a run that nothing disturbs."""
    launch(team, team.run_config("undisturbed", **SETTINGS))
    assert ended(team, "undisturbed") == "succeeded"
    assert restarts(team, "undisturbed") == (0, 0)
    found = losses(team, "undisturbed")
    assert sorted(found) == list(range(1, STEPS + 1))
    return found


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


def delete(team: Team, pod: dict[str, Any]) -> None:
    team.cluster.kubectl(
        "--namespace", team.name, "delete", "pod", pod["metadata"]["name"], "--wait=false"
    )


def evict(team: Team, pod: dict[str, Any]) -> None:
    place = {"name": pod["metadata"]["name"], "namespace": team.name}
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": place}
    path = f"/api/v1/namespaces/{team.name}/pods/{place['name']}/eviction"
    team.cluster.kubectl("create", "--raw", path, "--filename", "-", stdin=json.dumps(eviction))


def drain(team: Team, pod: dict[str, Any]) -> None:
    node = pod["spec"]["nodeName"]
    try:
        only = f"jobset.sigs.k8s.io/jobset-name={pod['metadata']['labels']['jobset.sigs.k8s.io/jobset-name']}"  # noqa: E501
        team.cluster.kubectl(
            "drain", node, "--force", "--delete-emptydir-data", "--pod-selector", only
        )
    finally:
        team.cluster.kubectl("uncordon", node)


@pytest.mark.parametrize(
    ("name", "disturb", "counted"),
    [
        ("killed", kill_a_rank, 1),
        ("deleted", delete, 0),
        ("evicted", evict, 0),
        ("drained", drain, 0),
    ],
)
def test_a_disturbed_run_resumes_and_its_losses_are_those_of_an_undisturbed_one(
    team: Team, undisturbed: dict[int, str], name: str, disturb: Any, counted: int
) -> None:
    launch(team, team.run_config(name, **SETTINGS))
    until(lambda: checkpoints(team, name))
    disturb(team, random.choice(team.pods(name)))
    assert ended(team, name) == "succeeded"
    assert restarts(team, name) == (1, counted)
    assert losses(team, name) == undisturbed
    events = [
        decode(line)
        for line in (team.shared / "runs" / name / "events.jsonl").read_bytes().splitlines()
    ]
    resumed = [event["step"] for event in events if event.get("event") == "resume"]
    assert len(resumed) == 1 and resumed[0] >= EVERY


def test_a_killed_run_on_a_bucket_resumes_with_the_same_bits(
    team: Team, cluster: Cluster, undisturbed: dict[int, str]
) -> None:
    name = "bucket"
    with bucket_on_nodes(cluster, team.directory / name) as bucket:
        team.add_volume(name, {"path": str(bucket.place)})
        write_rows(bucket.place / "rows.jsonl")
        launch(team, team.run_config(name, **SETTINGS), volume_claim=name)
        until(lambda: checkpoints(team, name, bucket.place))
        kill_a_rank(team, random.choice(team.pods(name)))
        assert ended(team, name) == "succeeded"
        assert restarts(team, name) == (1, 1)
        assert losses(team, name, bucket.place) == undisturbed
        team.drillyard("runs", "forget", handle(team, name))


@pytest.mark.parametrize(
    ("name", "script", "limit", "state", "counters"),
    [
        ("asked-again", 'test "$DRILLYARD_LAUNCH_ROUND" -ge 2 || exit 85', 0, "succeeded", (2, 0)),
        ("refused", "exit 2", 5, "failed", (0, 0)),
        ("no-command", "exec /no/such/program", 5, "failed", (0, 0)),
        ("fails", "exit 1", 5, "failed", (5, 5)),
    ],
)
def test_an_exit_code_restarts_counts_or_ends(
    team: Team, name: str, script: str, limit: int, state: str, counters: tuple[int, int]
) -> None:
    path = team.directory / f"{name}.yaml"
    path.write_text(
        yaml.safe_dump({"name": name, "workload": {"command": ["sh", "-c", script], "per": "node"}})
    )
    launch(team, path, "--max-failures", limit)
    assert ended(team, name) == state
    assert restarts(team, name) == counters


def test_a_chart_that_counts_85_would_end_the_run(team: Team, cluster: Cluster) -> None:
    name, script = "control", 'test "$DRILLYARD_LAUNCH_ROUND" -ge 2 || exit 85'
    path = team.directory / f"{name}.yaml"
    path.write_text(
        yaml.safe_dump({"name": name, "workload": {"command": ["sh", "-c", script], "per": "node"}})
    )
    written = team.directory / "control"
    team.drillyard(
        "launch", path, "--cluster", team.cluster_config(), "--max-failures", 0, "--output", written
    )
    (values,) = written.rglob("values.json")
    chart = values.parent / "chart/drillyard-run"
    template = [
        tool("helm"),
        "template",
        name,
        str(chart),
        "--namespace",
        team.name,
        "--values",
        str(values),
    ]
    text = subprocess.run(
        template, check=True, capture_output=True, text=True, env=team.environment
    ).stdout
    documents = [each for each in yaml.safe_load_all(text) if each]
    (jobset,) = [each for each in documents if each["kind"] == "JobSet"]
    rules = jobset["spec"]["failurePolicy"]["rules"]
    assert rules.pop(0)["name"] == "askedToRestart"
    for each in documents:
        each["metadata"]["namespace"] = team.name
    cluster.apply(*documents)
    until(
        lambda: (
            "Failed"
            in [each["type"] for each in team.jobset(name).get("status", {}).get("conditions", ())]
        )
    )
    assert restarts(team, name) == (0, 0)
    cluster.kubectl("--namespace", team.name, "delete", "jobset", name)


def test_term_to_one_pod_of_two_is_never_counted(team: Team) -> None:
    name, times = "termed", 20
    script = (
        f'trap "exit 85" TERM; test "$DRILLYARD_LAUNCH_ROUND" -lt {times} || exit 0; echo ready;'
        " sleep 600 & wait"
    )
    path = team.directory / f"{name}.yaml"
    path.write_text(
        yaml.safe_dump({"name": name, "workload": {"command": ["sh", "-c", script], "per": "node"}})
    )
    launch(team, path, "--max-failures", 0)

    def ready(number: int) -> list[dict[str, Any]]:
        """Both pods of an attempt, once their shells handle signals."""
        pods = [
            each for each in team.pods(name) if each["metadata"]["labels"][ATTEMPT] == str(number)
        ]
        logs = [
            team.cluster.kubectl(
                "--namespace", team.name, "logs", each["metadata"]["name"], check=False
            )
            for each in pods
        ]
        return pods if len(pods) == 2 and all("ready" in log for log in logs) else []

    for number in range(times):
        pods = until(lambda number=number: ready(number))
        os.kill(int(processes(random.choice(pods), b"exit 85")[0]), signal.SIGTERM)
    assert ended(team, name) == "succeeded"
    assert restarts(team, name) == (times, 0)


def test_stops_with_nothing_saved_count_from_the_second_on(team: Team) -> None:
    """A run that is asked to stop while its ranks still import, twice: there is no checkpoint
    yet."""
    name = "unsaved"
    launch(team, team.run_config(name, **SETTINGS), "--max-failures", 1)
    events = team.shared / "runs" / name / "events.jsonl"

    def started(number: int) -> list[dict[str, Any]]:
        """Node 0's pod of an attempt, once its supervisor handles signals."""
        lines = events.read_bytes().splitlines() if events.exists() else []
        begun = sum(decode(line).get("event") == "run_start" for line in lines)
        own = {ATTEMPT: str(number), "batch.kubernetes.io/job-completion-index": "0"}
        return [
            pod
            for pod in team.pods(name)
            if begun > number and own.items() <= pod["metadata"]["labels"].items()
        ]

    for number in range(2):
        (pod,) = until(lambda number=number: started(number))
        os.kill(processes(pod)[0], signal.SIGTERM)
    assert ended(team, name) == "succeeded"
    assert restarts(team, name) == (2, 1)


def test_a_cancelled_run_is_read_and_resumed(team: Team, undisturbed: dict[int, str]) -> None:
    name = "resumed"
    launch(team, team.run_config(name, **SETTINGS))
    until(lambda: checkpoints(team, name))
    team.drillyard("runs", "cancel", handle(team, name))
    assert status(team, name)["state"] == "cancelled"
    assert "metrics.jsonl" in team.drillyard("runs", "artifacts", handle(team, name)).stdout
    assert not reading_pods(team)
    team.drillyard("runs", "resume", handle(team, name))
    assert ended(team, name) == "succeeded"
    assert losses(team, name) == undisturbed


def test_a_finished_run_is_read_and_watched(team: Team, undisturbed: dict[int, str]) -> None:
    assert (
        "final/model.safetensors"
        in team.drillyard("runs", "artifacts", handle(team, "undisturbed")).stdout
    )
    watched = team.drillyard("runs", "watch", handle(team, "undisturbed")).stdout
    assert str(STEPS) in watched
    own = (team.shared / "runs/undisturbed/logs/rank-1.log").read_text().splitlines()
    read = team.drillyard(
        "runs", "logs", handle(team, "undisturbed"), "--rank", "1"
    ).stdout.splitlines()
    assert own and read == own
    assert not reading_pods(team)


def reading_pods(team: Team) -> list[Any]:
    """Pods that were made to read run directories and do not end."""
    found = team.cluster.get("--namespace", team.name, "pods", "--selector", "drillyard/reads")[
        "items"
    ]
    return [each for each in found if not each["metadata"].get("deletionTimestamp")]


def test_an_image_that_cannot_be_pulled_is_named_while_the_run_waits(team: Team) -> None:
    path = waiting_run(team, "no-image", image="localhost/none:1")
    launch(team, path)
    reason = until(lambda: "Pull" in (found := str(status(team, "no-image")["reason"])) and found)
    assert "no-image-w-0-" in reason and " on node" in reason and "localhost/none:1" in reason
    team.drillyard("runs", "cancel", handle(team, "no-image"))


def test_a_volume_that_a_node_cannot_mount_is_named_while_the_run_waits(team: Team) -> None:
    team.add_volume("missing", {"path": "/no/such/directory", "type": "Directory"})
    launch(team, waiting_run(team, "no-volume"), volume_claim="missing")
    reason = until(
        lambda: "FailedMount" in (found := str(status(team, "no-volume")["reason"])) and found
    )
    assert " on node" in reason and "/no/such/directory" in reason
    team.drillyard("runs", "cancel", handle(team, "no-volume"))


def test_a_full_volume_is_the_cause_that_status_shows(team: Team, cluster: Cluster) -> None:
    small = team.directory / "small"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=400k,mode=777", "tmpfs", str(small)]
    subprocess.run(cluster.enter(*mount, into=("mount",)), check=True)
    copied = ["cp", str(team.shared / "rows.jsonl"), str(small)]
    subprocess.run(cluster.enter(*copied, into=("mount",)), check=True)
    team.add_volume("small", {"path": str(small)})
    launch(team, team.run_config("full", **SETTINGS), "--max-failures", 0, volume_claim="small")
    assert ended(team, "full") == "failed"
    assert "No space left on device" in json.dumps(status(team, "full"))


def waiting_run(team: Team, name: str, **workload: Any) -> Path:
    path = team.directory / f"{name}.yaml"
    settings = {"command": ["sleep", "600"], "per": "node", **workload}
    path.write_text(yaml.safe_dump({"name": name, "workload": settings}))
    return path


def test_after_cancel_and_forget_nothing_is_left(team: Team, cluster: Cluster) -> None:
    path = team.directory / "waits.yaml"
    path.write_text(
        yaml.safe_dump({"name": "waits", "workload": {"command": ["sleep", "600"], "per": "node"}})
    )
    launch(team, path)
    until(lambda: status(team, "waits")["state"] == "running")
    again = team.drillyard("launch", path, "--cluster", team.cluster_config(), check=False)
    assert again.returncode == 2 and "waits" in again.stderr
    team.drillyard("runs", "cancel", handle(team, "waits"))
    until(lambda: not team.pods("waits"))
    assert status(team, "waits")["state"] == "cancelled"
    kinds = "jobsets,jobs,pods,configmaps,services,workloads"
    selector = ["--selector", "app.kubernetes.io/instance=waits"]
    assert cluster.get("--namespace", team.name, kinds, *selector)["items"] == []
    team.drillyard("runs", "forget", handle(team, "waits"))
    assert "waits" not in team.drillyard("runs", "list", "--cluster", team.cluster_config()).stdout
    secrets = cluster.get("--namespace", team.name, "secrets")["items"]
    assert not [each for each in secrets if "waits" in each["metadata"]["name"]]


def test_of_two_launches_of_a_name_at_once_one_submits_and_the_other_is_refused(
    team: Team, cluster: Cluster
) -> None:
    """A new name; one whose earlier run is over; one whose run is replaced by both while it is at
    work. First, another machine's launch was killed while it had the lock."""
    name, lock = "twice", {"name": "twice.submit-lock", "namespace": team.name}
    path, config = team.directory / f"{name}.yaml", team.cluster_config()
    client = json.dumps({"host": "desk", "machine": "other", "pid": 7, "started": 1})
    cluster.apply(
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": lock, "data": {"client": client}}
    )

    def submitted(script: str, *options: str) -> list[subprocess.CompletedProcess[str]]:
        workload = {"command": ["sh", "-c", script], "per": "node"}
        path.write_text(yaml.safe_dump({"name": name, "workload": workload}))
        given = ("launch", path, "--cluster", config, "--nodes", 1, *options)
        with ThreadPoolExecutor() as pool:
            both = [pool.submit(team.drillyard, *given, check=False) for _ in range(2)]
            done = sorted((each.result() for each in both), key=lambda each: each.returncode)
        assert all(each.returncode == 0 or handle(team, name) in each.stderr for each in done)
        assert not any("helm" in each.stderr for each in done)
        return done

    refused = submitted("exit 0")
    assert [each.returncode for each in refused] == [2, 2]
    command = next(
        line.partition("end its lock: ")[2]
        for line in refused[0].stderr.splitlines()
        if "end its lock: " in line
    )
    subprocess.run(cluster.enter(*shlex.split(command)), env=team.environment, check=True)
    works = 'trap "exit 0" TERM; sleep 600 & wait'
    for script, options in (("exit 0", ()), (works, ()), ("exit 0", ("--replace",))):
        done = submitted(script, *options)
        assert [each.returncode for each in done] == [0, 2]
        assert done[0].stdout.strip() == handle(team, name)
        if script == "exit 0":
            assert ended(team, name) == "succeeded"
    assert not cluster.kubectl(
        "--namespace", team.name, "get", "configmap", lock["name"], "--ignore-not-found"
    )
    team.drillyard("runs", "forget", handle(team, name))


def test_a_plain_job_is_never_restarted_and_says_so(team: Team, cluster: Cluster) -> None:
    """What a cluster without JobSet can run. It needs the right to make a Service, too."""
    refused = team.drillyard(
        "launch",
        team.run_config("job"),
        "--cluster",
        team.cluster_config(controller="job"),
        check=False,
    )
    assert refused.returncode == 2 and "create services" in refused.stderr
    role = least_role(team)
    try:
        cluster.apply(least_role(team, controller="job"))
        launch(
            team,
            team.run_config("job", training__steps=4, checkpoint={"every_steps": 2}),
            controller="job",
        )
        assert ended(team, "job") == "succeeded"
        assert len(losses(team, "job")) == 4
        path = team.directory / "asked.yaml"
        path.write_text(
            yaml.safe_dump(
                {"name": "asked", "workload": {"command": ["sh", "-c", "exit 85"], "per": "node"}}
            )
        )
        launched = team.drillyard(
            "launch", path, "--cluster", team.cluster_config(controller="job")
        )
        assert "nothing restarts the run" in launched.stderr
        assert ended(team, "asked") == "failed"
        assert "drillyard runs resume" in status(team, "asked")["reason"]
        team.drillyard("runs", "resume", handle(team, "asked"))
        assert ended(team, "asked") == "failed"
        for name in ("job", "asked"):
            team.drillyard("runs", "forget", handle(team, name))
        left = cluster.get(
            "--namespace",
            team.name,
            "jobs,pods,services",
            "--selector",
            "drillyard/run in (job, asked)",
        )
        assert left["items"] == []
    finally:
        cluster.apply(role)


def test_without_the_right_to_read_events_a_run_is_submitted_and_what_is_not_checked_is_said(
    team: Team,
) -> None:
    role = least_role(team)
    fewer = {**role, "rules": [rule for rule in role["rules"] if "events" not in rule["resources"]]}
    assert len(fewer["rules"]) == len(role["rules"]) - 1
    run = team.run_config("unread", training__steps=2, checkpoint={"every_steps": 2})
    try:
        team.cluster.apply(fewer)
        launched = team.drillyard("launch", run, "--cluster", team.cluster_config())
        assert "not checked" in launched.stderr and "list events" in launched.stderr
        assert ended(team, "unread") == "succeeded"
    finally:
        team.cluster.apply(role)
    assert (
        "not checked"
        not in team.drillyard("launch", run, "--cluster", team.cluster_config(), "--replace").stderr
    )
    team.drillyard("runs", "cancel", handle(team, "unread"))
