"""A team on the test cluster: its namespace, queue and volume, its user, and that user's
drillyard."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from tests.integration import waiting
from tests.integration.kubernetes.cluster import (
    IMAGE,
    NODES,
    ROOT,
    Cluster,
    tool,
)
from tests.integration.tiny_run import TIMEOUT_SECONDS, write_config, write_rows

USER = 1000
VOLUME = "/data"
GPUS = 8 * len(NODES)
until = partial(waiting.until, seconds=300.0)


class Team:
    """`shared` is the directory on this machine that pods have as /data."""

    def __init__(self, cluster: Cluster, name: str, directory: Path) -> None:
        self.cluster, self.name, self.directory = cluster, name, directory
        self.shared = directory / "shared"
        self.shared.mkdir()
        # The tests' directories can be entered by their owner alone, who is not the pods' user.
        for path in (self.shared, *directory.parents[:3]):
            path.chmod(0o777 if path == self.shared else path.stat().st_mode | 0o055)
        write_rows(self.shared / "rows.jsonl")
        cluster.apply(*self._objects())
        self.add_volume(name, {"path": str(self.shared)})
        cluster.kubectl(
            "wait", "--for", "condition=Active", "clusterqueue", name, "--timeout", "30s"
        )
        self.environment = self._user()

    def _objects(self) -> list[dict[str, Any]]:
        def made(kind: str, version: str, **fields: Any) -> dict[str, Any]:
            cluster_wide = kind in ("Namespace", "ResourceFlavor", "ClusterQueue")
            place = {} if cluster_wide else {"namespace": self.name}
            return {
                "apiVersion": version,
                "kind": kind,
                "metadata": {"name": self.name, **place},
                **fields,
            }

        kueue = "kueue.x-k8s.io/v1beta1"
        namespace = made("Namespace", "v1")
        namespace["metadata"]["labels"] = {"pod-security.kubernetes.io/enforce": "restricted"}
        quota = {"name": self.name, "resources": [{"name": "nvidia.com/gpu", "nominalQuota": GPUS}]}
        groups = [{"coveredResources": ["nvidia.com/gpu"], "flavors": [quota]}]
        return [
            namespace,
            made("ResourceFlavor", kueue),
            made("ClusterQueue", kueue, spec={"namespaceSelector": {}, "resourceGroups": groups}),
            made("LocalQueue", kueue, spec={"clusterQueue": self.name}),
        ]

    def add_volume(self, name: str, host_path: dict[str, str]) -> None:
        """A volume that is a directory of both nodes, and the team's claim on it."""
        size = {"accessModes": ["ReadWriteMany"], "storageClassName": ""}
        volume = {"hostPath": host_path, "capacity": {"storage": "1Gi"}}
        claim = {"name": name, "namespace": self.name}
        specs = {
            "PersistentVolume": {**size, **volume, "claimRef": claim},
            "PersistentVolumeClaim": {
                **size,
                "volumeName": name,
                "resources": {"requests": {"storage": "1Gi"}},
            },
        }
        self.cluster.apply(
            *(
                {
                    "apiVersion": "v1",
                    "kind": kind,
                    "metadata": claim if "Claim" in kind else {"name": name},
                    "spec": spec,
                }
                for kind, spec in specs.items()
            )
        )

    def _user(self) -> dict[str, str]:
        """The environment of a user who may do in this namespace what `launch --explain` lists, and
        nothing else."""
        account = {
            "apiVersion": "v1",
            "kind": "ServiceAccount",
            "metadata": {"name": "alice", "namespace": self.name},
        }
        self.cluster.apply(account)
        kubeconfig = yaml.safe_load(self.cluster.kubeconfig.read_text())
        token = self.cluster.kubectl(
            "--namespace", self.name, "create", "token", "alice", "--duration", "8h"
        ).strip()
        kubeconfig["users"] = [{"name": "admin", "user": {"token": token}}]
        path = self.directory / "kubeconfig"
        path.write_text(yaml.safe_dump(kubeconfig))
        programs = self.directory / "bin"
        programs.mkdir()
        for name in ("helm", "kubectl"):
            (programs / name).symlink_to(tool(name))
        for name in ("CACHE", "CONFIG", "DATA"):
            (self.directory / f"helm-{name}").mkdir()
        return {
            **os.environ,
            "KUBECONFIG": str(path),
            "KUBECACHEDIR": str(self.directory / "kube-cache"),
            "PATH": f"{programs}:{os.environ['PATH']}",
            **{
                f"XDG_{name}_HOME": str(self.directory / name.lower())
                for name in ("CONFIG", "STATE")
            },
            **{
                f"HELM_{name}_HOME": str(self.directory / f"helm-{name}")
                for name in ("CACHE", "CONFIG", "DATA")
            },
        }

    def cluster_config(self, **changes: Any) -> Path:
        """cluster.yaml of this team; `changes` are settings of the section kubernetes."""
        environment = {
            "PYTHONPATH": str(ROOT / "src"),
            "HOME": "/tmp",
            "USER": "trainer",
            "OMP_NUM_THREADS": "1",
        }
        section = {
            "namespace": self.name,
            "queue": self.name,
            "volume_claim": self.name,
            "run_as_user": USER,
        }
        settings = {
            "name": self.name,
            "platform": "kubernetes",
            "nodes": len(NODES),
            "processes_per_node": 1,
            "network_stack": "ethernet",
            "image": IMAGE,
            "python": sys.executable,
            "storage": {"directory": VOLUME},
            "environment": environment,
            "kubernetes": {"grace_seconds": 30, **section, **changes},
        }
        path = self.directory / "cluster.yaml"
        path.write_text(yaml.safe_dump(settings))
        return path

    def run_config(self, name: str, **changes: Any) -> Path:
        """NAME.yaml of a small run on the shared volume."""
        source = {
            "data__source": f"{VOLUME}/rows.jsonl",
            "data__cache_directory": f"{VOLUME}/cache-{name}",
        }
        return write_config(
            self.directory, name, **{"output": f"{VOLUME}/runs", **source, **changes}
        )

    def drillyard(self, *arguments: object, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a command as the team's user, where the API server is."""
        command = self.cluster.enter(sys.executable, "-m", "drillyard", *map(str, arguments))
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
            env=self.environment,
            cwd=self.directory,
        )
        assert not check or done.returncode == 0, (
            f"{arguments}: {done.returncode}\n{done.stdout}{done.stderr}"
        )
        return done

    def jobset(self, name: str) -> dict[str, Any]:
        """The JobSet of a run."""
        return self.cluster.get("--namespace", self.name, f"jobset/{name}")

    def pods(self, name: str) -> list[dict[str, Any]]:
        """The pods of a run, by node rank."""
        found = self.cluster.get(
            "--namespace", self.name, "pods", "--selector", f"jobset.sigs.k8s.io/jobset-name={name}"
        )
        index = "batch.kubernetes.io/job-completion-index"
        return sorted(found["items"], key=lambda pod: int(pod["metadata"]["annotations"][index]))
