"""What all parts of a plan for Nebius share: its settings, names and labels, the provider."""

from __future__ import annotations

from dataclasses import dataclass

from drillyard.provision.cluster_plan import Pool
from drillyard.provision.creation_settings import CreationSettings
from drillyard.provision.nebius.config import NebiusConfig
from drillyard.provision.node_login import DEFAULT_USER
from drillyard.provision.terraform_document import Body, TerraformDocument, because

PROVIDER = "terraform-provider.storage.eu-north1.nebius.cloud/nebius/nebius"
"""Nebius keeps it in a registry of its own (https://docs.nebius.com/terraform-provider)."""
PROVIDER_VERSION = ">= 0.6.73, < 0.7.0"
"""The names of 0.6.73 are those that tests compare with; minor versions of 0 may change any."""
TERRAFORM_VERSION = ">= 1.10.0"
"""The first one that locks a state in S3 by an object beside it (use_lockfile)."""
DOMAIN = "api.eu.nebius.cloud:443"
PROJECT_KEY = "cluster.yaml: location.project"


@dataclass(frozen=True)
class NebiusSettings(CreationSettings):
    """A config that the rules allow, with its only pool."""

    pool: Pool

    @property
    def region(self) -> str:
        return self.pool.region

    @property
    def section(self) -> NebiusConfig:
        return self.cluster.section_as(NebiusConfig)

    @property
    def user(self) -> str:
        return self.section.user or DEFAULT_USER


def add_named(
    document: TerraformDocument,
    settings: NebiusSettings,
    kind: str,
    label: str,
    body: Body,
    *,
    name: str | None = None,
) -> str:
    """Add a thing of the project with its name and the cluster's labels; its address."""
    called = name or settings.name
    whole = {
        "parent_id": because(settings.project, "the project that pays for it", PROJECT_KEY),
        "name": because(called, "the cluster's name, and what it is", "cluster.yaml: name"),
        **body,
        "labels": because(
            settings.labels,
            "they identify it, also on bills",
            "cluster.yaml: name, cluster.labels",
        ),
    }
    return document.add(kind, label, whole, name=called, location=settings.region, labelled=True)


def required_provider() -> Body:
    """The block `terraform` of a document."""
    nebius = {"source": PROVIDER, "version": PROVIDER_VERSION}
    return {"required_version": TERRAFORM_VERSION, "required_providers": {"nebius": nebius}}
