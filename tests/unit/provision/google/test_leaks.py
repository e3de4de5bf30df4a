"""What `leaks` finds in a project, what it leaves alone, and what it says where it cannot know."""

from __future__ import annotations

import random
import re
import shlex
from pathlib import Path

import pytest
from tests.unit.provision.google.google_cloud import GoogleCloud
from tests.unit.provision.google.seeded_project import (
    GKE,
    REGION,
    ZONE,
    Seeds,
    with_identities,
)

from drillyard.provision.cluster_plan import ClusterPlan
from drillyard.provision.google import leaks
from drillyard.provision.google.api import GoogleApis
from drillyard.provision.google.inventory import Inventory
from drillyard.provision.google.leaks import find_leaks
from drillyard.provision.google.listings import LISTINGS, RESIZE_REQUESTS

OURS = {"drillyard-cluster": "train"}
COMMANDS = Path(__file__).with_name("gcloud_commands.txt")
NOT_LISTED = ("google_project_service", "google_storage_bucket_iam_member")
"""An enabled service costs nothing; a right on a bucket goes with it."""


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[Inventory]:
    """The inventories that `leaks` takes."""
    kept: list[Inventory] = []

    def take(apis: GoogleApis, region: str) -> Inventory:
        kept.append(take_inventory(apis, region))
        return kept[-1]

    take_inventory = leaks.take_inventory
    monkeypatch.setattr(leaks, "take_inventory", take)
    return kept


@pytest.mark.parametrize("seed", [1, 2])
def test_all_of_500_leaks_are_found_and_no_decoy(
    cloud: GoogleCloud, apis: GoogleApis, plan: ClusterPlan, seed: int
) -> None:
    cloud.page_size = 60
    seeds = Seeds(cloud, random.Random(seed))
    seeds.fill(500)
    report = find_leaks(with_identities(plan), apis)
    found = sorted((each.name, each.location) for each in report.leaks)
    assert found == sorted(map(_named, seeds.expected))
    assert (report.exit_code, report.unknown, report.doubtful) == (1, (), ())
    wanted = {row.kind for row in (*LISTINGS, RESIZE_REQUESTS) if not row.never_ours}
    wanted |= {row.part.kind for row in LISTINGS if row.part is not None}
    # The global list and the list of all places both have these.
    both = {"google_compute_global_forwarding_rule", "google_compute_global_address"}
    both |= {"google_compute_global_network_endpoint_group"}
    assert wanted - {each.kind for each in report.leaks} <= both


def _named(expected: tuple[str, str]) -> tuple[str, str]:
    service, path = expected
    if service == "cloudresourcemanager":
        return path, ""
    place = re.match("(zones|regions|locations)/([^/]+)/", path)
    if service == "storage":
        return path.rpartition("/")[2], REGION
    return path.rpartition("/")[2], place[2] if place else ""


def test_the_commands_delete_everything_in_their_order(
    cloud: GoogleCloud, apis: GoogleApis, plan: ClusterPlan
) -> None:
    """The server refuses to delete what another thing uses."""
    cloud.page_size = 60
    Seeds(cloud, random.Random(3)).fill(250)
    for command in find_leaks(with_identities(plan), apis).commands:
        run_gcloud(cloud, command)
    left = find_leaks(with_identities(plan), apis)
    assert (left.leaks, left.exit_code) == ((), 0)


def test_a_deletion_that_is_lost_is_found(
    cloud: GoogleCloud, apis: GoogleApis, plan: ClusterPlan
) -> None:
    cloud.add("compute", f"zones/{ZONE}/disks/pvc-1", labels=GKE)
    cloud.lost_deletes.add("pvc-1")
    run_gcloud(cloud, find_leaks(plan, apis).commands[0])
    assert [each.name for each in find_leaks(plan, apis).leaks] == ["pvc-1"]


def test_every_command_was_accepted_by_gcloud(
    cloud: GoogleCloud, apis: GoogleApis, plan: ClusterPlan
) -> None:
    """tools/gcloud_commands.py asks gcloud's own parser, and writes what it accepts."""
    cloud.page_size = 60
    Seeds(cloud, random.Random(4)).fill(400)
    commands = find_leaks(with_identities(plan), apis).commands
    shapes = {shape(each) for command in commands for each in command.split(" && ")}
    accepted = set(COMMANDS.read_text().splitlines())
    assert shapes - accepted == set()


def shape(command: str) -> str:
    """A command with the same made-up values wherever values differ."""
    argv = shlex.split(command)
    flags = [each.partition("=")[0] + ("=x1" if "=" in each else "") for each in argv]
    verbs = ("delete", "rm", "remove-iam-policy-binding", "cancel", "update", "import")
    end = next(index for index, word in enumerate(flags) if word in verbs) + 1
    return " ".join(
        word if index < end or word.startswith("--") else "gs://x1" if "://" in word else "x1"
        for index, word in enumerate(flags)
    )


_COLLECTIONS = {
    "networks subnets": "subnetworks",
    "networks peerings": "peerings",
    "instance-groups managed": "instanceGroupManagers",
    "instance-groups managed resize-requests": "resizeRequests",
    "instance-groups unmanaged": "instanceGroups",
    "network-firewall-policies": "firewallPolicies",
    "network-firewall-policies associations": "associations",
    "firewall-rules": "firewalls",
    "interconnects attachments": "interconnectAttachments",
    "routers nats": "nats",
    "managed-zones": "managedZones",
    "response-policies": "responsePolicies",
}


def run_gcloud(cloud: GoogleCloud, command: str) -> None:
    """Do what the command says to the local project."""
    words = shlex.split(command.rpartition(" && ")[2])[1:]
    flags = dict(each.lstrip("-").partition("=")[::2] for each in words if each.startswith("--"))
    plain = [each for each in words if not each.startswith("--") and each != "beta"]
    if plain[0] == "projects":
        for binding in cloud.bindings:
            if binding["role"] == flags["role"]:
                binding["members"].remove(flags["member"])
        return
    if plain[0] == "storage":
        assert cloud.delete("storage", f"b/{plain[-1].removeprefix('gs://')}")
        return
    verb = next(each for each in ("delete", "cancel") if each in plain)
    group = " ".join(plain[1 : plain.index(verb)])
    names = plain[plain.index(verb) + 1 :]
    name = names[0] if names else flags.get("name", "")
    service = plain[0] if plain[0] in ("compute", "container", "dns", "lustre") else ""
    service = service or {"artifacts": "artifactregistry", "filestore": "file"}.get(
        plain[0], plain[0]
    )
    collection = _COLLECTIONS.get(group) or re.sub("-(.)", lambda found: found[1].upper(), group)
    place = "global"
    for key in ("zone", "region", "location"):
        if key in flags:
            place = f"{key}s/{flags[key]}"
    paths = {
        "peerings": f"global/networks/{flags.get('network')}/peerings/{name}",
        "associations": f"global/firewallPolicies/{flags.get('firewall-policy')}/associations/{name}",
        "nats": f"{place}/routers/{flags.get('router')}/nats/{name}",
        "resizeRequests": (
            f"{place}/instanceGroupManagers/{name}/resizeRequests/{flags.get('resize-requests')}"
        ),
    }
    path = paths.get(collection, f"{place}/{collection}/{name}")
    if service in ("dns", "iam"):
        path = f"{collection}/{name}".replace("service-accounts", "serviceAccounts")
    if collection == "nodePools":
        path = f"{place}/clusters/{flags['cluster']}/nodePools/{name}"
    assert cloud.delete(service, path), command
    _delete_with(cloud, service, path)


def _delete_with(cloud: GoogleCloud, service: str, path: str) -> None:
    """What the cloud deletes with a cluster, a group of instances or an instance."""
    name = path.rpartition("/")[2]
    if "/clusters/train" in path:
        for other, body in list(cloud.things.items()):
            labels = body.get("labels") or (body.get("properties") or {}).get("labels") or {}
            ours = labels.get("goog-k8s-node-pool-name") and labels == {**labels, **GKE}
            if ours or re.match("gke-train-(?!.*pvc)", other[1].rpartition("/")[2]):
                cloud.things.pop(other, None)
        for other in [each for each in cloud.things if "/resizeRequests/" in each[1]]:
            if (other[0], other[1].rpartition("/resizeRequests/")[0]) not in cloud.things:
                del cloud.things[other]
