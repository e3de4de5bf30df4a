"""What is rendered for Vertex AI: each machine and way of buying against the provider's schema, and
field by field."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.unit.provision.clusters import bodies, plan
from tests.unit.provision.job_clusters import NETWORK, OFFERS, config
from tests.unit.provision.offers import every_plan
from tests.unit.provision.provider_schema import (
    VERSIONS,
    document_problems,
    unknown_references,
)
from tests.unit.provision.test_schema import leaves

from drillyard.config.cluster import cluster_model
from drillyard.config.load import load_cluster_config
from drillyard.provision.cluster_plan import ClusterPlan
from drillyard.provision.plan_directory import plan_directory
from drillyard.provision.plan_document import ClusterPlanDocument, plan_document
from drillyard.provision.plan_text import plan_text
from drillyard.provision.prices import price_totals, require_prices
from drillyard.provision.provisioner import plan_cluster, plan_file
from drillyard.provision.up import MadeCluster, launch_config

ACCOUNT = "team-jobs@my-project.iam.gserviceaccount.com"
TENSORBOARD = "projects/123456789012/locations/us-central1/tensorboards/1"
WAYS: tuple[dict[str, Any], ...] = (
    {},
    {"vertex": {"network": NETWORK, "tensorboard": TENSORBOARD, "service_account": ACCOUNT}},
    {"vertex": {"network": NETWORK}, "cluster": {"ranges": {"data": "10.64.0.0/16"}}},
    {"cluster": {"existing_bucket": True, "registry": False, "labels": {"team": "a"}}},
    {
        "cluster": {"bucket_keep_versions": 2},
        "vertex": {
            "service_account": "own@my-project.iam.gserviceaccount.com",
            "network": "projects/123456789012/global/networks/shared",
        },
    },
)


@cache
def planned(machine: str = "a3-megagpu-8g", mode: str = "spot", way: int = 0) -> ClusterPlan:
    return plan_cluster(cluster_model().model_validate(config(machine, mode, **WAYS[way])))


EVERY = every_plan(OFFERS, len(WAYS))


@pytest.mark.parametrize("version", VERSIONS)
def test_every_rendered_resource_is_one_of_the_provider(version: str) -> None:
    wrong = {
        each: found
        for each in EVERY
        if (found := document_problems(planned(*each).terraform, version))
    }
    assert not wrong, next(iter(wrong.items()))


def test_every_reference_is_to_a_resource_that_is_there() -> None:
    for each in EVERY:
        assert not unknown_references(planned(*each).terraform)


def test_the_plan_names_each_resource_once_with_its_labels_and_reasons() -> None:
    for each in EVERY:
        found = planned(*each)
        resources = found.terraform["resource"]
        assert {one.address for one in found.made_by_terraform} == {
            f"{kind}.{label}" for kind, named in resources.items() for label in named
        }
        names = Counter((one.kind, one.location, one.name) for one in found.resources)
        assert set(names.values()) == {1}
        for one in found.made_by_terraform:
            body = bodies(found, one.kind)[one.address.split(".")[1]]
            assert one.labelled == (body.get("labels", {}).get("drillyard-cluster") == "team")
        explained = {field.place for field in found.fields}
        for kind, named in resources.items():
            for label, body in named.items():
                for path in leaves({k: v for k, v in body.items() if k != "depends_on"}):
                    ends = [match.start() for match in re.finditer(r"[.\[]|$", path)]
                    assert {f"{kind}.{label}: {path[:end]}" for end in ends} & explained, path


def test_the_same_config_gives_the_same_documents_byte_for_byte() -> None:
    one, other = (plan_cluster(cluster_model().model_validate(config())) for _ in range(2))
    assert plan_document(one, ()).as_text() == plan_document(other, ()).as_text()
    assert plan_directory(one, ()) == plan_directory(other, ())


@pytest.mark.parametrize(("machine", "mode"), OFFERS)
def test_every_offer_costs_nothing_between_runs_and_counts_its_quotas(
    machine: str, mode: str
) -> None:
    found = planned(machine, mode)
    ClusterPlanDocument.model_validate(plan_document(found, ()).model_dump(), strict=False)
    [nodes] = [line for line in found.prices if line.pool]
    assert (nodes.usd_per_hour is None) == bool(nodes.missing)
    assert not any(line.running for line in found.prices)
    assert price_totals(found.prices).idle.value == 0.0
    require_prices(found)  # Nothing is bought: `up` asks for no price.
    assert found.pools[0].scales_from_zero and found.pools[0].region == "us-central1"
    gpus = [quota for quota in found.quotas if quota.unit == "GPUs"]
    bought = "preemptible_" if mode in ("spot", "flex-start") else ""
    for quota in gpus:
        assert quota.metric.startswith(f"custom_model_training_{bought}nvidia_")
        assert quota.region == "us-central1"
        assert quota.amount == 2 * found.pools[0].machine.num_accelerators
    assert len(found.quotas) == len(gpus) <= 1
    kinds = {each.kind for each in found.resources}
    assert not {kind for kind in kinds if kind.startswith(("google_compute", "google_container"))}


def test_without_a_zone_the_region_is_the_place(tmp_path: Path) -> None:
    location = {"project": "my-project", "region": "us-central1"}
    found = plan(tmp_path, config(location=location))
    assert (found.zone, found.region) == ("us-central1", "us-central1")
    [nodes] = [line for line in found.prices if line.pool]
    assert nodes.usd_per_hour is not None


def test_the_boot_disks_are_those_of_the_jobs(tmp_path: Path) -> None:
    found = plan(tmp_path, config(vertex={"boot_disk_gb": 1000}))
    assert any("2 x 1000 GiB" in line.what for line in found.prices)


def test_a_price_that_is_given_keeps_the_other_lines(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(yaml.safe_dump(config(vertex={"boot_disk_gb": 1000})))
    found = plan_file(file, prices=["30"]).plan
    nodes, disks = found.prices
    assert nodes.usd_per_hour is not None and nodes.usd_per_hour.value == 60.0
    assert not nodes.running and "1000 GiB" in disks.what


def test_the_account_has_the_bucket_and_logs_and_nothing_else() -> None:
    found = planned()
    (account,) = bodies(found, "google_service_account").values()
    assert account["account_id"] == "team-jobs"
    roles = [body["role"] for body in bodies(found, "google_project_iam_member").values()]
    assert roles == ["roles/logging.logWriter"]
    (access,) = bodies(found, "google_storage_bucket_iam_member").values()
    assert access["role"] == "roles/storage.objectUser"
    assert access["member"] == "${google_service_account.jobs.member}"
    board = bodies(planned(way=1), "google_project_iam_member").values()
    assert {body["role"] for body in board} == {"roles/logging.logWriter", "roles/aiplatform.user"}


def test_the_bucket_has_the_guards_of_gke() -> None:
    (bucket,) = bodies(planned(), "google_storage_bucket").values()
    assert bucket["force_destroy"] is False
    assert bucket["public_access_prevention"] == "enforced"
    assert bucket["uniform_bucket_level_access"] is True
    assert bucket["labels"]["drillyard-cluster"] == "team"
    assert "google_storage_bucket" not in planned(way=3).terraform["resource"]
    assert planned(way=3).existing_bucket == "team-runs"


def test_a_network_of_the_clusters_name_is_made_with_its_peering() -> None:
    found = planned(way=1)
    (network,) = bodies(found, "google_compute_network").values()
    assert (network["name"], network["auto_create_subnetworks"]) == ("team", False)
    (reserved,) = bodies(found, "google_compute_global_address").values()
    assert (reserved["name"], reserved["purpose"]) == ("team-peering", "VPC_PEERING")
    assert (reserved["prefix_length"], "address" in reserved) == (16, False)
    (peering,) = bodies(found, "google_service_networking_connection").values()
    assert peering["network"] == "${google_compute_network.system.id}"
    assert peering["reserved_peering_ranges"] == ["${google_compute_global_address.peering.name}"]
    assert {"compute.googleapis.com", "servicenetworking.googleapis.com"} <= {*found.services}
    (given,) = bodies(planned(way=2), "google_compute_global_address").values()
    assert (given["address"], given["prefix_length"]) == ("10.64.0.0", 16)


def test_what_is_named_otherwise_exists_and_stays() -> None:
    found = planned(way=4)
    kinds = {each.kind for each in found.resources}
    assert not kinds & {
        *("google_compute_network", "google_service_networking_connection"),
        *("google_service_account", "google_project_iam_member"),
    }
    (access,) = bodies(found, "google_storage_bucket_iam_member").values()
    assert access["member"] == "serviceAccount:own@my-project.iam.gserviceaccount.com"
    warned = " ".join(found.warnings)
    assert "networks/shared" in warned and "own@my-project" in warned


def test_up_completes_the_file_and_the_completed_file_plans_the_same(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    text = "# mine\n" + yaml.safe_dump(config(vertex={"network": NETWORK}), sort_keys=False)
    file.write_text(text)
    first = plan_file(file).plan
    written = launch_config(file, first, MadeCluster("", {}))
    assert written.in_place and written.text.startswith("# mine\n")
    file.write_text(written.text)
    section = load_cluster_config(file).section
    assert getattr(section, "service_account", None) == ACCOUNT
    assert getattr(section, "reserved_ip_ranges", None) == ["team-peering"]
    second = plan_file(file).plan
    assert second == first
    assert launch_config(file, second, MadeCluster("", {})).text == written.text


def test_the_directory_makes_it_without_helm_or_kubernetes() -> None:
    files = plan_directory(planned(), ())
    script = files["apply.sh"][0]
    for word in ("helm", "get-credentials", "gke", "instances list"):
        assert word not in script
    assert "ai custom-jobs list --region=us-central1" in script
    assert set(files) == {"main.tf.json", "backend.tf.json", "README.md", "apply.sh"}


def test_the_text_says_that_nodes_come_with_runs_and_asks_for_no_price() -> None:
    text = plan_text(planned("g2-standard-4", "flex-start"), (), "c.yaml")
    assert re.search("team-flex-start +g2-standard-4 +flex-start +0 to 2", text)
    assert text.rstrip().endswith("next: drillyard cluster up c.yaml")
