"""A project of Nebius whose Managed Kubernetes is a real control plane: what Terraform makes in the
provider is reached by the kubeconfig that `up` writes, and the program in place of `nebius` gives
the login. Nodes of the groups are kwok's, and there from the beginning."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.integration.kubernetes.cluster import Cluster, tool
from tests.integration.provision.control_plane_relay import ControlPlaneRelay, decoded
from tests.integration.provision.nebius_project import CONTROL_PLANE, NebiusProject
from tests.unit.provision.nebius_clusters import kubernetes_config

_LOGIN = ["mk8s", "v1", "cluster", "get-token"]


class JoinedNebius(NebiusProject):
    """`cluster` is the control plane that `up` makes."""

    content: Callable[..., dict[str, Any]] = staticmethod(kubernetes_config)

    def __init__(self, directory: Path, cluster: Cluster, **settings: Any) -> None:
        self._relay = ControlPlaneRelay(cluster)
        super().__init__(directory, **settings)
        (directory / "bin/helm").symlink_to(tool("helm"))
        self.kubeconfig = directory / "kubeconfig"
        helm = {
            f"HELM_{name}_HOME": str(directory / "helm") for name in ("CACHE", "CONFIG", "DATA")
        }
        self.environment |= {**helm, "KUBECONFIG": str(self.kubeconfig)}

    def close(self) -> None:
        super().close()
        self._relay.close()

    def _computed(self, kind: str, value: dict[str, Any]) -> dict[str, Any]:
        made = super()._computed(kind, value)
        if kind != CONTROL_PLANE:
            return made
        place = {"public_endpoint": f"https://{self._relay.endpoint}"}
        authority = {"cluster_ca_certificate": decoded(self._relay.authority)}
        return {**made, "status": {"control_plane": {"endpoints": place, "auth": authority}}}

    def _command_answer(self, words: list[str]) -> dict[str, Any]:
        if words == _LOGIN:
            return {"code": 0, "out": self._relay.credential("v1"), "err": ""}
        return super()._command_answer(words)

    def launch_config(self) -> Path:
        """The file that `up --write` writes."""
        return self.config.with_name("team-kubernetes.yaml")


def fake_node(number: int) -> dict[str, Any]:
    """A node of the group, of kwok."""
    size = {"cpu": "128", "memory": "1600Gi", "nvidia.com/gpu": "8", "pods": "110"}
    taint = {"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}
    name = f"gpu-{number}"
    labels = {"kubernetes.io/hostname": name, "drillyard-pool": "team-on-demand"}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "annotations": {"kwok.x-k8s.io/node": "fake"},
            "labels": labels,
        },
        "spec": {"taints": [taint]},
        "status": {"allocatable": size, "capacity": size},
    }
