"""A cluster config's machine against the catalog: known, and sold in the way that is asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from drillyard.config import load_cluster_config
from drillyard.config.cluster import ClusterConfig
from drillyard.errors import UserError
from drillyard.hardware import catalog, load_catalog
from drillyard.hardware.capacity import consumption_problem, machine_of

GCE = "name: g\nplatform: gce\nlocation: {project: p, zone: z}\nmachine: a4-highgpu-8g\nconsumption: spot\n"


def load(directory: Path, text: str) -> ClusterConfig:
    path = directory / "cluster.yaml"
    path.write_text(text)
    return load_cluster_config(path)


def test_a_machine_that_is_sold_so_is_found(tmp_path: Path) -> None:
    assert machine_of(load(tmp_path, GCE), catalog()) is catalog().machine("a4-highgpu-8g")


def test_a_way_of_buying_that_there_is_not_is_told_at_its_line_with_those_that_there_are(tmp_path: Path) -> None:
    with pytest.raises(UserError) as told:
        machine_of(load(tmp_path, GCE.replace("spot", "on-demand")), catalog())
    assert str(told.value) == (
        f"{tmp_path / 'cluster.yaml'}:5: consumption: a4-highgpu-8g cannot be had by 'on-demand'; it can by "
        "reservation, spot, flex-start, flex-start-queued, calendar"
    )


def test_an_unknown_machine_is_told_at_its_line_with_the_nearest_and_how_to_give_ones_own(tmp_path: Path) -> None:
    with pytest.raises(UserError) as told:
        machine_of(load(tmp_path, GCE.replace("a4-highgpu-8g", "a4-higpu-8g")), catalog())
    first, second = str(told.value).splitlines()
    assert first.startswith(
        f"{tmp_path / 'cluster.yaml'}:4: machine: machine 'a4-higpu-8g' is not known; did you mean a4"
    )
    assert "--hardware FILE" in second


def test_a_cluster_without_a_machine_is_told_what_to_do() -> None:
    with pytest.raises(UserError, match=r"machine: missing: .*--machine"):
        machine_of(ClusterConfig(name="s", platform="slurm"), catalog())


def test_ones_own_machine_may_be_had_in_any_way(tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text("machines: [{name: mine, accelerator: h100, num_accelerators: 8, network_stack: infiniband}]\n")
    assert consumption_problem("spot", load_catalog(own).machine("mine")) is None
    assert consumption_problem(None, catalog().machine("a4-highgpu-8g")) is None


def test_machines_of_ones_own_have_a_machine_and_a_hardware_file_that_any_copy_of_the_config_finds(
    tmp_path: Path,
) -> None:
    text = "name: s\nplatform: ssh\nssh: {hosts: [a]}\nmachine: mine\nhardware: facts/own.yaml\n"
    (tmp_path / "facts").mkdir()
    own = tmp_path / "facts" / "own.yaml"
    own.write_text("machines: [{name: mine, accelerator: h100, num_accelerators: 8, network_stack: infiniband}]\n")
    cluster = load(tmp_path, text)
    assert cluster.hardware == str(own)
    assert machine_of(cluster, load_catalog(cluster.hardware)).name == "mine"
