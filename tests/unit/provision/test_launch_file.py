"""The user's cluster config with what `--set` gave and the settings that it lacks."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.unit.provision.clusters import config

from drillyard.config.load import apply_overrides, load_cluster_config
from drillyard.config.yaml_document import parse_document
from drillyard.provision.launch_file import launch_values, with_values
from drillyard.provision.provisioner import plan_cluster
from drillyard.provision.up import MadeCluster, launch_config, write_launch_config

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
    "name: c\nkubernetes:  # none\nnodes: 2\n",
    "{name: c, nodes: 2}\n",
    "{name: c, image: other}\n",
    "name: c\nnote: |\n  two\n  lines\n",
    "name: c\nkubernetes: {queue: own, namespace: n, mounts: []}\nimage: other\n",
)


@pytest.mark.parametrize("text", TEXTS)
def test_missing_settings_are_added_and_nothing_else_changes(text: str) -> None:
    before = yaml.safe_load(text)
    made = completed(text)
    expected = {**SETTINGS, **before}
    expected["kubernetes"] = {**SETTINGS["kubernetes"], **(before.get("kubernetes") or {})}
    assert yaml.safe_load(made) == expected
    for comment in [line.partition("#")[2] for line in text.splitlines() if "#" in line]:
        assert comment in made
    assert completed(made) == made


def completed(text: str, *overrides: str) -> str:
    document = parse_document(text, "c.yaml")
    made = with_values(text, launch_values(document, overrides, SETTINGS))
    assert made is not None
    return made


def test_a_complete_file_stays_as_it_is() -> None:
    assert completed(TEXTS[-1]) == TEXTS[-1]
    assert with_values("name: c\n", {"name": "c"}) == "name: c\n"


FILE = """\
# the team's
name: c  # of the team
nodes: 2   # both
cluster:
  pools:
    # cheap
    - {name: spare, consumption: spot, nodes: 4}  # spare
    - name: more
      consumption: on-demand
      nodes: 3   # three
  labels:
    team: a
note: |
  two
  lines
mounts: [/a, /b]  # data
"""


@pytest.mark.parametrize(
    "overrides",
    [
        ["nodes=16"],
        ["nodes=null"],
        ["cluster.pools.0.nodes=8", "cluster.pools.1.nodes=9"],
        ["cluster.pools.1={name: x, nodes: 1}"],
        ["cluster.pools=[]", "mounts=[]"],
        ["cluster.labels={}", "cluster.labels.cost=12:00"],
        ["cluster.labels.team='1e3'", 'name="a: b, #c"'],
        ["note=one", "mounts.1=/c", "machine=a4-highgpu-8g"],
        ["storage.bucket=runs", "kubernetes.queue=own"],
        ["kubernetes=null", "kubernetes.namespace=null"],
        ["cluster.cpu_pool.nodes=2", "cluster.labels.new=x"],
    ],
)
def test_overrides_are_in_the_file_with_its_other_text(overrides: list[str]) -> None:
    document = parse_document(FILE, "c.yaml")
    expected = apply_overrides(document, overrides).value
    made = completed(FILE, *overrides)
    found = parse_document(made, "made").value
    given = expected.get("kubernetes") or {}
    assert found["kubernetes"] == {**SETTINGS["kubernetes"], **given}
    assert {**found, "kubernetes": None, "image": None} == {
        **expected,
        "kubernetes": None,
        "image": None,
    }
    assert "# the team's" in made
    for line in FILE.splitlines():
        comment = line.partition("#")[2]
        value = line.partition("#")[0].strip()
        if comment and value and value in made:
            assert f"#{comment}" in made


@pytest.mark.parametrize(
    ("text", "override"),
    [
        ("name: &a c\nimage: *a\n", "image=b"),
        ("name: &a c\nimage: *a\n", "name=b"),
        ("one: &a {x: 1}\nname: c\ntwo: *a\n", "two.x=2"),
    ],
)
def test_what_an_alias_shares_is_not_changed_in_place(text: str, override: str) -> None:
    values = launch_values(parse_document(text, "c.yaml"), [override], SETTINGS)
    made = with_values(text, values)
    assert made is None or parse_document(made, "made").value == values


def test_a_merged_section_is_overridden_where_it_is_merged() -> None:
    text = "base: &a {x: 1, y: 2}\nname: c\ntwo:\n  <<: *a\n  z: 3\n"
    made = completed(text, "two.x=5")
    found = parse_document(made, "made").value
    assert found["two"] == {"x": 5, "y": 2, "z": 3} and found["base"] == {"x": 1, "y": 2}
    assert "<<: *a" in made


def test_the_printed_and_the_written_file_launch_what_up_made(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("# mine\n" + yaml.safe_dump(config()), encoding="utf-8")
    overrides = ["name=other", "nodes=7", "consumption=on-demand", "machine=a3-highgpu-8g"]
    made = load_cluster_config(path, overrides)
    found = launch_config(path, plan_cluster(made), MadeCluster("x", {}), overrides)
    assert found.in_place and write_launch_config(path, found)
    again = load_cluster_config(path)
    assert (again.name, again.nodes, again.machine) == ("other", 7, "a3-highgpu-8g")
    assert plan_cluster(again) == plan_cluster(made)
    assert path.read_text("utf-8").startswith("# mine\n")


def test_the_written_file_keeps_its_permissions_also_behind_a_link(tmp_path: Path) -> None:
    place, link = tmp_path / "place.yaml", tmp_path / "c.yaml"
    place.write_text(yaml.safe_dump(config()), encoding="utf-8")
    place.chmod(0o664)
    link.symlink_to(place)
    found = launch_config(link, plan_cluster(load_cluster_config(link)), MadeCluster("x", {}))
    assert write_launch_config(link, found)
    assert link.is_symlink() and place.read_text("utf-8") == found.text
    assert stat.S_IMODE(place.stat().st_mode) == 0o664
    assert sorted(each.name for each in tmp_path.iterdir()) == ["c.yaml", "place.yaml"]


def test_a_file_that_would_lose_its_comments_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    text = yaml.safe_dump(config()).replace("image: ", "image: &i ")
    path.write_text(f"# mine\n{text}python: *i\n", encoding="utf-8")
    before = path.read_bytes()
    plan = plan_cluster(load_cluster_config(path))
    found = launch_config(path, plan, MadeCluster("x", {}), ["image=other"])
    assert not found.in_place and not write_launch_config(path, found)
    assert path.read_bytes() == before
    assert yaml.safe_load(found.text)["image"] == "other"
