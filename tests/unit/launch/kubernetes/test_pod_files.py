"""Reading through pods: the pod that reads for a run that is over, and one that does not answer."""

from __future__ import annotations

import copy
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from drillyard.errors import UnreachableError
from drillyard.launch.kubernetes.pod_files import PodHost, delete_reading_pods, reading_pod
from drillyard.launch.remote_files import RemoteFiles
from drillyard.programs import Programs
from drillyard.supervise.process_identity import Process, process_of, this_process

READER = "drillyard/reader"
TEMPLATE: dict[str, Any] = {
    "metadata": {
        "labels": {"drillyard/run": "r", "drillyard/cluster": "c"},
        "annotations": {
            "gke-gcsfuse/volumes": "true",
            "kueue.x-k8s.io/podset-required-topology": "block",
        },
    },
    "spec": {
        "serviceAccountName": "runs",
        "tolerations": [{"operator": "Exists"}],
        "securityContext": {"runAsUser": 1000},
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": 120,
        "containers": [
            {
                "name": "train",
                "image": "i:1",
                "command": ["/bin/sh"],
                "env": [{"name": "TOKEN", "value": "x"}],
                "resources": {"limits": {"nvidia.com/gpu": 8}},
                "securityContext": {"allowPrivilegeEscalation": False},
                "volumeMounts": [
                    {"name": "files", "mountPath": "/etc/drillyard"},
                    {"name": "shared-memory", "mountPath": "/dev/shm"},
                    {"name": "storage", "mountPath": "/data"},
                ],
            }
        ],
        "volumes": [
            {"name": "files", "configMap": {"name": "r-1"}},
            {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
            {"name": "storage", "persistentVolumeClaim": {"claimName": "v"}},
        ],
    },
}


def test_it_sees_the_storage_alone_as_the_runs_user_without_gpus() -> None:
    pod = reading_pod("r", TEMPLATE)
    (container,) = pod["spec"]["containers"]
    assert container["volumeMounts"] == [{"name": "storage", "mountPath": "/data"}]
    assert [each["name"] for each in pod["spec"]["volumes"]] == ["storage"]
    assert not {"resources", "env"} & container.keys()
    assert pod["spec"]["securityContext"] == {"runAsUser": 1000}
    assert pod["spec"]["serviceAccountName"] == "runs"
    assert 0 < pod["spec"]["activeDeadlineSeconds"] <= 3600


def test_it_states_the_resources_that_the_run_states() -> None:
    pod = copy.deepcopy(TEMPLATE)
    amounts = {"requests": {"cpu": "64"}, "limits": {"nvidia.com/gpu": 8, "memory": "1Ti"}}
    pod["spec"]["containers"][0]["resources"] = amounts
    (container,) = reading_pod("r", pod)["spec"]["containers"]
    assert container["resources"] == {"requests": {"cpu": "100m"}, "limits": {"memory": "1Gi"}}


def test_it_is_no_pod_of_the_run_and_in_no_queue() -> None:
    metadata = reading_pod("r", TEMPLATE)["metadata"]
    assert metadata["labels"] == {"drillyard/reads": "r"}
    reader = metadata["annotations"].pop(READER)
    assert process_of(json.loads(reader)) == this_process()
    assert metadata["annotations"] == {"gke-gcsfuse/volumes": "true"}


@pytest.mark.parametrize(
    ("reader", "phase", "is_deleted"),
    [
        (this_process(), "Running", False),
        (replace(this_process(), started=1), "Running", True),
        (replace(this_process(), machine="another/1", started=1), "Running", False),
        (replace(this_process(), machine="another/1"), "Succeeded", True),
        (None, "Pending", False),
        (None, "Failed", True),
    ],
)
def test_a_pod_through_which_another_process_reads_is_left_alone(
    reader: Process | None, phase: str, is_deleted: bool
) -> None:
    annotations = {} if reader is None else {READER: json.dumps(reader.as_json())}
    pod = {"metadata": {"name": "p", "annotations": annotations}, "status": {"phase": phase}}
    deleted: list[str] = []

    class Api:
        """The API server of a namespace with one reading pod."""

        def listed(self, _group: str, _kind: str, selector: str, **_: Any) -> list[Any]:
            return [pod] if selector == "drillyard/reads=r" else []

        def delete_pod(self, name: str, _seconds: int) -> None:
            deleted.append(name)

    delete_reading_pods(Api(), "r")  # type: ignore[arg-type]
    assert deleted == (["p"] if is_deleted else [])


def test_a_pod_that_does_not_answer_is_given_up(tmp_path: Path) -> None:
    silent = RemoteFiles(
        PodHost("p", before=("sh", "-c", "exec sleep 600")), Programs(), connect_seconds=0.2
    )
    with pytest.raises(UnreachableError, match="no answer"):
        silent.find([f"{tmp_path}/*"])
    (tmp_path / "a").write_text("text")
    answers = RemoteFiles(PodHost("p"), Programs(), sys.executable, connect_seconds=60.0)
    assert (
        answers.find([f"{tmp_path}/*"]) == answers.find([f"{tmp_path}/*"]) == [(f"{tmp_path}/a", 4)]
    )
    answers.close()
