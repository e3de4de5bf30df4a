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
from tests.integration.provision import made_at_google
from tests.integration.provision.made_at_google import REGION, MadeAtGoogle
from tests.integration.provision.project import Project
from tests.unit.provision.google.google_cloud import PROJECT, GoogleCloud, LocalServer

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


class JoinedProject(Project):
    """`cluster` is the control plane that `up` makes."""

    state_bucket = f"{PROJECT}-c-tfstate"

    def __init__(self, directory: Path, cluster: Cluster, **settings: Any) -> None:
        place = {"project": PROJECT, "region": REGION, "zone": f"{REGION}-b"}
        super().__init__(directory, location=place, **settings)
        self.google = GoogleCloud(page_size=60)
        self._at_google = MadeAtGoogle(self.google)
        self._server = LocalServer()
        self._server.serve(self.google)
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
        self._programs(admin["users"][0]["user"])
        self.cloud.on_change = self._joined
        self.cloud.computed = self._computed
        self.kubeconfig = directory / "kubeconfig"
        homes = {f"XDG_{name}_HOME": str(directory / name) for name in ("CONFIG", "STATE")}
        helm = {
            f"HELM_{name}_HOME": str(directory / "helm") for name in ("CACHE", "CONFIG", "DATA")
        }
        self.environment |= {
            **homes,
            **helm,
            "DRILLYARD_GOOGLE_ENDPOINT": self._server.address,
            "KUBECONFIG": str(self.kubeconfig),
        }
        self._ready()

    def close(self) -> None:
        super().close()
        self._server.stop()
        self._relay.kill()
        self._relay.wait()

    def _command(self, verb: str) -> list[str]:
        return [sys.executable, "-m", "drillyard", "cluster", verb, str(self.config)]

    def leaks(self) -> dict[str, Any]:
        """What `leaks --json` prints; its exit code is in it."""
        ended = self.run("leaks", "--json")
        found: dict[str, Any] = json.loads(ended.stdout)
        assert ended.returncode == found["exit_code"], ended.stderr
        return found

    def require_nothing(self) -> None:
        super().require_nothing()
        assert list(self.google.things) == self._others and self.google.bindings == []

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

    def _joined(self, verb: str, kind: str, value: dict[str, Any]) -> str | None:
        if kind == "google_storage_bucket":
            return self._storage(verb, kind, value)
        return self._at_google.change(verb, kind, value)

    def _computed(self, kind: str, value: dict[str, Any]) -> dict[str, Any]:
        if kind != "google_container_cluster":
            return made_at_google.computed(kind, value)
        keys = {"client_certificate": "", "client_key": "", "client_certificate_config": []}
        authority = {**keys, "cluster_ca_certificate": self._authority}
        return {"endpoint": self._endpoint, "master_auth": [authority]}

    def _ready(self) -> None:
        """What the checks of `up` ask for: machines, quotas and versions."""
        plan = self.plan
        for pool in plan.pools:
            zone = f"zones/{pool.zone}"
            self.google.add("compute", f"{zone}/machineTypes/{pool.machine.name}")
            kind = pool.machine.accelerator_type
            self.google.add("compute", f"{zone}/acceleratorTypes/{kind}")
        for quota in plan.quotas:
            limit = {"effectiveLimit": "-1", "dimensions": quota.dimensions}
            if quota.dimensions:
                buckets = [{**limit, "dimensions": {**quota.dimensions, "region": quota.region}}]
                self.google.quota_metrics[f"compute.googleapis.com/{quota.metric.lower()}"] = {
                    "consumerQuotaLimits": [{"quotaBuckets": buckets}]
                }
            else:
                metric = {"metric": quota.metric, "limit": quota.amount, "usage": 0.0}
                self.google.quotas.setdefault(quota.region or "global", []).append(metric)
        version = {"defaultVersion": "1.35.2-gke.100", "validVersions": ["1.35.2-gke.100"]}
        self.google.server_config = {"channels": [{"channel": "REGULAR", **version}]}
        self.google.add("compute", f"global/networkProfiles/{REGION}-b-vpc-roce")
        self._others = list(self.google.things)


def _decoded(text: str) -> str:
    return base64.b64decode(text).decode()
