"""Which Terraform and which version of Google's provider the documents are for."""

from __future__ import annotations

from drillyard.provision.terraform_document import Body

PROVIDER_VERSION = ">= 7.45.0, < 9.0.0"
"""7.45 and 8.7 accept the same resources (terraform providers schema; tests hold both)."""
TERRAFORM_VERSION = ">= 1.9.0"


def required_providers() -> Body:
    """The block `terraform` of a document."""
    google = {"source": "hashicorp/google", "version": PROVIDER_VERSION}
    return {"required_version": TERRAFORM_VERSION, "required_providers": {"google": google}}
