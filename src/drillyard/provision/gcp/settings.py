"""What every part of a cluster's rendering needs to know of its config."""

from __future__ import annotations

from dataclasses import dataclass

from drillyard.config.cluster import ClusterConfig
from drillyard.hardware.capacity import region_of
from drillyard.hardware.catalog import Catalog
from drillyard.provision.creation_settings import CreationSettings


@dataclass(frozen=True)
class GoogleSettings(CreationSettings):
    """A config that has a region or a zone, too."""

    @property
    def region(self) -> str:
        found = region_of(self.cluster)
        assert found is not None
        return found


def read_settings(cluster: ClusterConfig, facts: Catalog) -> GoogleSettings:
    """The settings of a config that has a project, and a region or a zone."""
    return GoogleSettings(cluster, facts)
