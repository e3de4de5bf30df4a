"""Virtual machines of flex-start: template, group and request for each machine, and what of an edit
reaches which of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.unit.provision.clusters import bodies
from tests.unit.provision.vm_clusters import OFFERS, config, plan

from drillyard.errors import UserError
from drillyard.hardware import catalog
from drillyard.provision.cluster_plan import ClusterPlan
from drillyard.provision.made_hosts import MadeHost, planned_hosts
from drillyard.provision.node_request import NodeRequest, spent_requests, wait_for_nodes
from drillyard.provision.plan_text import plan_text
from drillyard.provision.terraform_output import StateResource

TEMPLATE = "google_compute_region_instance_template"
GROUP = "google_compute_instance_group_manager"
REQUEST = "google_compute_resize_request"
MACHINES = [machine for machine, mode in OFFERS if mode == "flex-start"]
LOGIN = {"os_login": True, "user": "me"}


def flex(directory: Path, machine: str = "a4-highgpu-8g", **settings: Any) -> ClusterPlan:
    return plan(directory, config(machine, "flex-start", **settings))


def only(found: ClusterPlan, kind: str) -> dict[str, Any]:
    (body,) = bodies(found, kind).values()
    return body


@pytest.mark.parametrize("machine", MACHINES)
def test_a_group_is_made_from_what_flex_start_demands(machine: str, tmp_path: Path) -> None:
    found = flex(tmp_path, machine)
    assert not bodies(found, "google_compute_instance")
    template, group, request = (only(found, kind) for kind in (TEMPLATE, GROUP, REQUEST))
    [schedule] = template["scheduling"]
    assert schedule == {
        "provisioning_model": "FLEX_START",
        "on_host_maintenance": "TERMINATE",
        "automatic_restart": False,
        "instance_termination_action": "DELETE",
        "max_run_duration": [{"seconds": 604800}],
    }
    assert template["reservation_affinity"] == [{"type": "NO_RESERVATION"}]
    assert template["machine_type"] == machine
    [disk] = template["disk"]
    assert disk["disk_type"] == catalog().machine(machine).boot_disk
    assert template["labels"] == disk["labels"] == {"drillyard-cluster": "team"}
    assert group["version"] == [{"instance_template": f"${{{TEMPLATE}.nodes.self_link}}"}]
    assert group["instance_lifecycle_policy"] == [{"default_action_on_failure": "DO_NOTHING"}]
    # The request sets it; a size of Terraform's would undo that.
    assert "target_size" not in group
    assert request["instance_group_manager"] == f"${{{GROUP}.nodes.name}}"
    assert (request["resize_by"], request["name"]) == (2, group["name"])
    assert request["requested_run_duration"] == [{"seconds": 604800}]
    near = catalog().machine(machine).compact_flex_start
    assert ("resource_policies" in group) == near
    if near:
        policy = only(found, "google_compute_resource_policy")
        assert policy["workload_policy"] == [{"type": "HIGH_THROUGHPUT"}]
    assert found.login is not None and found.login.group is not None
    assert found.login.hosts == ()


def test_a_shorter_duration_is_asked_for(tmp_path: Path) -> None:
    found = flex(tmp_path, gce={**LOGIN, "max_run_hours": 24})
    assert only(found, REQUEST)["requested_run_duration"] == [{"seconds": 86400}]
    assert any("24 hours" in each for each in found.warnings)


def test_what_an_edit_changes(tmp_path: Path) -> None:
    """A group is another one where its nodes would be others; its template in any case."""

    def names(**settings: Any) -> tuple[str, str]:
        found = flex(tmp_path, **settings)
        return only(found, GROUP)["name"], only(found, TEMPLATE)["name"]

    group, template = names()
    assert len(group) <= 63 and group.startswith("team-") and template.startswith("team-")
    for settings in (
        {"cluster": {"labels": {"team": "a"}}},
        {"gce": {"identity_file": str(tmp_path / "key")}},
    ):
        (tmp_path / "key.pub").write_text("ssh-ed25519 AAAA me\n")
        same, other = names(**settings)
        assert same == group and other != template
    for settings in (
        {"nodes": 3},
        {"machine": "a3-ultragpu-8g"},
        {"network_stack": "ethernet"},
        {"cluster": {"disk_gib": 300}},
        {"gce": {**LOGIN, "max_run_hours": 24}},
    ):
        assert names(**settings)[0] != group, settings


def test_quotas_and_price_are_those_of_nodes_that_stay(tmp_path: Path) -> None:
    found = flex(tmp_path, "a3-megagpu-8g")
    quotas = {each.metric: each.amount for each in found.quotas}
    assert quotas["PREEMPTIBLE_NVIDIA_H100_MEGA_GPUS"] == 16
    assert quotas["ACTIVE_RESIZE_REQUESTS"] == 1
    [nodes] = [each for each in flex(tmp_path, "a2-highgpu-8g").prices if each.pool]
    assert nodes.running and nodes.usd_per_hour is not None
    assert nodes.usd_per_hour.value == pytest.approx(2 * 16.16304)
    text = plan_text(found, (), "lab.yaml")
    assert "requests for machines" in text and "0 to 2" not in text


HOSTS = tuple(
    MadeHost(f"{GROUP}.nodes", f"team-{each}", "us-central1-b", "10.0.0.2", "", each, "")
    for each in ("a1", "b2")
)


def state_of(found: ClusterPlan) -> dict[str, StateResource]:
    attributes = {"name": only(found, GROUP)["name"], "zone": "us-central1-b"}
    return {
        f"{kind}.nodes": StateResource(f"{kind}.nodes", kind, attributes)
        for kind in (GROUP, REQUEST)
    }


def test_up_waits_and_says_what_it_waits_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drillyard.provision.node_request.PAUSE_SECONDS", 0.0)
    found, said = flex(tmp_path), list[str]()
    answers = iter(
        [
            *[NodeRequest("ACCEPTED", "no capacity", (), 0)] * 3,
            NodeRequest("SUCCEEDED", "", HOSTS[:1], 2),
            NodeRequest("SUCCEEDED", "", HOSTS, 2),
        ]
    )
    hosts = wait_for_nodes(
        found, state_of(found), lambda plan, group: next(answers), said.append, "the way back"
    )
    assert planned_hosts(found, hosts) == HOSTS
    # Once for each thing that there is to say.
    assert len(said) == 2 and all("the way back" in each for each in said)
    assert "ACCEPTED, 0 of 2 run (no capacity)" in said[0] and "1 of 2 run" in said[1]


@pytest.mark.parametrize("state", ["FAILED", "CANCELLED", ""])
def test_a_request_that_brings_no_nodes_is_an_error(state: str, tmp_path: Path) -> None:
    found = flex(tmp_path)
    request = NodeRequest(state, "QUOTA_EXCEEDED", (), 0)
    with pytest.raises(UserError, match="QUOTA_EXCEEDED"):
        wait_for_nodes(found, state_of(found), lambda *_: request, lambda text: None, "down")


@pytest.mark.parametrize(
    ("state", "nodes", "again"),
    [
        ("ACCEPTED", 0, False),
        ("CREATING", 0, False),
        ("SUCCEEDED", 2, False),
        # Google has deleted them after their time, or somebody one of them.
        ("SUCCEEDED", 0, True),
        ("SUCCEEDED", 1, True),
        ("FAILED", 0, True),
        ("CANCELLED", 0, True),
        ("", 0, True),
    ],
)
def test_a_request_that_brings_no_more_is_made_again_with_its_group(
    state: str, nodes: int, again: bool, tmp_path: Path
) -> None:
    found = flex(tmp_path)
    request = NodeRequest(state, "", (), nodes)
    made = spent_requests(found, lambda: state_of(found), lambda *_: request)
    assert made == ([f"{GROUP}.nodes", f"{REQUEST}.nodes"] if again else [])


def test_nodes_without_their_request_are_not_asked_for_twice(tmp_path: Path) -> None:
    found = flex(tmp_path)
    request = NodeRequest("", "", HOSTS, 2)
    with pytest.raises(UserError, match="Nothing was changed"):
        spent_requests(found, lambda: state_of(found), lambda *_: request)
