"""The chart as Helm renders it, against a table."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.integration.kubernetes.cluster import ROOT, tool

CHART = ROOT / "charts/drillyard-run"
BASE = {"image": "i:1", "command": ["train"], "nodes": 2, "processesPerNode": 8}


def helm(tmp_path: Path, *words: str, **values: Any) -> subprocess.CompletedProcess[str]:
    file = tmp_path / "values.json"
    file.write_text(json.dumps({**BASE, **values}))
    environment = {
        **os.environ,
        **{f"HELM_{name}_HOME": str(tmp_path) for name in ("CACHE", "CONFIG", "DATA")},
    }
    argv = [tool("helm"), *words, str(CHART), "--values", str(file)]
    return subprocess.run(argv, capture_output=True, text=True, env=environment, check=False)


def rendered(tmp_path: Path, **values: Any) -> dict[str, Any]:
    done = helm(tmp_path, "template", "r", "--kube-version", "1.34", **values)
    assert done.returncode == 0, done.stderr
    return {each["kind"]: each for each in yaml.safe_load_all(done.stdout)}


def at(found: Any, path: str) -> Any:
    for part in path.split("."):
        found = found[int(part)] if part.isdecimal() else found[part]
    return found


JOB = "spec.replicatedJobs.0.template.spec"
POD = f"{JOB}.template.spec"
EXPECTED = {
    "metadata.name": "r",
    "spec.suspend": False,
    "spec.failurePolicy.maxRestarts": 3,
    "spec.failurePolicy.restartStrategy": "BlockingRecreate",
    "spec.failurePolicy.rules.0.action": "RestartJobSetAndIgnoreMaxRestarts",
    "spec.failurePolicy.rules.0.onJobFailureMessagePatterns": [
        "failed with exit code 85 matching",
        "has condition DisruptionTarget matching",
    ],
    "spec.failurePolicy.rules.1.action": "FailJobSet",
    f"{JOB}.backoffLimit": 0,
    f"{JOB}.podReplacementPolicy": "Failed",
    f"{JOB}.completions": 2,
    f"{JOB}.parallelism": 2,
    f"{JOB}.completionMode": "Indexed",
    f"{JOB}.podFailurePolicy.rules.0.onPodConditions": [
        {"type": "DisruptionTarget", "status": "True"}
    ],
    f"{JOB}.podFailurePolicy.rules.1.onExitCodes": {
        "containerName": "train",
        "operator": "In",
        "values": [85],
    },
    f"{JOB}.podFailurePolicy.rules.2.onExitCodes": {
        "containerName": "train",
        "operator": "In",
        "values": [2],
    },
    f"{POD}.restartPolicy": "Never",
    f"{POD}.containers.0.name": "train",
    f"{POD}.containers.0.args": ["train"],
    f"{POD}.containers.0.securityContext.allowPrivilegeEscalation": False,
    f"{POD}.containers.0.securityContext.capabilities": {"drop": ["ALL"]},
    f"{POD}.securityContext.seccompProfile.type": "RuntimeDefault",
}


@pytest.mark.parametrize("path", EXPECTED)
def test_a_field_of_the_jobset_is(path: str, tmp_path: Path) -> None:
    assert at(rendered(tmp_path)["JobSet"], path) == EXPECTED[path]


def environment(found: dict[str, Any]) -> dict[str, Any]:
    return {
        each["name"]: each.get("value") or each["valueFrom"]
        for each in at(found["JobSet"], f"{POD}.containers.0.env")
    }


def test_pods_get_the_variables_of_the_launch_contract(tmp_path: Path) -> None:
    from drillyard.supervise.launch_contract import GIVEN

    found = environment(
        rendered(tmp_path, environment={"A": "1"}, secrets={"T": {"secret": "s", "key": "k"}})
    )
    assert set(GIVEN) <= set(found)
    assert (found["NNODES"], found["MASTER_ADDR"], found["A"]) == ("2", "r-w-0-0.r", "1")
    assert found["T"] == {"secretKeyRef": {"name": "s", "key": "k"}}


def test_queue_and_topology_stand_on_the_object_that_kueue_reads(tmp_path: Path) -> None:
    more = {"queue": "q", "maxRunSeconds": 60, "provisioning": {"maxRunSeconds": 70}}
    found = rendered(tmp_path, topology={"mode": "required", "level": "block"}, **more)["JobSet"]
    assert found["spec"]["suspend"] is True
    assert found["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "q"
    assert found["metadata"]["labels"]["kueue.x-k8s.io/max-exec-time-seconds"] == "60"
    assert found["metadata"]["annotations"]["provreq.kueue.x-k8s.io/maxRunDurationSeconds"] == "70"
    pod = at(found, f"{JOB}.template.metadata.annotations")
    assert pod == {"kueue.x-k8s.io/podset-required-topology": "block"}


def test_the_config_map_is_immutable_and_named_by_its_content(tmp_path: Path) -> None:
    first = rendered(tmp_path, files={"a/b.txt": {"content": "one", "mode": 420}})["ConfigMap"]
    second = rendered(tmp_path, files={"a/b.txt": {"content": "two", "mode": 420}})["ConfigMap"]
    assert first["immutable"] is True
    assert first["metadata"]["name"] != second["metadata"]["name"]


def test_without_jobset_it_is_a_job_with_a_headless_service(tmp_path: Path) -> None:
    found = rendered(tmp_path, controller="job")
    assert set(found) == {"ConfigMap", "Service", "Job"}
    assert found["Service"]["spec"]["clusterIP"] == "None"
    assert at(found["Job"], "spec.template.spec.subdomain") == "r"


@pytest.mark.parametrize(
    "wrong",
    [
        {"netwrk": {}},
        {"nodes": 0},
        {"nodes": "2"},
        {"controller": "pod"},
        {"command": []},
        {"topology": {"mode": "required", "level": ""}},
        {"bucket": {"name": "b", "mountPath": "gcs", "mountOptions": ""}},
        {"environment": {"1A": "x"}},
        {"files": {"../x": {"content": "", "mode": 420}}},
    ],
    ids=str,
)
def test_a_wrong_value_is_refused_by_helm_itself(wrong: dict[str, Any], tmp_path: Path) -> None:
    assert helm(tmp_path, "template", "r").returncode == 0
    done = helm(tmp_path, "template", "r", **wrong)
    assert done.returncode != 0
    assert "schema" in done.stderr


def test_the_chart_passes_lint(tmp_path: Path) -> None:
    done = helm(tmp_path, "lint", "--strict")
    assert done.returncode == 0, done.stdout
