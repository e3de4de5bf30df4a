"""Cluster configs as people mistype them: each mistake is one line at its key, and what the line
says to write is accepted."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import yaml
from tests.unit.provision.clusters import config, plan

from drillyard.config.load import load_cluster_config
from drillyard.errors import UserError
from drillyard.provision.provisioner import creation_rules, plan_cluster

SPARE = {"name": "spare", "consumption": "spot", "nodes": 2}
GONE = object()


def changed(changes: dict[str, Any], content: dict[str, Any] | None = None) -> dict[str, Any]:
    """The content of a right file with these keys; `GONE` removes one."""
    found = copy.deepcopy(content or config())
    for path, value in changes.items():
        *sections, key = path.split(".")
        here: Any = found
        for part in sections:
            here = here[int(part)] if isinstance(here, list) else here.setdefault(part, {})
        if value is GONE:
            del here[key]
        elif isinstance(here, list):
            here[int(key)] = value
        else:
            here[key] = value
    return found


def refusal(directory: Any, text: str) -> list[str]:
    """The lines of the error, as `drillyard cluster plan` has them."""
    path = directory / "cluster.yaml"
    path.write_text(text, "utf-8")
    with pytest.raises(UserError) as refused:
        plan_cluster(load_cluster_config(path, resolve_environment=False, rules=creation_rules()))
    return [line.removeprefix(f"{directory}/") for line in str(refused.value).splitlines()]


def with_pool(**settings: Any) -> dict[str, Any]:
    return {"cluster.pools": [{**SPARE, **settings}]}


RESERVED = {"consumption": "reservation", "reservation": "mine"}
A4X = {"machine": "a4x-highgpu-4g", **RESERVED}
ONE_KEY: list[tuple[str, Any, Any]] = [
    # The key, what is wrong there, and what the error says to write.
    ("name", "My Lab", "my-lab"),
    ("name", "größe", "groe"),
    (
        "name",
        "a" * 41,
        "a" * 40,
    ),
    ("name", "lab-", "lab"),
    ("platform", "GKE", "gke"),
    ("location.project", 123456, "my-project"),
    ("location.region", "us-centrall1", "us-central1"),
    ("location.region", "us-central1-b", "us-central1"),
    ("location.region", "US-Central1", "us-central1"),
    ("location.zone", "us-central1-z", "us-central1-b"),
    ("location.zone", "us-central1", "us-central1-b"),
    ("location.zone", "us-central1-b ", "us-central1-b"),
    ("location.zone", "b", "us-central1-b"),
    ("machine", "a4-highgpu-9g", "a4-highgpu-8g"),
    ("machine", "A4-HighGPU-8G", "a4-highgpu-8g"),
    ("machine", "b200", "a4-highgpu-8g"),
    ("machine", "gpu-h100-sxmm", "a3-megagpu-8g"),
    ("machine", "p5.48xlarge", "a3-megagpu-8g"),
    ("machine", ["a4-highgpu-8g"], "a4-highgpu-8g"),
    ("nodes", "2", 2),
    ("nodes", "1,000", 1000),
    ("nodes", 2.0, 2),
    ("nodes", 100000, 10000),
    ("nodes", 10**30, 10000),
    ("consumption", "on-demand", "spot"),
    ("consumption", "flex_start", "flex-start"),
    ("consumption", "dws", "flex-start-queued"),
    ("consumption", "preemptible", "spot"),
    ("consumption", ["spot"], "spot"),
    ("storage.bucket", "gs://runs", "runs"),
    ("storage.bucket", "My_Runs!", "my-runs"),
    ("storage.bucket", "runs.example.com", "runs-example-com"),
    ("image", "train latest", "us-central1-docker.pkg.dev/my-project/team/IMAGE:TAG"),
    ("network_stack", "tcpxo", "gib"),
    ("cluster.version", 1.34, "1.34"),
    ("cluster.version", "v1.34", "1.34"),
    ("cluster.version", "1.34.x", "1.34"),
    ("cluster.version", "latest", "1.34"),
    ("cluster.bucket_location", "us-centrall1", "us-central1"),
    ("cluster.bucket_location", "us-central1-b", "us-central1"),
    ("cluster.bucket_location", "Iowa", "US"),
    ("cluster.disk_gib", 5, 200),
    ("cluster.disk_gib", 100000, 65536),
    ("cluster.ranges.nodes", "8.8.0.0/16", "10.0.0.0/16"),
    ("cluster.ranges.nodes", "10.0.0.5/20", "10.0.0.0/20"),
    ("cluster.ranges.pods", "172.17.0.0/16", "100.64.0.0/16"),
    ("cluster.ranges.services", "10.8.0.0/28", "10.128.0.0/27"),
    ("cluster.authorized_networks", "203.0.113.0/24", ["203.0.113.0/24"]),
    ("cluster.cpu_pool.machine", "e2-standart-16", "e2-standard-16"),
    ("cluster.cpu_pool.machine", "p5.48xlarge", "e2-standard-16"),
    ("cluster.cpu_pool.nodes", 30000, 1),
    ("cluster.private_nodes", "yes", True),
    ("cluster.release_channel", "REGULAR", "regular"),
    ("cluster.bucket_recover_days", 100, 90),
]
MORE: list[tuple[dict[str, Any], str, dict[str, Any]]] = [
    # Where the mistake or its remedy is of several keys.
    ({"location.zone": "us-east5-a"}, "location.zone", {"location.region": "us-east5"}),
    ({"location.region": "us-east5"}, "location.zone", {"location.region": "us-central1"}),
    ({"location.zones": ["a"]}, "location.zones", {"location.zones": GONE}),
    ({**RESERVED, "reservation": ""}, "reservation", {"reservation": "mine"}),
    ({**RESERVED, "reservation": ["mine"]}, "reservation", {"reservation": "mine"}),
    ({"reservation": "mine"}, "reservation", {"reservation": GONE}),
    ({"storage.directory": "/data"}, "storage.directory", {"storage.directory": GONE}),
    ({"zone": "us-central1-b"}, "zone", {"zone": GONE}),
    ({"num_nodes": 2}, "num_nodes", {"num_nodes": GONE}),
    ({"kubernetes.nccl_plugin": "1.0.15"}, "kubernetes.nccl_plugin", {"kubernetes": GONE}),
    ({"cluster.version": "2.0"}, "cluster.version", {"cluster.version": GONE}),
    ({"cluster.kubernetes_version": "1.34"}, "cluster.kubernetes_version", {"cluster": GONE}),
    ({"cluster.disk_size": 100}, "cluster.disk_size", {"cluster": {"disk_gib": 100}}),
    (
        {"cluster.authorized_networks": ["203.0.113.7/24"]},
        "cluster.authorized_networks.0",
        {"cluster.authorized_networks.0": "203.0.113.0/24"},
    ),
    ({"cluster.labels": {"Team": "x"}}, "cluster.labels.Team", {"cluster.labels": {"team": "x"}}),
    (
        {"cluster.labels": {"team": "ML Team"}},
        "cluster.labels.team",
        {"cluster.labels.team": "ml-team"},
    ),
    ({"cluster.labels": {"cost": 12}}, "cluster.labels.cost", {"cluster.labels.cost": "12"}),
    ({"cluster.labels": {"spot": True}}, "cluster.labels.spot", {"cluster.labels.spot": "true"}),
    (with_pool(name="Spare"), "cluster.pools.0.name", {"cluster.pools.0.name": "spare"}),
    (
        with_pool(zone="us-central1-q"),
        "cluster.pools.0.zone",
        {"cluster.pools.0.zone": "us-central1-b"},
    ),
    (with_pool(count=3), "cluster.pools.0.count", {"cluster.pools.0.count": GONE}),
    (
        with_pool(machine="p5.48xlarge"),
        "cluster.pools.0.machine",
        {"cluster.pools.0.machine": "a3-megagpu-8g"},
    ),
    (
        with_pool(consumption="reservation", reservation="mine"),
        "cluster.pools.0.reservation",
        {"cluster.pools.0.reservation": GONE, "cluster.pools.0.reservations": ["mine"]},
    ),
    (
        with_pool(consumption="reservation", reservations="mine"),
        "cluster.pools.0.reservations",
        {"cluster.pools.0.reservations": ["mine"]},
    ),
    (
        {**RESERVED, **with_pool(consumption="calendar", reservations=["mine"])},
        "cluster.pools.0.reservations",
        {"cluster.pools.0.reservations": ["other"]},
    ),
    (
        {
            **RESERVED,
            **with_pool(
                machine="a3-ultragpu-8g",
                consumption="reservation",
                reservations=["projects/my-project/reservations/mine"],
            ),
        },
        "cluster.pools.0.reservations",
        {"cluster.pools.0.reservations": ["other"]},
    ),
    ({**A4X, "cluster.compact_placement": False}, "cluster.compact_placement", {"cluster": GONE}),
    ({**A4X, "cluster.version": "1.33.2"}, "cluster.version", {"cluster.version": "1.33.4"}),
    ({**A4X, "nodes": 36}, "nodes", {"nodes": 18}),
]
WRONG = [*(({key: wrong}, key, {key: right}) for key, wrong, right in ONE_KEY), *MORE]
OTHER_WORDS = {"my-project", "train:latest", 10000, "mine", "other", "1.33.4", "a3-megagpu-8g"}
"""Values that an error leaves to the user: it says what they must be like."""


@pytest.mark.parametrize(
    ("wrong", "key", "fix"), WRONG, ids=[f"{at}-{key}" for at, (_, key, _) in enumerate(WRONG)]
)
def test_a_mistake_is_one_line_whose_remedy_works(wrong, key, fix, tmp_path):
    content = changed(wrong)
    [line] = refusal(tmp_path, yaml.safe_dump(content, sort_keys=False, allow_unicode=True))
    assert re.match(rf"cluster\.yaml(:\d+)?: {re.escape(key)}: ", line), line
    for value in fix.values():
        typed = value[0] if isinstance(value, list) else value
        if isinstance(typed, str | int) and typed not in OTHER_WORDS:
            assert str(typed).lower() in line.lower(), line
    plan(tmp_path, changed(fix, content))


TYPED = {
    # As it is typed: quotes and last digits are lost in a parsed file.
    "cluster: {version: 1.30}": ("cluster.version", '"1.30"'),
    "cluster: {version: 1.34}": ("cluster.version", '"1.34"'),
    "cluster:\n  labels: {rate: 0.10}": ("cluster.labels.rate", "0.10"),
    "cluster: []": ("cluster", "pools"),
    "cluster: {pools: {spare: {nodes: 2}}}": ("cluster.pools", "a list"),
    "cluster: {pools: [spare]}": ("cluster.pools.0", "a mapping"),
    "cluster: {pools: [[[]]]}": ("cluster.pools.0", "a mapping"),
    "cluster: {ranges: }": ("cluster.ranges", "nodes, pods"),
    "nodes: 4": ("nodes", "twice"),
    'image: "a\\0b"': ("image", "image"),
}


@pytest.mark.parametrize("text", TYPED)
def test_what_is_typed_is_what_is_shown(text, tmp_path):
    key, word = TYPED[text]
    content = {name: value for name, value in config().items() if not text.startswith(name)}
    content |= {"nodes": 2}
    right = yaml.safe_dump(content, sort_keys=False)
    lines = refusal(tmp_path, f"{right}{text}\n")
    assert len(lines) == 1
    assert re.match(rf"cluster\.yaml:\d+: {re.escape(key)}: ", lines[0]), lines
    assert word in lines[0]


def test_mistakes_of_every_kind_are_one_error_in_the_order_of_the_file(tmp_path):
    """Values that are no values, unknown keys, rules of the platform, of places and of pools."""
    content = changed(
        {
            "name": "My Lab",
            "location.zone": "us-central1-z",
            "nodes": "2",
            "storage.bucket": "my-google-runs",
            "cluster": {
                "version": "latest",
                "disk_gib": 5,
                "labls": {},
                "labels": {"Team": "x"},
                "ranges": {"nodes": "8.8.0.0/16", "pods": "auto"},
                "cpu_pool": {"machine": "nope"},
                "pools": [
                    {"consumption": "spot", "nodes": 0},
                    {"name": "b", "machine": "p5.48xlarge", "consumption": "spot", "nodes": 2},
                    {"name": "c", "nodes": 2},
                    {"name": "d", "consumption": "on-demand", "nodes": 2},
                ],
            },
        }
    )
    lines = refusal(tmp_path, yaml.safe_dump(content, sort_keys=False))
    found = [re.match(r"cluster\.yaml:(\d+): (\S+): ", line) for line in lines]
    assert all(found), lines
    assert [each[2] for each in found] == [
        *("name", "location.zone", "nodes", "storage.bucket", "cluster.version"),
        *("cluster.disk_gib", "cluster.labls", "cluster.labels.Team", "cluster.ranges.nodes"),
        *("cluster.ranges.pods", "cluster.cpu_pool.machine", "cluster.pools.0.nodes"),
        *("cluster.pools.1.machine", "cluster.pools.2.consumption", "cluster.pools.3.consumption"),
    ]
    numbers = [int(each[1]) for each in found]
    assert numbers == sorted(numbers)


@pytest.mark.parametrize(
    "wrong",
    [
        {"consumption": "sport", "reservation": "mine"},
        {"storage.bucket": 17, "cluster.existing_bucket": True},
        {"reservations": ["mine"], "consumption": "reservation"},
        {"kubernetes": {"queue": 5, "priority_class": "high"}},
        {"location": "us-central1-b"},
        {"kubernetes": {"volume_claim": 1}, "storage": {"directory": "/data"}},
    ],
    ids=str,
)
def test_a_mistake_makes_no_others(wrong, tmp_path):
    """What depends on a value that cannot be read is not reported as well."""
    assert len(refusal(tmp_path, yaml.safe_dump(changed(wrong), sort_keys=False))) == 1


def test_a_place_that_is_newer_than_the_list_is_given_as_a_row(tmp_path):
    """Both a region and a further zone of one, as the error writes them."""
    for location in (
        {"region": "us-central9", "zone": "us-central9-c"},
        {"region": "us-central1", "zone": "us-central1-q"},
    ):
        content = changed({f"location.{key}": value for key, value in location.items()})
        [line] = refusal(tmp_path, yaml.safe_dump(content))
        row = re.search(r"regions: \[.*\]", line)[0]
        if "us-central9" in row:
            row = row.replace("[a]", "[c]")
        (tmp_path / "own.yaml").write_text(row)
        found = plan(tmp_path, changed({"hardware": "own.yaml"}, content))
        assert found.zone == location["zone"]


def test_pools_may_share_a_reservation_that_is_the_same(tmp_path):
    """Two domains of A4X, or two queues: the plan says how many nodes it must have."""
    shared = {**RESERVED, **with_pool(consumption="reservation", reservations=["mine"])}
    found = plan(tmp_path, changed(shared))
    assert any("mine" in each and "4 nodes" in each for each in found.warnings)
    blocks = with_pool(consumption="reservation", reservations=["mine/reservationBlocks/b"])
    plan(tmp_path, changed({**RESERVED, **blocks}))


@pytest.mark.parametrize("platform", ["local", "ssh", "slurm"])
def test_a_platform_without_creation_says_what_to_do_instead(platform, tmp_path):
    """One line, whatever else the file lacks there."""
    [line] = refusal(tmp_path, f"name: lab\nplatform: {platform}\n")
    assert line.startswith("cluster.yaml:2: platform: ")
    assert "kubernetes or gke or vertex or gce or nebius" in line
    assert "launch" in line or "ssh" in line


def test_a_wrong_hardware_file_is_an_error_at_its_key(tmp_path):
    content = yaml.safe_dump(changed({"hardware": "none.yaml", "nodes": 0}), sort_keys=False)
    lines = refusal(tmp_path, content)
    assert [line.split(": ")[1] for line in lines] == ["nodes", "hardware"]
