"""Digests of the images that prepare nodes: from the registry, the record and the config."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from tests.unit.provision.chart_plans import GKE, chart_values, plan

from drillyard.cli.main import main
from drillyard.errors import UnreachableError, UserError
from drillyard.provision.cluster_chart import images_of
from drillyard.provision.installer_images import (
    chosen_digests,
    given_digests,
    has_images,
    with_digests,
)

GIB = "us-docker.pkg.dev/gce-ai-infra/gpudirect-gib/nccl-plugin-gib:v1.1.1"
SHELL = "ubuntu:24.04"
OLD, NEW = f"sha256:{'a' * 64}", f"sha256:{'b' * 64}"
A4 = plan("a4-highgpu-8g", "spot")


def test_every_image_without_a_digest_gets_the_one_that_the_registry_names() -> None:
    said: list[str] = []
    chosen = chosen_digests(A4, {}, lambda image: NEW, said.append)
    assert chosen == {GIB: NEW, SHELL: NEW}
    assert said == [f"{GIB}: {NEW}", f"{SHELL}: {NEW}"]
    values = chart_values(with_digests(A4, chosen))
    assert [each["image"] for each in values["installers"]] == [f"{GIB}@{NEW}"]
    assert values["nodeImage"] == f"{SHELL}@{NEW}"
    assert given_digests(with_digests(A4, chosen)) == chosen


def test_an_image_that_has_a_digest_is_not_asked_for() -> None:
    found = plan("a3-highgpu-8g", "spot")
    injector = chart_values(found)["deviceInjector"]["image"]
    assert "@sha256:" in injector
    chosen = chosen_digests(found, {}, lambda image: NEW, lambda line: None)
    assert injector not in chosen and len(chosen) == 1  # tcpx prepares no node
    assert chart_values(with_digests(found, chosen))["deviceInjector"]["image"] == injector


@pytest.mark.parametrize("machine", ["g2-standard-48", "a2-highgpu-1g", "a4x-maxgpu-4g-metal"])
def test_a_cluster_that_prepares_no_node_asks_no_registry(machine: str) -> None:
    found = plan(machine, "reservation")
    assert not has_images(found) and list(images_of(chart_values(found))) == []


def test_a_recorded_digest_is_used_again_and_a_moved_tag_is_said_with_the_way_to_take_it() -> None:
    said: list[str] = []
    chosen = chosen_digests(A4, {GIB: OLD, SHELL: NEW}, lambda image: NEW, said.append)
    assert chosen == {GIB: OLD, SHELL: NEW}
    (line,) = said
    assert line.startswith("warning") and OLD in line
    assert f"cluster.images=[{GIB}@{NEW}]" in line


def test_without_the_registry_a_recorded_digest_is_used_and_said() -> None:
    def refuse(image: str) -> str:
        raise UnreachableError("no route")

    said: list[str] = []
    assert chosen_digests(A4, {GIB: OLD, SHELL: OLD}, refuse, said.append)[GIB] == OLD
    assert len(said) == 2 and all("no route" in each and OLD in each for each in said)


def test_without_record_and_registry_one_error_names_each_image_and_the_option_that_works(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(image: str) -> str:
        raise UnreachableError(f"{image} no route")

    with pytest.raises(UserError) as refused:
        chosen_digests(A4, {}, refuse, lambda line: None)
    text = str(refused.value).replace("sha256:DIGEST", NEW)
    assert f"{GIB} no route" in text and f"{SHELL} no route" in text
    found = re.search(r"(--set .*?\]'), or (images: .*?) in the section cluster", text)
    assert found is not None
    option, key = found.groups()
    config = GKE.format(machine="a4-highgpu-8g", consumption="spot")
    by_option, by_key = tmp_path / "option.yaml", tmp_path / "key.yaml"
    by_option.write_text(config)
    by_key.write_text(f"{config}cluster:\n  {key}\n")
    for path, options in ((by_option, shlex.split(option)), (by_key, [])):
        with pytest.raises(SystemExit) as ended:
            main(["cluster", "plan", str(path), "--json", *options])
        assert ended.value.code in (0, None)
        releases = json.loads(capsys.readouterr().out)["releases"]
        (values,) = [each["values"] for each in releases if each["name"] == "drillyard-cluster"]
        assert list(images_of(values)) == [f"{GIB}@{NEW}", f"{SHELL}@{NEW}"]


@pytest.mark.parametrize(
    ("images", "said"),
    [
        (f"[{GIB.replace('1.1.1', '1.0')}@{NEW}]", rf"no DaemonSet .*: {re.escape(GIB)}, {SHELL}"),
        (f"[{GIB}@{NEW}, {GIB}@{OLD}]", "two digests"),
        (f"[{GIB}]", "images"),
        (f"['{GIB}@sha256:abc']", "images"),
    ],
)
def test_a_digest_that_is_not_one_or_of_nothing_is_refused(images: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        plan("a4-highgpu-8g", "spot", f"cluster: {{images: {images}}}")
