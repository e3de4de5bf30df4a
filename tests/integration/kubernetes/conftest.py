"""One cluster for all tests of Kubernetes that follow each other, and a team's namespace in it for
each module."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator
from pathlib import Path

import pytest
from tests.integration.kubernetes.cluster import Cluster, started
from tests.integration.kubernetes.team import Team

_CLUSTER = contextlib.ExitStack()
_running: list[Cluster] = []


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    """Two nodes, JobSet and Kueue. It needs root, for network and mount namespaces."""
    assert os.geteuid() == 0, "tests/integration/kubernetes makes namespaces, which needs root"
    if not _running:
        directory = tmp_path_factory.mktemp("cluster")
        _running.append(_CLUSTER.enter_context(started(directory)))
    return _running[0]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> Generator[None]:
    """End the cluster after the last of its tests in a row: an idle one takes 4 % of a core."""
    yield
    if nextitem is None or nextitem.path.parent != Path(__file__).parent:
        _running.clear()
        _CLUSTER.close()


@pytest.fixture(scope="module")
def team(
    cluster: Cluster, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Team:
    """A `restricted` namespace with a queue, a shared volume, and a user who may work in it
    alone."""
    name = Path(str(request.module.__file__)).stem.replace("_", "-")
    return Team(cluster, name, tmp_path_factory.mktemp(name))
