"""Where Google's services are: one answer for our clients and for Terraform."""

from __future__ import annotations

from pathlib import Path

import pytest
from google.cloud import storage
from tests.unit.provision.clusters import config, plan

from drillyard.errors import UserError
from drillyard.provision.google.endpoints import (
    EMULATOR_VARIABLE,
    ENDPOINT_VARIABLE,
    Endpoints,
    address_of,
    endpoints,
    require_terraform_endpoints,
)
from drillyard.provision.google.state_bucket import GoogleStateBucket
from drillyard.provision.terraform_engine import engine_environment

LOCAL, PRIVATE = "http://127.0.0.1:4443", "https://{service}-lab.p.googleapis.com"


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (ENDPOINT_VARIABLE, EMULATOR_VARIABLE, "GOOGLE_OAUTH_ACCESS_TOKEN"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("endpoint", "address"),
    [
        ("http://127.0.0.1:80", "http://127.0.0.1:80/compute/"),
        ("http://127.0.0.1:80/", "http://127.0.0.1:80/compute/"),
        ("https://{service}-psc.p.googleapis.com", "https://compute-psc.p.googleapis.com/"),
    ],
)
def test_one_variable_gives_the_address_of_each_service(endpoint: str, address: str) -> None:
    assert address_of("compute", endpoint) == address


def test_a_private_endpoint_is_that_of_all_clients(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(ENDPOINT_VARIABLE, PRIVATE)
    made = dict[str, object]()
    monkeypatch.setattr(storage, "Client", lambda **options: made.update(options))
    GoogleStateBucket(plan(tmp_path, config()))
    assert made["client_options"] == {"api_endpoint": "https://storage-lab.p.googleapis.com"}
    assert "credentials" not in made
    found = engine_environment("token")
    assert found["GOOGLE_COMPUTE_CUSTOM_ENDPOINT"] == (
        "https://compute-lab.p.googleapis.com/compute/v1/"
    )
    assert found["GOOGLE_BACKEND_STORAGE_CUSTOM_ENDPOINT"] == (
        "https://storage-lab.p.googleapis.com/storage/v1/b"
    )
    assert "GOOGLE_OAUTH_ACCESS_TOKEN" not in found
    # What the user has set for Terraform alone stays.
    monkeypatch.setenv("GOOGLE_IAM_CUSTOM_ENDPOINT", "https://iam.example.com/v1/")
    assert (
        engine_environment("token")["GOOGLE_IAM_CUSTOM_ENDPOINT"] == "https://iam.example.com/v1/"
    )


def test_without_variables_nothing_is_redirected() -> None:
    assert endpoints() == Endpoints()
    assert not any("CUSTOM_ENDPOINT" in name for name in engine_environment("token"))


@pytest.mark.parametrize("emulator", ["http://127.0.0.1:9", "127.0.0.1:9"])
def test_the_emulator_of_an_emulated_project_has_its_storage(
    monkeypatch: pytest.MonkeyPatch, emulator: str
) -> None:
    monkeypatch.setenv(ENDPOINT_VARIABLE, LOCAL)
    with pytest.raises(UserError, match=f"export {EMULATOR_VARIABLE}=http://"):
        require_terraform_endpoints()
    assert endpoints().address("storage") == f"{LOCAL}/storage/"
    monkeypatch.setenv(EMULATOR_VARIABLE, emulator)
    found = require_terraform_endpoints()
    assert found.address("storage") == "http://127.0.0.1:9/"
    assert found.address("compute") == f"{LOCAL}/compute/"
    assert found.is_emulated
    assert engine_environment("token")["GOOGLE_OAUTH_ACCESS_TOKEN"] == "emulator"
