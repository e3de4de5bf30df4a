"""The chart as Helm renders it, against a table."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.integration.kubernetes.cluster import ROOT, tool

CHART = ROOT / "charts/drillyard-run"
BASE = {"image": "i:1", "command": ["train"], "nodes": 2, "processesPerNode": 8}


def helm(tmp_path: Path, *words: str, **values: Any) -> subprocess.CompletedProcess[str]:
    return helm_with(tmp_path, {**BASE, **values}, *words)


def helm_with(
    tmp_path: Path, values: dict[str, Any] | None, *words: str
) -> subprocess.CompletedProcess[str]:
    """Helm on the chart with these values alone; None: without a file of values."""
    environment = {
        **os.environ,
        **{f"HELM_{name}_HOME": str(tmp_path) for name in ("CACHE", "CONFIG", "DATA")},
    }
    argv = [tool("helm"), *words, str(CHART)]
    if values is not None:
        file = tmp_path / "values.json"
        file.write_text(json.dumps(values))
        argv += ["--values", str(file)]
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
    f"{POD}.containers.0.terminationMessagePolicy": "FallbackToLogsOnError",
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
        {"image": "a b"},
        {"workingDir": "here"},
        {"labels": {"a b": "c"}},
        {"labels": {"a..b/c": "d"}},
        {"annotations": {"-a": "c"}},
        {"nodeSelector": {"a/b/c": "d"}},
        {"imagePullSecrets": ["s", "s"]},
        {"resources": {"requests": {"cpu": "many"}}},
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


CLAIM = {"volumeClaim": {"name": "c", "mountPath": "/data"}}
BUCKET = {"bucket": {"name": "bkt", "mountPath": "/gcs/bkt", "mountOptions": ""}}


def host_path(mount_path: str, name: str = "m") -> dict[str, Any]:
    return {"name": name, "hostPath": "/mnt", "mountPath": mount_path, "readOnly": True}


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        ({"image": ""}, "image"),
        ({"command": []}, "command"),
        ({**CLAIM, **BUCKET}, "volumeClaim and bucket"),
        ({"topology": {"mode": "preferred", "level": "b"}}, "topology.mode"),
        ({"kueuePriorityClass": "high"}, "kueuePriorityClass"),
        ({"maxRunSeconds": 60}, "maxRunSeconds"),
        ({"provisioning": {"maxRunSeconds": 60}}, "provisioning.maxRunSeconds"),
        ({"environment": {"NNODES": "4"}}, "environment: NNODES"),
        ({"secrets": {"MASTER_ADDR": {"secret": "s", "key": "k"}}}, "secrets: MASTER_ADDR"),
        ({"environment": {"A": "1"}, "secrets": {"A": {"secret": "s", "key": "k"}}}, "A is in"),
        ({"labels": {"app.kubernetes.io/instance": "x"}}, "labels: app.kubernetes.io/instance"),
        ({"labels": {"kueue.x-k8s.io/queue-name": "x"}}, "labels: kueue.x-k8s.io/queue-name"),
        (
            {"annotations": {"provreq.kueue.x-k8s.io/maxRunDurationSeconds": "60"}},
            "provisioning.maxRunSeconds",
        ),
        ({"hostPaths": [host_path("/m", "files")]}, "hostPaths: files"),
        ({"hostPaths": [host_path("/m"), host_path("/m")]}, "/m is mounted twice"),
        ({**CLAIM, "hostPaths": [host_path("/data/")]}, "/data is mounted twice"),
        ({**BUCKET, "hostPaths": [host_path("/gcs")]}, "/gcs would be mounted over /gcs/bkt"),
        *(
            ({"hostPaths": [host_path(path)]}, f"{path} would be mounted over")
            for path in ("/", "/etc", "/etc/drillyard", "/etc/drillyard/x", "/dev", "/dev/shm")
        ),
        ({"volumeClaim": {"name": "c", "mountPath": "/dev/shm"}}, "/dev/shm would be mounted"),
    ],
    ids=str,
)
def test_values_that_contradict_each_other_are_refused_with_the_reason(
    wrong: dict[str, Any], word: str, tmp_path: Path
) -> None:
    done = helm(tmp_path, "template", "r", "--kube-version", "1.34", **wrong)
    assert done.returncode != 0 and word in done.stderr


@pytest.mark.parametrize("name", ["8b", "a.b", "a" * 53])
def test_a_release_whose_name_cannot_be_a_host_name_is_refused(name: str, tmp_path: Path) -> None:
    done = helm(tmp_path, "template", name, "--kube-version", "1.34")
    assert done.returncode != 0 and name in done.stderr


def test_a_time_limit_of_a_plain_job_needs_no_queue(tmp_path: Path) -> None:
    found = rendered(tmp_path, controller="job", maxRunSeconds=60)
    assert found["Job"]["spec"]["activeDeadlineSeconds"] == 60


def test_every_variable_of_a_pod_is_the_charts_and_cannot_be_set(tmp_path: Path) -> None:
    for controller in ("jobset", "job"):
        kind = "JobSet" if controller == "jobset" else "Job"
        found = rendered(tmp_path, controller=controller)[kind]
        pod = at(found, f"{POD}" if controller == "jobset" else "spec.template.spec")
        for each in at(pod, "containers.0.env"):
            more = {"environment": {each["name"]: "x"}, "controller": controller}
            done = helm(tmp_path, "template", "r", "--kube-version", "1.34", **more)
            assert f"environment: {each['name']}" in done.stderr


@pytest.mark.parametrize(
    ("user", "given", "options"),
    [
        ((1000, 0), "implicit-dirs", "implicit-dirs,uid=1000,gid=1000"),
        ((1000, 7), "", "uid=1000,gid=7,file-mode=664,dir-mode=775"),
        ((0, 7), "", "gid=7,file-mode=664,dir-mode=775"),
        ((1000, 0), "uid=5,metadata-cache:ttl-secs:0", "uid=5,metadata-cache:ttl-secs:0,gid=1000"),
        ((0, 0), "implicit-dirs", "implicit-dirs"),
    ],
)
def test_files_of_a_bucket_belong_to_the_user_of_the_pods(
    user: tuple[int, int], given: str, options: str, tmp_path: Path
) -> None:
    bucket = {**BUCKET["bucket"], "mountOptions": given}
    security = dict(zip(("runAsUser", "fsGroup"), user, strict=True))
    found = rendered(tmp_path, bucket=bucket, securityContext=security)["JobSet"]
    (volume,) = [each for each in at(found, f"{POD}.volumes") if each["name"] == "bucket"]
    assert volume["csi"]["volumeAttributes"]["mountOptions"] == options


def test_when_an_image_is_pulled_is_left_to_kubernetes_unless_it_is_set(tmp_path: Path) -> None:
    """The API server writes Always for the tag latest, or none, and else IfNotPresent."""
    train = f"{POD}.containers.0"
    assert "imagePullPolicy" not in at(rendered(tmp_path, image="i:latest")["JobSet"], train)
    found = rendered(tmp_path, imagePullPolicy="Never")["JobSet"]
    assert at(found, train)["imagePullPolicy"] == "Never"


def test_the_chart_passes_lint(tmp_path: Path) -> None:
    done = helm(tmp_path, "lint", "--strict")
    assert done.returncode == 0, done.stdout


def test_the_chart_passes_lint_without_values(tmp_path: Path) -> None:
    done = helm_with(tmp_path, None, "lint", "--strict")
    assert done.returncode == 0, done.stdout


def test_the_values_of_the_readme_are_a_run(tmp_path: Path) -> None:
    (text,) = re.findall(r"```yaml\n(.*?)```", (CHART / "README.md").read_text(), re.DOTALL)
    done = helm_with(tmp_path, yaml.safe_load(text), "template", "r", "--kube-version", "1.34")
    assert done.returncode == 0, done.stderr
    found = {each["kind"]: each for each in yaml.safe_load_all(done.stdout)}["JobSet"]
    assert at(found, f"{JOB}.completions") == 2
    resources = at(found, f"{POD}.containers.0.resources")
    assert resources["requests"] == {"cpu": 64, "memory": "512Gi"}
