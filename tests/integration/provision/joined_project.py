"""A cloud project whose parts agree, for the commands as a user types them: what Terraform makes in
the provider is at Google's APIs, its buckets are the bucket server's, and the control plane that it
makes is a real one, whose credentials gke-gcloud-auth-plugin gives.

Not joined: nodes of the pools, which are kwok's and there from the beginning; and what GKE makes by
itself (instances, firewall rules), which tests add where they need it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.integration.kubernetes.cluster import Cluster, tool
from tests.integration.provision.control_plane_relay import ControlPlaneRelay
from tests.integration.provision.project_at_google import ProjectAtGoogle


class JoinedProject(ProjectAtGoogle):
    """`cluster` is the control plane that `up` makes."""

    def __init__(self, directory: Path, cluster: Cluster, **settings: Any) -> None:
        self._relay = ControlPlaneRelay(cluster)
        super().__init__(directory, **settings)
        self._programs()
        self.kubeconfig = directory / "kubeconfig"
        helm = {
            f"HELM_{name}_HOME": str(directory / "helm") for name in ("CACHE", "CONFIG", "DATA")
        }
        self.environment |= {**helm, "KUBECONFIG": str(self.kubeconfig)}

    def close(self) -> None:
        super().close()
        self._relay.close()

    def _programs(self) -> None:
        """Helm, and the program by which a kubeconfig of GKE logs in."""
        programs = self.directory / "bin"
        (programs / "helm").symlink_to(tool("helm"))
        (self.directory / "credential.json").write_text(self._relay.credential())
        plugin = programs / "gke-gcloud-auth-plugin"
        plugin.write_text(f"#!/bin/sh\nexec cat {self.directory}/credential.json\n")
        plugin.chmod(0o700)

    def _computed(self, kind: str, value: dict[str, Any]) -> dict[str, Any]:
        if kind != "google_container_cluster":
            return super()._computed(kind, value)
        keys = {"client_certificate": "", "client_key": "", "client_certificate_config": []}
        authority = {**keys, "cluster_ca_certificate": self._relay.authority}
        return {"endpoint": self._relay.endpoint, "master_auth": [authority]}
