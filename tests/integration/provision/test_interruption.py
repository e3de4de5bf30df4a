"""Commands that are killed, stopped, refused or fail at any step, and what the next one does.

The whole of the steps is `benchmarks/provision_kills.py`.
"""

from __future__ import annotations

import json
import random
import signal
import time

import pytest
from tests.integration.provision.fake_cloud import Fault
from tests.integration.provision.interruption import Steps, kill_and_wait, require_no_process
from tests.integration.provision.project import STATE, Project, until

NETWORK = "google_compute_network"
LOCK = "c/default.tflock"


@pytest.mark.parametrize("seed", range(2))
def test_killed_at_any_step_up_ends_in_the_same_state_and_down_in_nothing(
    project: Project, seed: int
) -> None:
    # Long enough that a kill comes while several things are being made.
    project.cloud.seconds = 0.02
    steps = Steps(project)
    draw = random.Random(seed)
    assert steps.run("up", kill_at=draw.randrange(12, 30)) == -signal.SIGKILL
    assert steps.run("up") == 0, steps.errors
    project.require_whole()
    assert steps.run("down", kill_at=draw.randrange(6, 20)) == -signal.SIGKILL
    assert steps.run("down") == 0, steps.errors
    project.require_nothing()


def test_what_a_killed_up_has_made_is_removed_by_down(project: Project) -> None:
    project.cloud.faults["create google_container_cluster"] = Fault("", None, hang_seconds=60)
    command = project.start("up", "--yes")
    until(lambda: "create google_container_cluster c" in project.cloud.log, "no cluster is made")
    kill_and_wait(project, command)
    # Terraform saves its state only now and then: it knows of nothing that was made.
    assert project.state == [] and project.cloud.objects
    project.down()
    project.require_nothing()


def test_what_fails_once_is_made_by_the_next_up(project: Project) -> None:
    stockout = "Error 503: The zone does not have enough resources available, GCE_STOCKOUT"
    kinds = {each.kind for each in project.plan.made_by_terraform}
    project.cloud.faults = {f"create {kind}": Fault(stockout, times=1) for kind in kinds}
    failures = 0
    while (ended := project.run("up", "--yes")).returncode:
        failures += 1
        assert ended.returncode == 2 and "GCE_STOCKOUT" in ended.stderr, ended.stderr
        assert failures <= len(kinds)
    assert all(fault.times == 0 for fault in project.cloud.faults.values())
    project.require_whole()


def test_ctrl_c_saves_the_state_and_says_how_to_go_on(project: Project) -> None:
    project.cloud.seconds = 1.0
    command = project.start("up", "--yes")
    until(lambda: f"create {NETWORK} c" in project.cloud.log, "nothing is made")
    command.send_signal(signal.SIGINT)
    _, errors = command.communicate(timeout=60)
    assert command.returncode == 130
    assert f"drillyard cluster up {project.config}" in errors
    assert f"drillyard cluster down {project.config}" in errors
    assert project.store.names(STATE) == ["c/default.tfstate"]
    assert f"{NETWORK}.system" in project.state
    project.cloud.seconds = 0.0
    project.up()
    project.require_whole()


def test_of_two_at_once_one_works_and_the_other_is_refused_with_its_name(project: Project) -> None:
    project.cloud.seconds = 1.0
    first = project.start("up", "--yes")
    until(lambda: len(project.cloud.log) > 0, "nothing is made")
    second = project.run("up", "--yes")
    assert second.returncode == 2
    assert f"process {first.pid}" in second.stderr and "--unlock" in second.stderr
    _, errors = first.communicate(timeout=120)
    assert first.returncode == 0, errors
    project.require_whole()


def test_the_lock_of_a_dead_process_is_released_after_yes_and_anothers_by_its_id(
    project: Project,
) -> None:
    project.cloud.faults[f"create {NETWORK}"] = Fault("", 1, hang_seconds=60)
    command = project.start("up", "--yes")
    until(lambda: len(project.cloud.log) > 0, "nothing is made")
    kill_and_wait(project, command)
    project.cloud.faults.clear()
    assert LOCK in project.store.names(STATE)

    lock = project.store.text(STATE, LOCK)
    elsewhere = json.loads(lock)
    elsewhere["Info"] = json.dumps({**json.loads(elsewhere["Info"]), "machine": "another boot"})
    held = project.store.put(STATE, LOCK, json.dumps(elsewhere).encode())
    refused = project.run("up", "--yes")
    assert refused.returncode == 2
    assert f"up {project.config} --unlock {held.generation}" in refused.stderr
    assert f"process {command.pid}" in refused.stderr

    project.store.put(STATE, LOCK, lock.encode())
    project.up()
    project.require_whole()

    by_hand = {"ID": "x", "Operation": "OperationTypeApply", "Who": "me@host", "Created": "today"}
    held = project.store.put(STATE, LOCK, json.dumps(by_hand).encode())
    refused = project.run("down", "--yes")
    assert refused.returncode == 2 and "me@host" in refused.stderr
    project.down("--unlock", str(held.generation))
    project.require_nothing()


def test_a_bucket_that_takes_no_state_ends_terraform_and_loses_nothing(project: Project) -> None:
    def hang(method: str, path: str) -> None:
        made = len(project.cloud.objects) == sum(project.wanted.values())
        if made and method == "POST" and path.startswith("/upload"):
            time.sleep(60)

    project.store.on_request = hang
    project.stages(limits={"silent": 3.0, "kill": 1.0})
    begun = time.monotonic()
    ended = project.run("up", "--yes")
    assert ended.returncode == 2 and "no output for 3 s" in ended.stderr
    assert time.monotonic() - begun < 60
    require_no_process(project)
    project.store.on_request = lambda method, path: None
    project.stages(limits={})
    project.up()
    project.require_whole()


def test_something_of_the_same_name_is_not_taken(project: Project) -> None:
    project.cloud.faults["create google_compute_subnetwork"] = Fault("", 1, hang_seconds=60)
    command = project.start("up", "--yes")
    until(lambda: any("subnetwork" in each for each in project.cloud.log), "no subnet is made")
    kill_and_wait(project, command)
    project.cloud.objects[NETWORK, "c"]["description"] = "of another team"
    for verb in ("up", "down"):
        refused = project.run(verb, "--yes")
        assert refused.returncode == 2
        assert f"{NETWORK}.system" in refused.stderr and "is not this cluster's" in refused.stderr
        assert (NETWORK, "c") in project.cloud.objects
        assert f"{NETWORK}.system" not in project.state
