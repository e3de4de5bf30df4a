"""Where Google's services are reached: one answer for all that asks them, which are our client of
the services, the one of the state's bucket, and Terraform with its providers.

DRILLYARD_GOOGLE_ENDPOINT replaces the addresses of all services. One that begins with https:// is a
private endpoint of Google itself. One that begins with http:// is a server for tests, which has no
accounts, so no credentials are sent. Terraform finds its state on such a server by
STORAGE_EMULATOR_HOST, Google's own variable; that one without the other would keep the state of
what is made at Google in an emulator, and is refused.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from drillyard.errors import UserError

ENDPOINT_VARIABLE = "DRILLYARD_GOOGLE_ENDPOINT"
EMULATOR_VARIABLE = "STORAGE_EMULATOR_HOST"
_OF_TERRAFORM = {
    "GOOGLE_ARTIFACT_REGISTRY_CUSTOM_ENDPOINT": ("artifactregistry", "v1/"),
    "GOOGLE_BACKEND_STORAGE_CUSTOM_ENDPOINT": ("storage", "storage/v1/b"),
    "GOOGLE_COMPUTE_CUSTOM_ENDPOINT": ("compute", "compute/v1/"),
    "GOOGLE_CONTAINER_CUSTOM_ENDPOINT": ("container", "v1/"),
    "GOOGLE_IAM_CUSTOM_ENDPOINT": ("iam", "v1/"),
    "GOOGLE_RESOURCE_MANAGER_CUSTOM_ENDPOINT": ("cloudresourcemanager", "v1/"),
    "GOOGLE_RESOURCE_MANAGER_V3_CUSTOM_ENDPOINT": ("cloudresourcemanager", "v3/"),
    "GOOGLE_SERVICE_NETWORKING_CUSTOM_ENDPOINT": ("servicenetworking", "v1/"),
    "GOOGLE_SERVICE_USAGE_CUSTOM_ENDPOINT": ("serviceusage", "v1/"),
    "GOOGLE_STORAGE_CUSTOM_ENDPOINT": ("storage", "storage/v1/"),
}
"""Variables of the provider
(https://registry.terraform.io/providers/hashicorp/google/latest/docs/guides/provider_reference) and
of the backend (https://developer.hashicorp.com/terraform/language/backend/gcs), with service and
path."""


@dataclass(frozen=True)
class Endpoints:
    """`all_services`: the address of every service, None for Google's own; `emulator`: that of
    Cloud Storage, where it is another one."""

    all_services: str | None = None
    emulator: str | None = None

    @property
    def is_emulated(self) -> bool:
        """Whether they are servers for tests, which get no credentials."""
        return (self.all_services or "").startswith("http://")

    def address(self, service: str) -> str | None:
        """Where a service is reached, with a `/` at its end; None: at Google's address."""
        if service == "storage" and self.emulator is not None:
            return self.emulator.rstrip("/") + "/"
        return None if self.all_services is None else address_of(service, self.all_services)

    def terraform_environment(self) -> dict[str, str]:
        """The variables by which Terraform finds the same servers."""
        if self.is_emulated:
            return {"GOOGLE_OAUTH_ACCESS_TOKEN": "emulator"}
        return {
            variable: address + path
            for variable, (service, path) in _OF_TERRAFORM.items()
            if (address := self.address(service)) is not None
        }


def address_of(service: str, endpoint: str) -> str:
    """Where `service` is reached by an endpoint: `{service}` in it becomes the service's name, else
    the name is appended as a path."""
    named = endpoint if "{service}" in endpoint else endpoint.rstrip("/") + "/{service}"
    return named.replace("{service}", service).rstrip("/") + "/"


def endpoints() -> Endpoints:
    """What the environment says. Raises UserError where its two variables contradict each other."""
    every = os.environ.get(ENDPOINT_VARIABLE) or None
    emulator = os.environ.get(EMULATOR_VARIABLE) or None
    found = Endpoints(every, emulator if emulator is None else _with_scheme(emulator))
    if emulator is not None and not found.is_emulated:
        other = "is not set" if every is None else "is not an http:// address"
        raise UserError(
            f"{EMULATOR_VARIABLE}: is set, and {ENDPOINT_VARIABLE} {other}: Terraform's state would"
            " be in an emulator, and what it makes at Google\n"
            f"Type: unset {EMULATOR_VARIABLE}\nor, where a server emulates the other services too:"
            f" export {ENDPOINT_VARIABLE}=http://HOST:PORT"
        )
    return found


def require_terraform_endpoints() -> Endpoints:
    """`endpoints`, where Terraform can use them. Raises UserError."""
    found = endpoints()
    if found.is_emulated and found.emulator is None:
        raise UserError(
            f"{ENDPOINT_VARIABLE}: is an http:// address, a server for tests, and Terraform finds"
            f" its state on one only by {EMULATOR_VARIABLE}\nType: export"
            f" {EMULATOR_VARIABLE}=http://HOST:PORT"
        )
    return found


def _with_scheme(host: str) -> str:
    return host if "://" in host else f"http://{host}"
