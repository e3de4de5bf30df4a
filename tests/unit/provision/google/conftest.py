"""A project of Google Cloud on loopback, and the real client for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.unit.provision.google.google_cloud import PROJECT, GoogleCloud, LocalServer

from drillyard.config.load import load_cluster_config
from drillyard.provision.cluster_plan import ClusterPlan
from drillyard.provision.google import api
from drillyard.provision.google.api import GoogleApis, google_apis
from drillyard.provision.provisioner import plan_cluster

CLUSTER = f"""\
name: train
platform: gke
location: {{project: {PROJECT}, region: us-central1, zone: us-central1-b}}
machine: a3-highgpu-8g
nodes: 2
consumption: on-demand
image: us-docker.pkg.dev/{PROJECT}/train/drillyard:1
"""


@pytest.fixture(scope="session")
def local_server() -> Iterator[LocalServer]:
    server = LocalServer()
    yield server
    server.stop()


@pytest.fixture
def cloud(local_server: LocalServer, monkeypatch: pytest.MonkeyPatch) -> GoogleCloud:
    monkeypatch.setattr(api, "FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(api, "RETRY_SECONDS", 2.0)
    monkeypatch.setenv("DRILLYARD_GOOGLE_ENDPOINT", local_server.address)
    monkeypatch.delenv("STORAGE_EMULATOR_HOST", raising=False)
    made = GoogleCloud()
    local_server.serve(made)
    return made


@pytest.fixture
def apis(cloud: GoogleCloud) -> GoogleApis:
    return google_apis(PROJECT)


@pytest.fixture
def plan(tmp_path: Path) -> ClusterPlan:
    file = tmp_path / "cluster.yaml"
    file.write_text(CLUSTER)
    return plan_cluster(load_cluster_config(file))
