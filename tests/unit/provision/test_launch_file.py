"""The user's cluster config with the settings that it lacks."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from drillyard.provision.launch_file import with_settings

SETTINGS: dict[str, Any] = {
    "kubernetes": {"queue": "q", "namespace": "runs", "mounts": ["/a:/b"]},
    "image": "registry/image:1",
}
TEXTS = (
    "name: c\n",
    "name: c",
    "# first\nname: c  # of the cluster\nnodes: 2  # two\n# last\n",
    "name: c\nkubernetes:\n  queue: own  # mine\nnodes: 2\n",
    "name: c\nkubernetes:\n    queue: own\n    # deep\n    labels:\n        a: b  # c\n",
    "name: c\nkubernetes: {queue: own}  # short\n",
    "name: c\nkubernetes: {}\n",
    "{name: c, nodes: 2}\n",
    "name: c\nnote: |\n  two\n  lines\n",
    "name: c\nkubernetes: {queue: own, namespace: n, mounts: []}\nimage: other\n",
)


@pytest.mark.parametrize("text", TEXTS)
def test_missing_settings_are_added_and_nothing_else_changes(text: str) -> None:
    before = yaml.safe_load(text)
    made = with_settings(text, SETTINGS)
    expected = {**SETTINGS, **before}
    expected["kubernetes"] = {**SETTINGS["kubernetes"], **before.get("kubernetes", {})}
    assert yaml.safe_load(made) == expected
    for comment in [line.partition("#")[2] for line in text.splitlines() if "#" in line]:
        assert comment in made
    assert with_settings(made, SETTINGS) == made


def test_a_complete_file_stays_as_it_is() -> None:
    assert with_settings(TEXTS[-1], SETTINGS) == TEXTS[-1]
    assert with_settings("name: c\n", {}) == "name: c\n"
