"""What Vertex AI would refuse is refused before anything is sent: setting, rule, source and fix."""

from __future__ import annotations

import pytest
from tests.unit.launch.requests import WORKLOAD, cluster, request

from drillyard.errors import UserError
from drillyard.launch.submission import plan_requests
from drillyard.launch.vertex.custom_job import plan_of

IN_ZONE_C = "{project: p, region: us-central1, zone: us-central1-c}"
WHOLE = "projects/p/zones/us-central1-b/reservations/mine"


def refusal(**settings: object) -> str:
    message = {"storage": "{bucket: my-bucket}", **settings}
    with pytest.raises(UserError) as refused:
        plan_of(request(cluster("vertex", **message), WORKLOAD))  # type: ignore[arg-type]
    return str(refused.value)


@pytest.mark.parametrize(
    ("settings", "key", "rule"),
    [
        (
            {"consumption": "flex-start", "vertex": "{timeout_hours: 169}"},
            "vertex.timeout_hours",
            "7 days",
        ),
        ({"vertex": "{max_wait_hours: 2}"}, "vertex.max_wait_hours", "only flex-start"),
        ({"consumption": "reservation", "reservation": "mine"}, "location.zone", "missing"),
        (
            {"consumption": "reservation", "reservation": "p/mine"},
            "reservation",
            "neither a name nor",
        ),
        (
            {"consumption": "reservation", "reservation": WHOLE, "location": IN_ZONE_C},
            "reservation",
            "its zone is us-central1-b, but location.zone is us-central1-c",
        ),
        (
            {
                "consumption": "reservation",
                "reservation": WHOLE,
                "location": "{project: p, region: europe-west4}",
            },
            "reservation",
            "not in location.region europe-west4",
        ),
        ({"location": "{project: p, region: us-central1-b}"}, "location.region", "not a region"),
        (
            {"location": "{project: p, region: us-central1, zone: us-east1-b}"},
            "location.zone",
            "not in region",
        ),
        ({"vertex": "{network: default}"}, "vertex.network", "projects/NUMBER"),
        (
            {"vertex": "{network: projects/my-id/global/networks/n}"},
            "vertex.network",
            "projectNumber",
        ),
        (
            {"vertex": "{reserved_ip_ranges: [a]}"},
            "vertex.reserved_ip_ranges",
            "vertex.network, which is not set",
        ),
        ({"vertex": "{service_account: me}"}, "vertex.service_account", "is not the address"),
        (
            {"vertex": "{tensorboard: projects/1/locations/us-central1/tensorboards/7}"},
            "vertex.service_account",
            "missing",
        ),
        (
            {
                "vertex": (
                    "{tensorboard: projects/1/locations/us-east1/tensorboards/7, service_account:"
                    " a@b.com}"
                )
            },
            "vertex.tensorboard",
            "one region",
        ),
        (
            {"vertex": "{tensorboard: mine, service_account: a@b.com}"},
            "vertex.tensorboard",
            "tensorboards/ID",
        ),
        (
            {
                "machine": "a4-highgpu-8g",
                "consumption": "spot",
                "vertex": "{boot_disk_type: pd-ssd}",
            },
            "vertex.boot_disk_type",
            "hyperdisk-balanced only",
        ),
        ({"vertex": "{labels: {Team: a}}"}, "vertex.labels", "lower case"),
        ({"vertex": "{labels: {1st: a}}"}, "vertex.labels", "begin with a letter"),
        ({"vertex": f"{{labels: {{team: {'a' * 64}}}}}"}, "vertex.labels", "at most 63"),
        ({"vertex": "{labels: {drillyard-run: a}}"}, "vertex.labels", "reserved"),
        (
            {
                "machine": "a4x-highgpu-4g",
                "consumption": "reservation",
                "reservation": WHOLE,
                "location": "{project: p, region: us-central1}",
            },
            "machine",
            "no accelerator type",
        ),
    ],
)
def test_a_broken_rule_names_setting_and_line(
    settings: dict[str, object], key: str, rule: str
) -> None:
    message = refusal(**settings)
    assert rule in message
    assert f": {key}: " in message
    assert "cluster.yaml:" in message


def test_a_missing_image_says_where_the_clusters_repository_is() -> None:
    message = refusal(image=None)
    assert ": image: missing" in message and "us-central1-docker.pkg.dev/" in message


def test_all_broken_rules_are_reported_at_once() -> None:
    message = refusal(vertex="{network: default, max_wait_hours: 2}")
    assert len(message.splitlines()) == 2


def test_machines_that_are_not_sold_so_are_refused() -> None:
    assert "a4-highgpu-8g cannot be had by 'on-demand'" in refusal(machine="a4-highgpu-8g")


def test_a_machine_of_another_cloud_is_refused() -> None:
    assert "p5.48xlarge is one of AWS" in refusal(machine="p5.48xlarge")


@pytest.mark.parametrize(
    "image", ["https://us-docker.pkg.dev/p/r/i:1", "'nvcr.io#nvidia/nemo:25.07'", "my image"]
)
def test_an_image_s_address_is_one(image: str) -> None:
    assert "is not an image's address" in refusal(image=image)


@pytest.mark.parametrize("bucket", ["gs://my-bucket", "My-Bucket", "b", "my-bucket/runs"])
def test_a_bucket_s_name_is_one(bucket: str) -> None:
    assert "cannot be a bucket's name" in refusal(storage=f"{{bucket: {bucket}}}")


def test_a_directory_outside_of_the_bucket_is_refused() -> None:
    assert "is not in the bucket my-bucket" in refusal(
        storage="{bucket: my-bucket, directory: /mnt/shared}"
    )


@pytest.mark.parametrize(
    ("option", "capability"), [({"sync": True}, "sync"), ({"dependency": "slurm://c/a"}, "depend")]
)
def test_what_the_platform_cannot_do_names_those_that_can(
    option: dict[str, object], capability: str
) -> None:
    asked = request(cluster("vertex", storage="{bucket: my-bucket}"), WORKLOAD, **option)
    with pytest.raises(
        UserError, match=rf"platform vertex cannot do that \({capability}.*these can: .*slurm"
    ):
        plan_requests([asked])


def test_an_unknown_machine_is_refused() -> None:
    assert "a9-highgpu" in refusal(machine="a9-highgpu-8g")
