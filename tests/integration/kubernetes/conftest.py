"""One cluster for all tests of Kubernetes, and a team's namespace in it for each module."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration.kubernetes.cluster import Cluster, started
from tests.integration.kubernetes.team import Team


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two nodes, JobSet and Kueue. It needs root, for network and mount namespaces."""
    assert os.geteuid() == 0, "tests/integration/kubernetes makes namespaces, which needs root"
    with started(tmp_path_factory.mktemp("cluster")) as made:
        yield made


@pytest.fixture(scope="module")
def team(
    cluster: Cluster, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Team:
    """A `restricted` namespace with a queue, a shared volume, and a user who may work in it
    alone."""
    name = Path(str(request.module.__file__)).stem.replace("_", "-")
    return Team(cluster, name, tmp_path_factory.mktemp(name))
