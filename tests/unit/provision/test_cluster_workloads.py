"""What is deleted of a cluster before the cluster is, and what is not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from drillyard.errors import UserError
from drillyard.launch.kubernetes import cluster_api
from drillyard.provision.cluster_workloads import delete_workloads, running_workloads

CORE, APPS = "/api/v1", "/apis/apps/v1"
CLAIM = {"volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": "data"}}]}


class Server:
    """An API server, as far as deleting goes: an object goes when nothing uses it."""

    title, kueue = "https://c", "/apis/kueue.x-k8s.io/v1beta2"

    def __init__(self, lists: dict[str, list[dict[str, Any]]]) -> None:
        self.lists = lists
        self.deleted: list[str] = []

    def __call__(self, context: str | None) -> Server:
        return self

    def items(self, path: str, *_: Any, **__: Any) -> list[dict[str, Any]]:
        return list(self.lists.get(path, ()))

    def delete_at(self, path: str, body: Mapping[str, Any] | None = None) -> None:
        self.deleted.append(path)
        parts = path.split("/")
        kind, name = parts[-2:]
        for listed, found in self.lists.items():
            if listed.endswith(f"/{kind}"):
                kept = [each for each in found if each["metadata"]["name"] != name]
                self.lists[listed] = kept
        if kind == "persistentvolumeclaims":
            self.lists[f"{CORE}/persistentvolumes"] = [
                each
                for each in self.lists.get(f"{CORE}/persistentvolumes", [])
                if each["spec"]["persistentVolumeReclaimPolicy"] != "Delete"
            ]


def made(name: str, spec: Mapping[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "namespace": "n", "uid": name, **more},
        "spec": dict(spec or {}),
        "status": {},
    }


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    found = Server({})
    monkeypatch.setattr(cluster_api, "ApiServer", found)
    return found


def volume(name: str, policy: str) -> dict[str, Any]:
    spec = {
        "persistentVolumeReclaimPolicy": policy,
        "claimRef": {"name": "data"},
        "csi": {"volumeHandle": name},
    }
    return {"metadata": {"name": name, "uid": name}, "spec": spec, "status": {}}


def test_what_would_make_a_volume_again_goes_with_its_claim(server: Server) -> None:
    server.lists = {
        f"{APPS}/statefulsets": [made("db", {"volumeClaimTemplates": [{}], "template": {}})],
        f"{APPS}/deployments": [
            made("web", {"template": {"spec": CLAIM}}),
            made("plain", {"template": {"spec": {}}}),
        ],
        f"{CORE}/pods": [made("user", CLAIM), made("other", {})],
        f"{CORE}/persistentvolumeclaims": [made("data")],
        f"{CORE}/persistentvolumes": [volume("pvc-1", "Delete"), volume("disk", "Retain")],
    }
    said: list[str] = []
    assert delete_workloads(None, seconds=5, notice=said.append) == ["disk: disk"]
    names = [path.rsplit("/", 1)[1] for path in server.deleted]
    assert names == ["db", "web", "user", "data"]
    assert len(said) == 4


def test_a_volume_is_never_deleted_before_its_disk(server: Server) -> None:
    """Its controller deletes both; a volume that goes first leaves the disk to be paid for."""
    server.lists = {f"{CORE}/persistentvolumes": [volume("pvc-1", "Delete")]}
    with pytest.raises(UserError, match="persistentvolume pvc-1"):
        delete_workloads(None, seconds=0.0, notice=lambda _: None)
    assert server.deleted == []


def test_load_balancers_of_every_kind_go(server: Server) -> None:
    neg = {"annotations": {"cloud.google.com/neg": "{}"}}
    server.lists = {
        f"{CORE}/services": [
            made("lb", {"type": "LoadBalancer"}),
            made("inside", {"type": "ClusterIP"}),
            made("neg", {"type": "ClusterIP"}, **neg),
        ],
        "/apis/networking.k8s.io/v1/ingresses": [made("ingress")],
        "/apis/gateway.networking.k8s.io/v1/gateways": [made("gateway")],
    }
    delete_workloads(None, seconds=5, notice=lambda _: None)
    names = {path.rsplit("/", 1)[1] for path in server.deleted}
    assert names == {"lb", "neg", "ingress", "gateway"}


def test_a_jobs_pods_are_listed_once_and_a_finished_run_is_not(server: Server) -> None:
    gpu = {"containers": [{"resources": {"limits": {"nvidia.com/gpu": "8"}}}]}
    job = {"parallelism": 2, "template": {"spec": gpu}}
    over = made("over", job)
    over["status"] = {"conditions": [{"type": "Complete", "status": "True"}]}
    owner = {"ownerReferences": [{"uid": "job"}]}
    queued = made("w", {"podSets": [{"count": 3, "template": {"spec": gpu}}]})
    server.lists = {
        "/apis/batch/v1/jobs": [made("job", job), over],
        f"{server.kueue}/workloads": [queued, made("own", {"podSets": []}, **owner)],
        f"{CORE}/pods": [made("job-0", gpu, **owner), made("alone", gpu), made("cpu", {})],
    }
    found = {(each.kind, each.name): (each.state, each.gpus) for each in running_workloads(None)}
    assert found == {
        ("Job", "job"): ("running", 16),
        ("Workload", "w"): ("queued", 24),
        ("Pod", "alone"): ("queued", 8),
    }
