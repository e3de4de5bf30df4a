"""A cloud project on this machine: a bucket server, the cloud of a provider, Terraform, and the
commands that use them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from tests.integration import waiting
from tests.integration.gcs import TOOLS
from tests.integration.provision.bucket_server import BucketServer, StoredBucket
from tests.integration.provision.fake_cloud import FakeCloud
from tests.integration.provision.plugin_protocol import Provider
from tests.unit.provision.registry_server import RegistryServer

from drillyard.config.load import load_cluster_config
from drillyard.provision.cluster_plan import ClusterPlan
from drillyard.provision.installer_images import has_images
from drillyard.provision.provisioner import plan_cluster

ROOT = Path(__file__).resolve().parents[3]
STATE = "p-c-tfstate"
TIMEOUT_SECONDS = 180
until = partial(waiting.until, seconds=TIMEOUT_SECONDS)
_CLUSTER = {
    "name": "c",
    "platform": "gke",
    "location": {"project": "p", "region": "us-central1", "zone": "us-central1-b"},
    "machine": "g2-standard-48",
    "nodes": 2,
    "consumption": "on-demand",
    "image": "example/image:1",
}


class Project:
    """`settings`: of cluster.yaml, over a small cluster's."""

    state_bucket = STATE

    def __init__(self, directory: Path, **settings: Any) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self.cloud = FakeCloud(on_change=self._storage)
        self.store = BucketServer(on_deleted=self._bucket_deleted)
        self.registry = RegistryServer()
        self._provider = Provider(self.cloud)
        self.config = directory / "c.yaml"
        self.log = directory / "stages.log"
        self._stages: dict[str, Any] = {"log": str(self.log), "registry": self.registry.address}
        self.write(**settings)
        programs = directory / "bin"
        programs.mkdir(parents=True, exist_ok=True)
        (programs / "terraform").symlink_to(terraform())
        self.environment = {
            **os.environ,
            **self._provider.environment,
            "DRILLYARD_CACHE": str(directory / "cache"),
            "PATH": f"{programs}:{os.environ['PATH']}",
            "STORAGE_EMULATOR_HOST": self.store.endpoint,
            # Cloud Storage alone is asked: the stages of the tests answer for the others.
            "DRILLYARD_GOOGLE_ENDPOINT": "http://127.0.0.1:9",
        }
        self.commands: list[subprocess.Popen[str]] = []

    @property
    def mark(self) -> tuple[str, str]:
        """What the environment of the project's processes has."""
        return self.store.endpoint, "STORAGE_EMULATOR_HOST"

    def close(self) -> None:
        for command in self.commands:
            if command.poll() is None:
                command.kill()
            command.communicate()
        self.cloud.closed.set()
        self._provider.close()
        self.store.close()
        self.registry.close()

    def write(self, **settings: Any) -> None:
        self.config.write_text(yaml.safe_dump({**_CLUSTER, **settings}), encoding="utf-8")

    @property
    def plan(self) -> ClusterPlan:
        return plan_cluster(load_cluster_config(self.config, resolve_environment=False))

    def stages(self, **settings: Any) -> None:
        """What the stages of the next commands answer (`run_command.py`)."""
        self._stages.update(settings)

    def start(self, verb: str, *options: str) -> subprocess.Popen[str]:
        """Start a command; its output is a pipe, its errors are one too."""
        started = subprocess.Popen(
            [*self._command(verb), *options],
            cwd=ROOT,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.commands.append(started)
        return started

    def _command(self, verb: str) -> list[str]:
        """The command without its options."""
        stages = self.directory / "stages.json"
        stages.write_text(json.dumps(self._stages), encoding="utf-8")
        module = "tests.integration.provision.run_command"
        return [sys.executable, "-m", module, verb, str(self.config), str(stages)]

    def run(self, verb: str, *options: str) -> subprocess.CompletedProcess[str]:
        """A command to its end."""
        started = self.start(verb, *options)
        out, err = started.communicate(timeout=TIMEOUT_SECONDS)
        return subprocess.CompletedProcess(started.args, started.returncode, out, err)

    def up(self, *options: str) -> subprocess.CompletedProcess[str]:
        """`up --yes`, which succeeds."""
        ended = self.run("up", "--yes", *options)
        assert ended.returncode == 0, ended.stderr
        return ended

    def down(self, *options: str) -> subprocess.CompletedProcess[str]:
        """`down --yes`, after which nothing is left."""
        ended = self.run("down", "--yes", *options)
        assert ended.returncode == 0, ended.stderr
        return ended

    @property
    def wanted(self) -> Counter[str]:
        """How many objects of each kind the plan says that there are after `up`."""
        return Counter(each.kind for each in self.plan.resources if each.made_by == "terraform")

    @property
    def state(self) -> list[str]:
        """The addresses of the state."""
        if self.state_bucket not in self.store.buckets:
            return []
        content = json.loads(self.store.text(self.state_bucket, "c/default.tfstate"))
        return sorted(
            f"{each['type']}.{each['name']}"
            for each in content["resources"]
            if each["mode"] == "managed"
        )

    def require_whole(self) -> None:
        """The cluster is there, once, with nothing else, and the state has all of it."""
        assert self.cloud.kinds() == self.wanted
        names = {
            (identity[0], value["name"].rpartition("/")[2].partition("@")[0])
            for identity, value in list(self.cloud.objects.items())
            if isinstance(value.get("name"), str) and "_iam_" not in identity[0]
        }
        kinds = {kind for kind, _ in names}
        assert names == {
            (
                each.kind,
                each.name.partition("@")[0] if "service_account" in each.kind else each.name,
            )
            for each in self.plan.made_by_terraform
            if each.kind in kinds
        }
        assert self.state == sorted(
            each.address for each in self.plan.resources if each.made_by == "terraform"
        )
        images = ["c/images.json"] if has_images(self.plan) else []
        assert sorted(self.store.names(self.state_bucket)) == ["c/default.tfstate", *images]

    def require_nothing(self) -> None:
        assert self.cloud.objects == {}
        assert self.store.buckets == {}
        left = [*(self.directory / "cache").rglob("*")]
        assert left == [], left

    def _bucket_deleted(self, name: str) -> None:
        """A bucket of the bucket server is one of the provider too."""
        self.cloud.objects.pop(("google_storage_bucket", name), None)

    def _storage(self, verb: str, kind: str, value: dict[str, Any]) -> str | None:
        """A data bucket of the provider is one of the bucket server too."""
        buckets = self.store.buckets
        if kind == "google_storage_bucket" and verb == "create":
            labels = value.get("labels") or {}
            place = {"name": value["name"], "labels": labels, "location": "US-CENTRAL1"}
            namespace = (value.get("hierarchical_namespace") or [{}])[0]
            place["hierarchicalNamespace"] = {"enabled": bool(namespace.get("enabled"))}
            buckets[value["name"]] = StoredBucket(place)
        elif kind == "google_storage_bucket":
            if not buckets[value["name"]].is_empty:
                return "googleapi: Error 409: The bucket you tried to delete is not empty."
            del buckets[value["name"]]
        return None


def terraform() -> Path:
    """The Terraform that was built for the tests, by the version that go.mod names."""
    module = Path(__file__).parent / "tools" / "terraform" / "go.mod"
    version = next(
        line.split()[-1]
        for line in module.read_text(encoding="utf-8").splitlines()
        if line.startswith("require github.com/hashicorp/terraform ")
    )
    found = TOOLS / f"terraform-{version}"
    assert found.exists(), "terraform is not built: run sh .ci/tools/terraform"
    return found


def kill(command: subprocess.Popen[str]) -> None:
    """Kill a command as a loss of power would, and wait until what it started has ended."""
    command.send_signal(signal.SIGKILL)
    command.communicate()
