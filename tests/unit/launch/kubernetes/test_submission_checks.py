"""What the API server is asked before anything is made."""

from __future__ import annotations

from typing import Any

import pytest

from drillyard.errors import UserError
from drillyard.launch.kubernetes.config import KubernetesConfig
from drillyard.launch.kubernetes.submission_checks import require_cluster, tried_objects

POD = {"metadata": {"labels": {}}, "spec": {"containers": []}}
JOB = {"kind": "Job", "metadata": {"name": "run"}, "spec": {"template": POD}}
JOBSET = {
    "kind": "JobSet",
    "metadata": {"name": "run", "labels": {"kueue.x-k8s.io/queue-name": "q"}},
    "spec": {"replicatedJobs": [{"template": {"spec": {"template": POD}}}]},
}
CLAIM = {"kind": "ResourceClaimTemplate", "metadata": {"name": "run-network"}, "spec": {}}
DOMAIN = {"kind": "ComputeDomain", "metadata": {"name": "run"}, "spec": {"numNodes": 2}}


def tried(*objects: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Path of each object, its kind and its name."""
    return [
        (group, kind, body["metadata"]["name"])
        for group, kind, body in tried_objects(list(objects))
    ]


def test_a_jobset_is_tried_with_a_job_and_a_pod_under_a_name_that_no_run_has() -> None:
    found = tried(JOBSET)
    assert [kind for _, kind, _ in found] == ["jobsets", "jobs", "pods"]
    assert all(
        len(name.partition("-")[0]) == 3 and not name.startswith("run") for _, _, name in found
    )
    (job,) = [body for _, kind, body in tried_objects([JOBSET]) if kind == "jobs"]
    assert job["metadata"]["labels"] == {}, "Kueue would count it"


def test_a_job_is_tried_with_a_pod_and_claims_on_devices_are_tried_too() -> None:
    found = tried(CLAIM, DOMAIN, JOB)
    assert [kind for _, kind, _ in found] == [
        "resourceclaimtemplates",
        "computedomains",
        "jobs",
        "pods",
    ]
    assert [group for group, _, _ in found[:2]] == [
        "/apis/resource.k8s.io/v1",
        "/apis/resource.nvidia.com/v1beta1",
    ]


class PlainCluster:
    """The answers of an API server without JobSet and Kueue, to a user who may do all but
    `without`."""

    title = "https://c, namespace n"
    kueue = "/apis/kueue.x-k8s.io/v1beta1"

    def __init__(
        self,
        *without: tuple[str, str, str],
        schema: dict[str, Any] | None = None,
        has: tuple[str, ...] = (),
    ) -> None:
        self._without, self._schema, self._has = without, schema, has

    def one(self, path: str) -> dict[str, Any] | None:
        if path.startswith(self._has or ("none",)):
            return {}
        return self._schema if "jobset" in path else None

    def may(self, *right: str, cluster_wide: bool = False) -> bool:
        assert cluster_wide == (right[2] == "workloadpriorityclasses")
        return right not in self._without


@pytest.mark.parametrize("schema", [None, {"components": "onJobFailureReasons"}])
def test_a_cluster_whose_jobset_is_missing_or_old_is_refused_with_both_remedies(
    schema: dict[str, Any] | None,
) -> None:
    with pytest.raises(UserError) as refused:
        require_cluster(PlainCluster(schema=schema), KubernetesConfig(), {})  # type: ignore[arg-type]
    assert "helm install jobset" in str(refused.value) and "kubernetes.controller: job" in str(
        refused.value
    )


def test_a_plain_job_needs_no_jobset_but_the_right_to_make_services() -> None:
    section = KubernetesConfig(controller="job")
    assert require_cluster(PlainCluster(), section, {"controller": "job"}) == []  # type: ignore[arg-type]
    without: Any = PlainCluster(("create", "", "services"))
    with pytest.raises(UserError, match="you may not create services"):
        require_cluster(without, section, {"controller": "job"})


QUEUED = KubernetesConfig(controller="job", queue="q", priority_class="high")
QUEUE = "/apis/kueue.x-k8s.io/v1beta1/namespaces/default/localqueues/q"
CLASS = "/apis/kueue.x-k8s.io/v1beta1/workloadpriorityclasses/high"
READ_CLASS = ("get", "kueue.x-k8s.io", "workloadpriorityclasses")


def test_a_priority_class_that_kueue_does_not_have_is_refused() -> None:
    lacking: Any = PlainCluster(has=(QUEUE,))
    with pytest.raises(UserError, match=r"kubernetes\.priority_class: .* high"):
        require_cluster(lacking, QUEUED, {"controller": "job"})
    there: Any = PlainCluster(has=(QUEUE, CLASS))
    assert require_cluster(there, QUEUED, {"controller": "job"}) == []


def test_a_priority_class_that_cannot_be_read_is_named_as_not_checked() -> None:
    blind: Any = PlainCluster(READ_CLASS, has=(QUEUE,))
    (line,) = require_cluster(blind, QUEUED, {"controller": "job"})
    assert "high" in line and "get workloadpriorityclasses" in line
