"""The directory of a plan for Nebius, carried out by the real Terraform: its state and lock in an
object storage that speaks S3, its machines in a cloud of the provider's own names."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto.server import ThreadedMotoServer
from tests.integration.provision.fake_cloud import FakeCloud
from tests.integration.provision.nebius_project import FILES, VM, shapes
from tests.integration.provision.plugin_protocol import Provider
from tests.integration.provision.project import terraform
from tests.unit.provision.nebius_clusters import config, plan

from drillyard.config.load import load_cluster_config
from drillyard.provision.cluster_plan import ClusterPlan
from drillyard.provision.nebius.nebius_settings import PROVIDER
from drillyard.provision.plan_directory import write_cluster_plan

LOCK = "team/default.tfstate.tflock"


class Desk:
    """A machine with the directory of a plan, Terraform, and a program in place of `nebius`."""

    def __init__(self, directory: Path, endpoint: str) -> None:
        key = {"aws_access_key_id": "a", "aws_secret_access_key": "b"}
        self.store = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1", **key)
        self.cloud = FakeCloud(shapes=shapes(), computed=self._computed, on_begin=self._begin)
        self.provider = Provider(self.cloud, PROVIDER)
        self.locked: set[bool] = set()
        self.directory, self.endpoint = directory, endpoint
        programs = directory / "bin"
        programs.mkdir()
        (programs / "terraform").symlink_to(terraform())
        nebius = programs / "nebius"
        nebius.write_text(_NEBIUS.format(python=sys.executable, endpoint=endpoint))
        nebius.chmod(0o700)
        self.environment = {
            **os.environ,
            **self.provider.environment,
            "PATH": f"{programs}:{os.environ['PATH']}",
            **{name.upper(): value for name, value in key.items()},
        }

    def write(self, planned: ClusterPlan) -> Path:
        """Write the directory; its state is kept by the server of the test."""
        out = self.directory / "out"
        write_cluster_plan(planned, (), out, overwrite=True)
        file = out / "backend.tf.json"
        content = json.loads(file.read_text("utf-8"))
        s3 = content["terraform"]["backend"]["s3"]
        s3 |= {"endpoints": {"s3": self.endpoint}, "use_path_style": True}
        file.write_text(json.dumps(content), "utf-8")
        return out

    def run(self, *command: str, answer: str = "yes\n") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            cwd=self.directory / "out",
            env=self.environment,
            input=answer,
            capture_output=True,
            text=True,
            timeout=180,
        )

    def objects(self, bucket: str) -> list[str]:
        found = self.store.list_objects_v2(Bucket=bucket).get("Contents", [])
        return [each["Key"] for each in found]

    def _computed(self, kind: str, value: dict[str, Any]) -> dict[str, Any]:
        if kind != VM:
            return {}
        number = value["name"].rpartition("-")[2]
        inside = {"address": f"10.0.0.{number}/32"}
        public = {"address": f"198.51.100.{number}/32"}
        nic = {"ip_address": inside, "public_ip_address": public}
        return {"status": {"network_interfaces": [nic]}}

    def _begin(self, *words: str) -> None:
        self.locked.add(LOCK in self.objects("project-e00abc-team-tfstate"))


_NEBIUS = """\
#!{python}
import sys
import boto3
words = sys.argv[1:]
if words[:2] == ["iam", "get-access-token"]:
    print("token")
    sys.exit()
store = boto3.client("s3", endpoint_url="{endpoint}", region_name="us-east-1")
name = words[words.index("--name") + 1]
if words[2] == "create":
    store.create_bucket(Bucket=name)
elif name not in [each["Name"] for each in store.list_buckets()["Buckets"]]:
    sys.exit(1)
"""


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    made = Desk(tmp_path, f"http://{host}:{port}")
    yield made
    made.cloud.closed.set()
    made.provider.close()
    server.stop()


def test_the_directory_makes_the_cluster_and_the_file_for_launch(desk: Desk) -> None:
    planned = plan(desk.directory, config())
    out = desk.write(planned)
    made = desk.run("sh", "apply.sh")
    assert made.returncode == 0, made.stderr
    assert desk.cloud.kinds() == Counter(each.kind for each in planned.made_by_terraform)
    # Every change was made under the lock, which is gone now.
    assert desk.locked == {True}
    assert desk.objects(planned.state_bucket) == ["team/default.tfstate"]
    launched = load_cluster_config(out / "team-ssh.yaml", resolve_environment=False)
    assert launched.platform == "ssh" and launched.nodes == 2
    assert launched.section.model_dump(include={"hosts", "rendezvous_host"}) == {
        "hosts": ["198.51.100.0", "198.51.100.1"],
        "rendezvous_host": "10.0.0.0",
    }

    # The same again changes nothing; another one holds the lock.
    begun = len(desk.cloud.log)
    assert desk.run("sh", "apply.sh").returncode == 0
    assert len(desk.cloud.log) == begun
    held = json.dumps({"ID": "1", "Operation": "apply", "Who": "ann@desk", "Path": "x"})
    desk.store.put_object(Bucket=planned.state_bucket, Key=LOCK, Body=held.encode())
    refused = desk.run("sh", "apply.sh")
    assert refused.returncode != 0 and "ann@desk" in refused.stderr
    desk.store.delete_object(Bucket=planned.state_bucket, Key=LOCK)

    # Fewer nodes, by the same directory. An edited file is kept.
    (out / "team-ssh.yaml").write_text("# mine\n")
    desk.write(plan(desk.directory, config(nodes=1)))
    assert desk.run("sh", "apply.sh").returncode == 0
    assert desk.cloud.kinds()[VM] == 1
    (earlier,) = out.glob("team-ssh.yaml.*")
    assert earlier.read_text() == "# mine\n"
    assert load_cluster_config(out / "team-ssh.yaml", resolve_environment=False).nodes == 1

    # The way back of README.md; data is not destroyed unasked.
    kept = desk.run("terraform", "destroy")
    assert kept.returncode != 0 and "prevent_destroy" in kept.stderr
    assert desk.cloud.kinds()[VM] == 1
    assert desk.run("terraform", "state", "rm", f"{FILES}.shared").returncode == 0
    assert desk.run("terraform", "destroy").returncode == 0
    assert desk.cloud.kinds() == {FILES: 1}
