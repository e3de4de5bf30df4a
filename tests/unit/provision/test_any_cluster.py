"""Whatever a config says, it is planned as the provider and the cloud accept it, or refused."""

from __future__ import annotations

import re

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.provision.clusters import GOOGLE_MACHINES, bodies
from tests.unit.provision.provider_schema import document_problems

from drillyard.config.cluster import cluster_model, cluster_problems
from drillyard.config.problems import raise_all
from drillyard.errors import UserError
from drillyard.provision.provisioner import plan_cluster

MODES = ["on-demand", "reservation", "spot", "flex-start", "flex-start-queued", "calendar"]
NAMES = st.from_regex(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", fullmatch=True)
MACHINES = st.sampled_from([*(each.name for each in GOOGLE_MACHINES), "p5.48xlarge"])
ZONES = st.sampled_from(["us-central1-b"] * 4 + ["us-central1-a", "europe-west4-b"])
RESERVATIONS = st.sampled_from(
    ["mine", "r/reservationBlocks/b", "projects/other-1/reservations/r", "Not one"]
)
RANGES = st.sampled_from(["10.0.0.0/16", "10.0.0.0/9", "172.16.0.0/16", "192.168.0.0/20"])


def some(**fields):
    """Some of these keys, each with a value."""
    return st.fixed_dictionaries({}, optional=fields)


FURTHER = st.builds(
    lambda must, may: must | may,
    st.fixed_dictionaries({"consumption": st.sampled_from(MODES), "nodes": st.integers(1, 3000)}),
    some(name=NAMES, machine=MACHINES, zone=ZONES, reservations=st.lists(RESERVATIONS, max_size=2)),
)
CREATION = some(
    pools=st.lists(FURTHER, max_size=3),
    version=st.sampled_from(["1.29", "1.34", "1.35.1-gke.100"]),
    ranges=some(nodes=RANGES, pods=RANGES, services=RANGES, data=RANGES),
    max_pods_per_node=st.integers(8, 256),
    compact_placement=st.booleans(),
    private_nodes=st.booleans(),
    existing_bucket=st.booleans(),
    bucket_keep_versions=st.integers(0, 2),
    registry=st.booleans(),
    labels=st.dictionaries(st.sampled_from(["team", "cost_centre"]), st.just("a")),
)
CONFIGS = st.builds(
    lambda must, may: must | may,
    st.fixed_dictionaries(
        {
            "name": NAMES,
            "platform": st.just("gke"),
            "location": st.fixed_dictionaries(
                {"project": st.just("my-project"), "region": st.just("us-central1"), "zone": ZONES}
            ),
            "machine": MACHINES,
            "nodes": st.integers(1, 3000),
            "consumption": st.sampled_from(MODES),
            "image": st.just("image"),
        }
    ),
    some(
        reservation=RESERVATIONS,
        storage=some(bucket=st.sampled_from(["runs", "google-runs"])),
        kubernetes=some(
            pod_network=st.sampled_from(["interfaces", "host", "dranet"]),
            namespace=st.sampled_from(["runs.privileged", "1st", "team-a"]),
            service_account=st.just("me"),
        ),
        network_stack=st.sampled_from(["ethernet", "gib", "tcpxo"]),
        cluster=CREATION,
    ),
)
IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
"""https://developer.hashicorp.com/terraform/language/syntax/configuration#identifiers"""


@settings(max_examples=60, deadline=None)
@given(CONFIGS)
def test_a_config_is_planned_or_refused(content):
    config = cluster_model().model_validate(content)
    try:
        raise_all(cluster_problems(config))
        found = plan_cluster(config)
    except UserError as refused:
        assert all(re.match(r"[a-z_.0-9-]+: ", line) for line in str(refused).splitlines())
        return
    assert not document_problems(found.terraform, "8.7.0")
    subnets = bodies(found, "google_compute_subnetwork").values()
    assert len({each["ip_cidr_range"] for each in subnets}) == len(subnets)
    for named in found.terraform["resource"].values():
        assert all(IDENTIFIER.fullmatch(label) for label in named)
    # A service account's name is an address, and a right's is a sentence.
    limited = [
        each for each in found.resources if "_iam_" not in each.kind and "@" not in each.name
    ]
    assert all(len(each.name) <= 63 for each in limited)
