"""A way from this machine to the control plane of a test cluster, and the login of its
administrator as a credential program prints it."""

from __future__ import annotations

import base64
import json
import socket
import subprocess
import sys

import yaml
from tests.integration.kubernetes.cluster import API, Cluster

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


class ControlPlaneRelay:
    """`endpoint` on this machine is the API server of the cluster; `authority` that of its
    certificate in base64."""

    def __init__(self, cluster: Cluster) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        number = str(listener.fileno())
        self._process = subprocess.Popen(
            cluster.enter(sys.executable, "-c", _RELAY, number, str(API)),
            pass_fds=[listener.fileno()],
        )
        self.endpoint = f"127.0.0.1:{listener.getsockname()[1]}"
        listener.close()
        admin = yaml.safe_load(cluster.kubeconfig.read_text())
        self.authority = str(admin["clusters"][0]["cluster"]["certificate-authority-data"])
        self._user: dict[str, str] = admin["users"][0]["user"]

    def credential(self, version: str = "v1beta1") -> str:
        """What a program that logs in prints."""
        return json.dumps(
            {
                "apiVersion": f"client.authentication.k8s.io/{version}",
                "kind": "ExecCredential",
                "status": {
                    "clientCertificateData": decoded(self._user["client-certificate-data"]),
                    "clientKeyData": decoded(self._user["client-key-data"]),
                },
            }
        )

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def decoded(text: str) -> str:
    return base64.b64decode(text).decode()
