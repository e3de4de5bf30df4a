"""A cloud project whose parts agree, for the commands as a user types them: what Terraform makes in
the provider is at Google's APIs, its buckets are the bucket server's, and the control plane that it
makes is a real one, whose credentials gke-gcloud-auth-plugin gives.

Not joined: nodes of the pools, which are kwok's and there from the beginning; and what GKE makes by
itself (instances, firewall rules), which tests add where they need it.
"""

from __future__ import annotations

import base64
import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml
from tests.integration.kubernetes.cluster import API, Cluster, tool
from tests.integration.provision.project_at_google import ProjectAtGoogle

_RELAY = """
import asyncio, socket, sys
async def pump(reader, writer):
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    writer.close()
async def relay(reader, writer):
    try:
        far = await asyncio.open_connection("127.0.0.1", int(sys.argv[2]))
    except OSError:
        return writer.close()
    await asyncio.gather(pump(reader, far[1]), pump(far[0], writer))
async def main():
    listener = socket.socket(fileno=int(sys.argv[1]))
    await (await asyncio.start_server(relay, sock=listener)).serve_forever()
asyncio.run(main())
"""
"""Passes connections of this machine on to the network namespace of the cluster."""


class JoinedProject(ProjectAtGoogle):
    """`cluster` is the control plane that `up` makes."""

    def __init__(self, directory: Path, cluster: Cluster, **settings: Any) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        number = str(listener.fileno())
        self._relay = subprocess.Popen(
            cluster.enter(sys.executable, "-c", _RELAY, number, str(API)),
            pass_fds=[listener.fileno()],
        )
        self._endpoint = f"127.0.0.1:{listener.getsockname()[1]}"
        listener.close()
        admin = yaml.safe_load(cluster.kubeconfig.read_text())
        self._authority = admin["clusters"][0]["cluster"]["certificate-authority-data"]
        super().__init__(directory, **settings)
        self._programs(admin["users"][0]["user"])
        self.kubeconfig = directory / "kubeconfig"
        helm = {
            f"HELM_{name}_HOME": str(directory / "helm") for name in ("CACHE", "CONFIG", "DATA")
        }
        self.environment |= {**helm, "KUBECONFIG": str(self.kubeconfig)}

    def close(self) -> None:
        super().close()
        self._relay.kill()
        self._relay.wait()

    def _programs(self, user: dict[str, str]) -> None:
        """Helm, and the program by which a kubeconfig of GKE logs in."""
        programs = self.directory / "bin"
        (programs / "helm").symlink_to(tool("helm"))
        credential = {
            "apiVersion": "client.authentication.k8s.io/v1beta1",
            "kind": "ExecCredential",
            "status": {
                "clientCertificateData": _decoded(user["client-certificate-data"]),
                "clientKeyData": _decoded(user["client-key-data"]),
            },
        }
        (self.directory / "credential.json").write_text(json.dumps(credential))
        plugin = programs / "gke-gcloud-auth-plugin"
        plugin.write_text(f"#!/bin/sh\nexec cat {self.directory}/credential.json\n")
        plugin.chmod(0o700)

    def _computed(self, kind: str, value: dict[str, Any]) -> dict[str, Any]:
        if kind != "google_container_cluster":
            return super()._computed(kind, value)
        keys = {"client_certificate": "", "client_key": "", "client_certificate_config": []}
        authority = {**keys, "cluster_ca_certificate": self._authority}
        return {"endpoint": self._endpoint, "master_auth": [authority]}


def _decoded(text: str) -> str:
    return base64.b64decode(text).decode()
