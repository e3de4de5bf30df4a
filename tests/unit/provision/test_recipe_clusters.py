"""Every recipe for GKE names all that `drillyard cluster` needs to create its cluster."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.provision.provider_schema import document_problems

from drillyard.config.load import load_cluster_config
from drillyard.provision.provisioner import plan_cluster

ROOT = Path(__file__).parents[3]
CLUSTERS = [
    path
    for path in sorted((ROOT / "recipes").glob("*/cluster*.yaml"))
    if "platform: gke" in path.read_text("utf-8")
]


@pytest.mark.parametrize("path", CLUSTERS, ids=lambda path: path.parent.name)
def test_the_cluster_of_a_recipe_can_be_planned(path):
    found = plan_cluster(load_cluster_config(path, resolve_environment=False))
    assert not document_problems(found.terraform, "7.45.0")


def test_there_are_recipes_for_gke():
    assert len(CLUSTERS) >= 3
