"""The pod that reads the run directory of a run that is over."""

from __future__ import annotations

from typing import Any

from drillyard.launch.kubernetes.pod_files import reading_pod

TEMPLATE: dict[str, Any] = {
    "metadata": {
        "labels": {"drillyard/run": "r", "drillyard/cluster": "c"},
        "annotations": {"gke-gcsfuse/volumes": "true", "kueue.x-k8s.io/podset-required-topology": "block"},
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


def test_it_is_no_pod_of_the_run_and_in_no_queue() -> None:
    metadata = reading_pod("r", TEMPLATE)["metadata"]
    assert metadata["labels"] == {"drillyard/reads": "r"}
    assert metadata["annotations"] == {"gke-gcsfuse/volumes": "true"}
