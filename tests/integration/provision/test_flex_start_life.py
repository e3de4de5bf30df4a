"""The life of virtual machines of flex-start over the real Terraform: a request that waits, Ctrl-C,
nodes that are granted, that go after their time, and a `down` while the request waits."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from typing import Any

import pytest
import yaml
from tests.integration.provision.project import TIMEOUT_SECONDS, Project, until

GROUP, REQUEST = "google_compute_instance_group_manager", "google_compute_resize_request"
SETTINGS: dict[str, Any] = {
    "platform": "gce",
    "machine": "a2-highgpu-8g",
    "consumption": "flex-start",
    "image": None,
    "gce": {"os_login": True, "user": "root"},
}


@pytest.fixture
def project(make_project: Callable[..., Project]) -> Project:
    made = make_project(**SETTINGS)
    tunnel = made.directory / "bin/gcloud"
    tunnel.write_text("#!/bin/sh\nexit 1\n")
    tunnel.chmod(0o700)
    # None can be changed in place.
    template = "google_compute_region_instance_template"
    for kind, name in (
        (REQUEST, "name"),
        (REQUEST, "resize_by"),
        (GROUP, "name"),
        (template, "name"),
    ):
        made.cloud.replaced_by.add((kind, name))
    return made


def answer(project: Project, **request: Any) -> None:
    """What the request is from now on, also for a command that waits already."""
    project.stages(request=request)
    file = project.directory / "stages.json"
    settings = json.loads(file.read_text()) if file.exists() else {}
    # In one step: the waiting command reads it all the time.
    new = file.with_suffix(".new")
    new.write_text(json.dumps({**settings, "request": request}))
    new.replace(file)


def test_a_request_waits_is_granted_is_spent_and_is_cancelled(project: Project) -> None:
    answer(project, state="ACCEPTED", why="no capacity yet")
    waiting = project.start("up", "--yes")
    until(lambda: project.cloud.kinds()[REQUEST] == 1, "no request is made")
    assert waiting.stderr is not None
    lines = iter(waiting.stderr.readline, "")
    assert any("waiting for 2 x a2-highgpu-8g: ACCEPTED" in line for line in lines)
    # The lock is free while it waits: another command says what there is.
    names = project.store.names(project.state_bucket)
    assert not [each for each in names if each.endswith(".tflock")]
    waiting.send_signal(signal.SIGINT)
    _, err = waiting.communicate(timeout=TIMEOUT_SECONDS)
    assert waiting.returncode == 130 and "drillyard cluster down" in err
    project.require_whole()

    # A further `up` waits for the same request, until all nodes run.
    again = project.start("up", "--yes")
    assert again.stderr is not None
    assert any("no capacity yet" in line for line in iter(again.stderr.readline, ""))
    answer(project, state="SUCCEEDED", hosts=1)
    assert any("1 of 2 run" in line for line in iter(again.stderr.readline, ""))
    answer(project, state="SUCCEEDED", hosts=2)
    out, err = again.communicate(timeout=TIMEOUT_SECONDS)
    assert again.returncode == 0, err
    made = yaml.safe_load(out)
    (group,) = (each.name for each in project.plan.resources if each.kind == GROUP)
    assert made["ssh"]["hosts"] == [f"{group}-0", f"{group}-1"]
    assert sum(line == f"create {REQUEST} {group}" for line in project.cloud.log) == 1

    # Labels reach the template alone; the nodes stay.
    project.write(**SETTINGS, cluster={"labels": {"team": "a"}})
    changed = len(project.cloud.log)
    project.up()
    project.require_whole()
    assert not [line for line in project.cloud.log[changed:] if REQUEST in line]
    # Other nodes are another group, which runs keep from coming.
    project.stages(runs=["long of c on c-1"])
    project.write(**SETTINGS, nodes=3, cluster={"labels": {"team": "a"}})
    refused = project.run("up", "--yes")
    assert refused.returncode == 2 and "long of c on c-1" in refused.stderr
    project.stages(runs=[])
    project.write(**SETTINGS, cluster={"labels": {"team": "a"}})

    # After their time Google deletes the nodes: `up` asks again, with another group.
    answer(project, state="SUCCEEDED", hosts=0)
    changed = len(project.cloud.log)
    waiting = project.start("up", "--yes")
    until(lambda: f"create {REQUEST} {group}" in project.cloud.log[changed:], "nothing is asked")
    answer(project, state="FAILED", why="QUOTA_EXCEEDED")
    _, err = waiting.communicate(timeout=TIMEOUT_SECONDS)
    assert waiting.returncode == 2 and "QUOTA_EXCEEDED" in err
    order = [line for line in project.cloud.log[changed:] if group in line]
    assert order == [
        *(f"delete {REQUEST} {group}", f"delete {GROUP} {group}"),
        *(f"create {GROUP} {group}", f"create {REQUEST} {group}"),
    ]

    # While it waits, `down` asks no host, and removes the request first.
    answer(project, state="ACCEPTED", hosts=0)
    changed = len(project.cloud.log)
    project.stages(unreachable=True)
    project.down()
    gone = [line for line in project.cloud.log[changed:] if line.startswith("delete")]
    assert gone.index(f"delete {REQUEST} {group}") < gone.index(f"delete {GROUP} {group}")
    project.require_nothing()
