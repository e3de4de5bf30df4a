"""gcloud commands that the code prints: their shapes, and what they do to the local project."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

from tests.unit.provision.google.google_cloud import GoogleCloud
from tests.unit.provision.google.seeded_project import GKE

ACCEPTED = frozenset(Path(__file__).with_name("gcloud_commands.txt").read_text().splitlines())
"""Shapes that gcloud's own parser accepts: tools/gcloud_commands.py."""


def shape(command: str) -> str:
    """A command with the same made-up values wherever values differ."""
    argv = shlex.split(command)
    flags = [each if each in _FIXED else re.sub("(?<==).+", "x1", each) for each in argv]
    end = next(index for index, word in enumerate(flags) if word in _VERBS) + 1
    words = [
        word if index < end or word.startswith("--") else _value(word)
        for index, word in enumerate(flags)
    ]
    # However many names there are.
    return re.sub(r"( x1)+( --|$)", r" x1\2", " ".join(words))


def _value(word: str) -> str:
    if "://" in word:
        return "gs://x1"
    return "x1@x1.iam.gserviceaccount.com" if "@" in word else "x1"


_FIXED = ("--condition=None", "--reservation-sharing-policy=ALLOW_ALL")
_VERBS = ("delete", "rm", "cancel", "update", "import", "list", "enable", "link", "undelete")
_VERBS += ("remove-iam-policy-binding", "add-iam-policy-binding", "get-server-config")
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
        "associations": (
            f"global/firewallPolicies/{flags.get('firewall-policy')}/associations/{name}"
        ),
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
    if "/instanceGroupManagers/" in path and "/resizeRequests/" not in path:
        made_by = f'/{path}"'
        for other, body in list(cloud.things.items()):
            if "/instances/" in other[1] and made_by in json.dumps(body.get("metadata", {})):
                del cloud.things[other]
    if "/instances/" in path:
        for other, body in list(cloud.things.items()):
            if "/disks/" in other[1] and any(path in each for each in body.get("users", ())):
                del cloud.things[other]
    if "/clusters/train" in path:
        for other, body in list(cloud.things.items()):
            labels = body.get("labels") or (body.get("properties") or {}).get("labels") or {}
            ours = labels.get("goog-k8s-node-pool-name") and labels == {**labels, **GKE}
            if ours or re.match("gke-train-(?!.*pvc)", other[1].rpartition("/")[2]):
                cloud.things.pop(other, None)
        for other in [each for each in cloud.things if "/resizeRequests/" in each[1]]:
            if (other[0], other[1].rpartition("/resizeRequests/")[0]) not in cloud.things:
                del cloud.things[other]
