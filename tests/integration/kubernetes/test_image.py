"""The image in a pod: it trains as its own user, in a namespace that takes no pods of root."""

from __future__ import annotations

import importlib.util
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import yaml
from tests.integration.kubernetes.cluster import NODES
from tests.integration.kubernetes.team import Team
from tests.integration.kubernetes.team_runs import (
    ended,
    handle,
    losses,
    rights,  # noqa: F401
)
from tests.integration.launch.image_build import TOOLS, Builder, make_checkout

IMAGE = "localhost/drillyard-test-pod:1"
IMAGE_USER = 10001
STEPS = 3


def give_to_nodes(team: Team, archive: Path) -> None:
    """Load an image into each node's containerd."""

    def load(node: str) -> None:
        socket = team.cluster.directory / node / "containerd.sock"
        words = ["ctr", "-a", str(socket), "--namespace", "k8s.io", "images", "import"]
        subprocess.run([*words, str(archive)], check=True, capture_output=True)

    with ThreadPoolExecutor() as threads:
        list(threads.map(load, NODES))


def user_of_a_pod(team: Team) -> str:
    """The user of a pod that says only that it is not root's: the kubelet must see it from the
    image."""
    none = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    container = {
        "name": "a",
        "image": IMAGE,
        "imagePullPolicy": "Never",
        "command": ["id", "-u"],
        "securityContext": none,
    }
    spec = {
        "restartPolicy": "Never",
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [container],
    }
    metadata = {"name": "user", "namespace": team.name}
    team.cluster.apply({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})
    words = ("--namespace", team.name)
    done = "jsonpath={.status.phase}=Succeeded"
    team.cluster.kubectl(*words, "wait", "pod/user", "--for", done, "--timeout", "120s")
    return team.cluster.kubectl(*words, "logs", "user").strip()


def test_it_trains_as_its_own_user_who_is_not_root(team: Team, tmp_path: Path) -> None:
    builder = Builder(TOOLS, tmp_path)
    builder.make_base()
    make_checkout(tmp_path / "checkout")
    assert builder.build(tmp_path / "checkout", IMAGE) == IMAGE
    builder("push", "--quiet", IMAGE, f"docker-archive:{tmp_path}/image.tar:{IMAGE}")
    give_to_nodes(team, tmp_path / "image.tar")
    assert user_of_a_pod(team) == str(IMAGE_USER)
    path = team.cluster_config(run_as_user=IMAGE_USER)
    cluster = yaml.safe_load(path.read_text())
    # Drillyard is the image's; PyTorch, which is gigabytes, is this machine's.
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    cluster["environment"]["PYTHONPATH"] = str(Path(spec.origin).parents[1])
    cluster |= {"nodes": 1, "image": IMAGE, "python": "/opt/drillyard/bin/python"}
    path.write_text(yaml.safe_dump(cluster))
    run = team.run_config("image", training__steps=STEPS, logging={"every_steps": 1})
    launched = team.drillyard("launch", run, "--cluster", path).stdout.strip()
    assert launched == handle(team, "image")
    assert ended(team, "image") == "succeeded", team.drillyard("runs", "logs", launched).stdout
    assert sorted(losses(team, "image")) == [1, 2, 3]
    written = team.shared / "runs/image/metrics.jsonl"
    assert written.stat().st_uid == IMAGE_USER
