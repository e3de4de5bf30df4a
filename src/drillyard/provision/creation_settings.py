"""A config of a cluster that is to be made, with its defaults: what the rendering for any cloud
reads."""

from __future__ import annotations

from dataclasses import dataclass

from drillyard.config.cluster import ClusterConfig
from drillyard.config.creation import CreationConfig
from drillyard.hardware.catalog import Catalog
from drillyard.provision.cluster_plan import CLUSTER_LABEL


@dataclass(frozen=True)
class CreationSettings:
    """A config that has a project, and the facts of the hardware."""

    cluster: ClusterConfig
    facts: Catalog

    @property
    def creation(self) -> CreationConfig:
        """Section `cluster` of the file, or its defaults."""
        return self.cluster.cluster or CreationConfig()

    @property
    def name(self) -> str:
        return self.cluster.name

    @property
    def project(self) -> str:
        assert self.cluster.location is not None and self.cluster.location.project is not None
        return self.cluster.location.project

    @property
    def labels(self) -> dict[str, str]:
        """Of everything that carries labels."""
        return {CLUSTER_LABEL: self.name, **self.creation.labels}
