"""The address book of clusters, and the names that completion knows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.unit.launch.requests import cluster, planned, request

from drillyard.launch import submission
from drillyard.launch.cluster_registry import clusters_directory, known_clusters, remember_cluster
from drillyard.launch.completion_cache import remember_run, remember_runs, remembered_runs
from drillyard.launch.plan import Plan
from drillyard.launch.run_status import Handle


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_a_cluster_that_is_remembered_is_known_with_the_same_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = request(cluster(environment="{TOKEN: '${env:MY_TOKEN}'}")).cluster

    remember_cluster(config)
    monkeypatch.setenv("MY_TOKEN", "secret")

    (known,), unreadable = known_clusters()
    assert known == config and unreadable == {}
    text = (clusters_directory() / "c.yaml").read_text()
    assert "${env:MY_TOKEN}" in text and "secret" not in text


def test_what_was_remembered_is_taken_back() -> None:
    undo = remember_cluster(request(cluster(nodes=2)).cluster)
    undo_the_second = remember_cluster(request(cluster(nodes=4)).cluster)
    undo_the_second()
    assert [known.nodes for known in known_clusters()[0]] == [2]
    undo()
    assert known_clusters() == ([], {})


@pytest.mark.parametrize("first", [None, 1])
def test_what_another_launch_has_remembered_since_is_not_taken_back(first: int | None) -> None:
    if first is not None:
        remember_cluster(request(cluster(nodes=first)).cluster)
    undo = remember_cluster(request(cluster(nodes=2)).cluster)
    remember_cluster(request(cluster(nodes=4)).cluster)
    undo()
    assert [known.nodes for known in known_clusters()[0]] == [4]


def test_a_run_that_is_submitted_is_found_although_another_launch_took_its_cluster_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = request(cluster())
    undo = remember_cluster(asked.cluster)

    def submitted(_: object, plan: Plan, **__: Any) -> Handle:
        # The other launch of the config is refused meanwhile.
        undo()
        return plan.handle

    monkeypatch.setattr(submission, "submit", submitted)
    plans = [planned(asked)]
    assert list(submission.submit_plans(asked.cluster, plans)) == [plans[0].handle]
    assert [known.name for known in known_clusters()[0]] == ["c"]


def test_a_later_config_of_the_name_takes_the_place_of_the_earlier() -> None:
    remember_cluster(request(cluster(nodes=2)).cluster)
    remember_cluster(request(cluster(nodes=4)).cluster)

    assert [known.nodes for known in known_clusters()[0]] == [4]


def test_a_later_config_of_the_name_in_another_place_is_noticed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    remember_cluster(request(cluster(nodes=2)).cluster)
    remember_cluster(request(cluster(nodes=4)).cluster)
    assert capsys.readouterr().err == ""

    remember_cluster(request(cluster(slurm="{login_host: login.b}")).cluster)

    assert "c: was slurm until now and is slurm, login.b" in capsys.readouterr().err


def test_an_address_book_that_cannot_be_written_keeps_nobody_from_launching(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config").write_text("a file where a directory should be")

    remember_cluster(request(cluster()).cluster)

    assert "will need --cluster FILE" in capsys.readouterr().err


def test_a_new_run_comes_first_and_others_stay() -> None:
    old, new, other = (
        Handle("slurm", name, run) for name, run in (("a", "old"), ("a", "new"), ("b", "other"))
    )
    remember_runs("a", [old])
    remember_runs("b", [other])

    remember_run(new)
    remember_run(new)

    assert remembered_runs() == [new, old, other]


def test_completion_without_a_cache_knows_nothing(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where a directory should be")

    remember_runs("a", [Handle("slurm", "a", "run")])

    assert remembered_runs() == []
