"""What is asked of Nebius beside Terraform, without a project: errors, hosts, and a missing client."""  # noqa: E501

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.unit.provision.nebius_clusters import config, plan

from drillyard.errors import UnreachableError, UserError
from drillyard.provision.down import without_protection
from drillyard.provision.made_hosts import made_hosts, planned_hosts
from drillyard.provision.nebius import cli
from drillyard.provision.nebius.provider_errors import NEBIUS_KINDS
from drillyard.provision.nebius.state_bucket import ENDPOINT, NebiusStateBucket
from drillyard.provision.provider_errors import kind_of
from drillyard.provision.terraform_output import StateResource

VM = "nebius_compute_v1_instance"


@pytest.mark.parametrize(
    ("text", "name", "can_pass"),
    [
        ("rpc error: code = Unauthenticated desc = token is expired", "credentials", False),
        ("rpc error: code = ResourceExhausted desc = QuotaFailure: compute.x", "quota", False),
        ("code = ResourceExhausted desc = Quota limit exceeded", "quota", False),
        ("rpc error: code = ResourceExhausted desc = NotEnoughResources", "stockout", True),
        ("rpc error: code = PermissionDenied desc = Permission denied", "permission", False),
        ("rpc error: code = FailedPrecondition desc = subnet is in use", "in-use", True),
        ("rpc error: code = AlreadyExists desc = network exists", "exists", False),
        ("rpc error: code = Unavailable desc = x", "no-answer", True),
        ("api error InvalidAccessKeyId: no such key", "storage-key", False),
        ("Error: saved plan is stale", "stale-plan", False),
    ],
)
def test_errors_of_the_provider_are_known(text: str, name: str, can_pass: bool) -> None:
    kind = kind_of(text, NEBIUS_KINDS)
    assert kind is not None and (kind.name, kind.can_pass) == (name, can_pass)
    # The advice is of Nebius.
    assert "gcloud" not in kind.advice.format(project="p", command="c")


def test_hosts_of_the_state_are_in_the_plans_order_without_prefixes(tmp_path: Path) -> None:
    def host(number: int, status: Any) -> StateResource:
        values = {"name": f"team-{number}", "id": f"i{number}", "created_at": "now"}
        return StateResource(f"{VM}.team_{number}", VM, {**values, "status": status})

    def status(number: int) -> dict[str, Any]:
        inside, public = (f"{net}.{number}/32" for net in ("10.0.0", "198.51.100"))
        nic = {"ip_address": {"address": inside}, "public_ip_address": {"address": public}}
        return {"network_interfaces": [nic]}

    state = {each.address: each for each in (host(1, status(1)), host(0, status(0)))}
    found = planned_hosts(plan(tmp_path, config()), made_hosts(state))
    assert [(each.name, each.address, each.public) for each in found] == [
        ("team-0", "10.0.0.0", "198.51.100.0"),
        ("team-1", "10.0.0.1", "198.51.100.1"),
    ]
    # One that is being made has no address yet.
    (half,) = made_hosts({"x": host(0, None)})
    assert (half.address, half.public) == ("", "")


def test_the_backend_has_no_secret_and_another_address_as_clients_of_s3_take_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key-id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "key-secret")
    monkeypatch.delenv(ENDPOINT, raising=False)
    planned = plan(tmp_path, config())
    backend = NebiusStateBucket(planned).backend()
    assert "key-" not in str(backend)
    assert backend["s3"]["use_lockfile"] is True
    assert backend["s3"]["endpoints"] == {"s3": "https://storage.eu-north1.nebius.cloud:443"}
    assert "use_path_style" not in backend["s3"]
    monkeypatch.setenv(ENDPOINT, "http://127.0.0.1:1")
    backend = NebiusStateBucket(planned).backend()
    assert backend["s3"]["endpoints"] == {"s3": "http://127.0.0.1:1"}
    assert backend["s3"]["use_path_style"] is True


@pytest.mark.parametrize(
    ("key", "own"),
    [
        ("team/default.tfstate", True),
        ("team/default.tfstate.tflock", True),
        ("team/creating.json", True),
        ("team/images.json", True),
        ("team/deployed.json", True),
        ("team/team/cluster/default.tfstate", True),
        ("team/notes.txt", False),
        ("team2/default.tfstate", False),
        ("default.tfstate", False),
    ],
)
def test_only_what_is_written_for_the_cluster_is_its_own(
    tmp_path: Path, key: str, own: bool
) -> None:
    assert NebiusStateBucket(plan(tmp_path, config())).is_own_object(key) is own


def test_storage_that_does_not_answer_is_unreachable_and_names_no_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key-id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "key-secret")
    monkeypatch.setenv(ENDPOINT, "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with pytest.raises(UnreachableError) as error:
        NebiusStateBucket(plan(tmp_path, config())).read("default.tfstate")
    assert "key-" not in str(error.value)


def test_data_may_be_destroyed_only_without_the_protection(tmp_path: Path) -> None:
    document = plan(tmp_path, config()).terraform
    assert "prevent_destroy" in str(document)
    freed = without_protection(document)
    assert "prevent_destroy" not in str(freed)
    kinds = {kind: set(bodies) for kind, bodies in document["resource"].items()}
    assert {kind: set(bodies) for kind, bodies in freed["resource"].items()} == kinds


def test_the_program_is_asked_for_all_pages_in_json_and_refusals_have_kinds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nebius"
    program.write_text('#!/bin/sh\necho "$*" >&2\nexit 1\n')
    program.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(cli.NebiusError, match="list --parent-id p --all --format json"):
        cli.items("compute", "disk", parent="p")
    for said, refusal in (
        ("rpc error: code = NotFound desc = no", "absent"),
        ("rpc error: code = PermissionDenied desc = no", "denied"),
        ("rpc error: code = AlreadyExists desc = yes", "taken"),
        ("rpc error: code = Unauthenticated desc = no", "login"),
        ("odd", "other"),
    ):
        program.write_text(f"#!/bin/sh\necho 'Error: {said}' >&2\nexit 1\n")
        with pytest.raises(cli.NebiusError) as error:
            cli.call("iam", "project", "get", "--id", "p")
        assert error.value.refusal == refusal
    program.write_text("#!/bin/sh\necho 'rpc error: code = Unavailable' >&2\nexit 1\n")
    with pytest.raises(UnreachableError):
        cli.call("iam", "project", "get", "--id", "p")
    # An empty list is an empty document.
    program.write_text("#!/bin/sh\necho '{}'\n")
    assert cli.items("compute", "disk", parent="p") == []
    program.write_text("#!/bin/sh\necho html\n")
    with pytest.raises(UserError, match="not JSON"):
        cli.items("compute", "disk", parent="p")
    program.unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="nebius: is not installed"):
        cli.items("compute", "disk", parent="p")
    monkeypatch.setenv(cli.TOKEN, "given")
    assert cli.token() == "given"


def test_without_the_client_of_s3_the_error_says_which_extra() -> None:
    program = (
        "import sys; sys.modules['botocore.config'] = None; import drillyard.provision.nebius.cloud"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    said = done.stderr.splitlines()[-1]
    assert "MissingExtraError" in said and "pip install 'drillyard[nebius]'" in said
