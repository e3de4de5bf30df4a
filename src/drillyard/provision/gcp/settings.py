"""What every part of a cluster's rendering needs to know of its config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from drillyard.config.cluster import ClusterConfig
from drillyard.config.creation import CreationConfig
from drillyard.hardware.capacity import region_of
from drillyard.hardware.catalog import Catalog
from drillyard.provision.cluster_plan import CLUSTER_LABEL


@dataclass(frozen=True)
class GoogleSettings:
    """A config with its defaults: `creation` where the file has no section `cluster`, and the
    labels of everything."""

    cluster: ClusterConfig
    creation: CreationConfig
    facts: Catalog

    @property
    def name(self) -> str:
        return self.cluster.name

    @property
    def project(self) -> str:
        assert self.cluster.location is not None and self.cluster.location.project is not None
        return self.cluster.location.project

    @property
    def region(self) -> str:
        found = region_of(self.cluster)
        assert found is not None
        return found

    @property
    def labels(self) -> Mapping[str, str]:
        return {CLUSTER_LABEL: self.name, **self.creation.labels}


def read_settings(cluster: ClusterConfig, facts: Catalog) -> GoogleSettings:
    """The settings of a config that has a project, and a region or a zone."""
    return GoogleSettings(cluster, cluster.cluster or CreationConfig(), facts)
