"""`drillyard accept` in real pods: judged under the nodes' names, and nothing of it is left; a node
is cordoned by who may, and comes back by the command that is printed."""

from __future__ import annotations

import shlex
import subprocess
import sys

import pytest
import yaml
from tests.integration.acceptance.places import kubernetes_place
from tests.integration.kubernetes.cluster import NODES, Cluster, tool
from tests.integration.kubernetes.team import Team
from tests.integration.kubernetes.team_runs import least_role

from drillyard.acceptance.check import Level
from drillyard.acceptance.registry import checks_of

RELEASE = "accept-test-accept"


@pytest.fixture(scope="module", autouse=True)
def rights(team: Team) -> None:
    """The rights that `launch --explain` lists."""
    role = least_role(team)
    subject = {"kind": "ServiceAccount", "name": "alice", "namespace": team.name}
    reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "drillyard"}
    binding = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": {"name": "alice", "namespace": team.name},
        "roleRef": reference,
        "subjects": [subject],
    }
    team.cluster.apply(role, binding)


def test_pods_are_judged_under_their_nodes_names_and_leave_nothing(team: Team) -> None:
    found = kubernetes_place(team).accept()
    assert found.code == 0, found.output
    assert {each["check"] for each in found.results} == {
        each.name for each in checks_of(Level.quick)
    }
    assert {each["name"] for each in found.document["nodes"]} <= set(NODES)
    left = team.cluster.kubectl(
        "--namespace", team.name, "get", "jobset,job,pod,secret", "-o", "name"
    )
    assert "accept" not in left, left
    assert f"forget kubernetes://{team.name}/{RELEASE}" not in found.output


def test_a_node_is_cordoned_and_the_printed_command_undoes_it(cluster: Cluster, team: Team) -> None:
    path = team.directory / "admin.yaml"
    config = yaml.safe_load(team.cluster_config().read_text(encoding="utf-8"))
    path.write_text(yaml.safe_dump(config))
    code = (
        "from drillyard.config.load import load_cluster_config\n"
        "from drillyard.launch.launcher import launcher_for\n"
        f"launcher = launcher_for(load_cluster_config({str(path)!r}))\n"
        f"print(launcher.drain({NODES[0]!r}, 'drillyard accept: memory: bad'))\n"
        f"print(launcher.drain({NODES[0]!r}, 'again'))\n"
    )
    environment = team.environment | {"KUBECONFIG": str(cluster.kubeconfig)}
    command = cluster.enter(sys.executable, "-c", code)
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    undo, again = done.stdout.splitlines()
    assert again == "None"
    assert cluster.get(f"node/{NODES[0]}")["spec"]["unschedulable"] is True
    words = shlex.split(undo)
    assert words[0] == "kubectl"
    undone = cluster.enter(tool("kubectl"), *words[1:])
    subprocess.run(undone, check=True, env=environment, capture_output=True)
    assert "unschedulable" not in cluster.get(f"node/{NODES[0]}")["spec"]
