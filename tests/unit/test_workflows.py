"""The workflows of GitHub: actions by commit, least rights, limits; tags of the image."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def workflow(name: str) -> Any:
    return yaml.load((ROOT / ".github/workflows" / name).read_text("utf-8"), yaml.BaseLoader)


def actions(document: Any) -> Iterator[str]:
    for job in document["jobs"].values():
        yield from filter(None, [job.get("uses")])
        yield from filter(None, (step.get("uses") for step in job.get("steps", ())))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_pinned_by_commit_and_jobs_have_limits(path: Path) -> None:
    document = workflow(path.name)
    for action in actions(document):
        assert action.startswith("./.github/workflows/") or re.search("@[0-9a-f]{40}$", action)
    for job in document["jobs"].values():
        assert "uses" in job or int(job["timeout-minutes"]) <= 90
        for step in job.get("steps", ()):
            # What a person can choose, such as the name of a branch, is no part of a script.
            assert "${{" not in step.get("run", "")
            if "actions/checkout" in step.get("uses", ""):
                assert step["with"]["persist-credentials"] == "false"


def test_each_job_has_the_rights_that_it_needs_and_no_others() -> None:
    document = workflow("ci.yml")
    assert document["permissions"] == {}
    assert {name: job["permissions"] for name, job in document["jobs"].items()} == {
        "lint-and-test": {"contents": "read"},
        "try-image": {"contents": "read"},
        "image": {"contents": "read", "packages": "write"},
        "release": {"contents": "write"},
    }
    assert "permissions" not in workflow("image.yml")["jobs"]["image"]


def test_what_starts_the_workflow_and_what_it_waits_for() -> None:
    document = workflow("ci.yml")
    assert document["on"] == {
        "push": {"branches": ["main", "develop"], "tags": ["v*"]},
        "pull_request": {"branches": ["main"]},
    }
    jobs = document["jobs"]
    assert jobs["try-image"]["needs"] == jobs["image"]["needs"] == "lint-and-test"
    assert jobs["release"]["needs"] == "image"
    assert "with" not in jobs["try-image"]
    assert jobs["image"]["with"] == {"push": "true"}
    assert document["concurrency"]["cancel-in-progress"] == (
        "${{ github.event_name == 'pull_request' }}"
    )


@pytest.mark.parametrize(
    ("ref", "kind", "more"),
    [
        ("refs/heads/main", "branch", ["latest"]),
        ("refs/tags/v1.2.3", "tag", ["v1.2.3"]),
        ("refs/heads/develop", "branch", []),
    ],
)
def test_the_image_is_pushed_with_its_tags(
    tmp_path: Path, ref: str, kind: str, more: list[str]
) -> None:
    steps = workflow("image.yml")["jobs"]["image"]["steps"]
    script = next(step["run"] for step in steps if step.get("id") == "push")
    image, digest = "ghcr.io/me/it:sha-0123456789ab", f"sha256:{'a' * 64}"
    for path in (tmp_path / "bin/docker", tmp_path / "drillyard/bin/drillyard"):
        path.parent.mkdir(parents=True)
        path.write_text(
            f'#!/bin/sh\necho "$*" >>{tmp_path}/calls\n'
            f'[ "$1" != image ] || echo image: ghcr.io/me/it@{digest}\n'
        )
        path.chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}/bin:{os.environ['PATH']}",
        "RUNNER_TEMP": str(tmp_path),
        "GITHUB_OUTPUT": str(tmp_path / "output"),
        "GITHUB_ACTOR": "me",
        "GITHUB_REF": ref,
        "GITHUB_REF_TYPE": kind,
        "GITHUB_REF_NAME": ref.rpartition("/")[2],
        "IMAGE": image,
        "TOKEN": "x",
    }
    subprocess.run(["bash", "-eo", "pipefail", "-c", script], check=True, env=environment)
    calls = (tmp_path / "calls").read_text().splitlines()
    names = [image, *(f"ghcr.io/me/it:{tag}" for tag in more)]
    assert [call for call in calls if call.startswith("image push")] == [
        f"image push --builder docker --tag {name}" for name in names
    ]
    assert (calls[0][:5], calls[-1]) == ("login", "logout ghcr.io")
    assert (tmp_path / "output").read_text() == f"image=ghcr.io/me/it@{digest}\n"
