"""Names that Google Cloud limits to fewer characters than a cluster's name has, labels, and
descriptions of what cannot have labels."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping

from drillyard.provision.terraform_document import Because, because

PROJECT_ID = re.compile(r"(?:[a-z0-9.-]+\.[a-z]+:)?[a-z](?:[a-z0-9-]{0,28}[a-z0-9])?")
"""https://cloud.google.com/resource-manager/docs/creating-managing-projects#before_you_begin;
older ones begin with a domain, and some are short."""
ZONE = re.compile(r"[a-z]+(?:-[a-z]+)+[0-9]+-[a-z0-9]+")
REGION = re.compile(r"[a-z]+(?:-[a-z]+)+[0-9]+")
LONGEST_BUCKET = 63
LONGEST_SERVICE_ACCOUNT = 30


def shortened(name: str, ending: str, longest: int) -> str:
    """`name` and `ending`. Where that is too long, the beginning of the name with a checksum of it,
    so that clusters whose names begin alike do not meet."""
    if len(name) + len(ending) <= longest:
        return name + ending
    checksum = hashlib.sha256(name.encode()).hexdigest()[:6]
    beginning = name[: longest - len(ending) - len(checksum) - 1].rstrip("-.")
    return f"{beginning}-{checksum}{ending}"


def state_bucket_name(project: str, name: str) -> str:
    """The default bucket of Terraform's state. The domain of an old project's id is left out: a
    bucket with a domain in its name would have to be verified; one with Google's name in it is
    refused (https://cloud.google.com/storage/docs/buckets#naming)."""
    plain = f"{project.rpartition(':')[2]}-{name}".replace("google", "gcp").replace("goog", "gcp")
    return shortened(plain, "-tfstate", LONGEST_BUCKET)


def service_account_email(account: str, project: str) -> str:
    """https://cloud.google.com/iam/docs/service-account-types: example.com:p is p.example.com."""
    domain, _, identifier = project.rpartition(":")
    return f"{account}@{identifier}{f'.{domain}' if domain else ''}.iam.gserviceaccount.com"


def named(name: str) -> Because:
    """The name of a resource."""
    return because(name, "the cluster's name, and what it is", "cluster.yaml: name")


def described(cluster: str) -> Because:
    """The description of what cannot have labels: by it and by its name `leaks` knows it."""
    why = "it has no labels: this and its name identify it"
    return because(f"drillyard cluster {cluster}", why, "cluster.yaml: name")


def labelled(labels: Mapping[str, str]) -> Because:
    """The labels of a resource."""
    return because(
        dict(labels), "they identify it, also on bills", "cluster.yaml: name, cluster.labels"
    )


def bucket_name_problem(name: str) -> str | None:
    """Why Cloud Storage refuses the name of a bucket, or None
    (https://cloud.google.com/storage/docs/buckets#naming)."""
    if re.fullmatch(r"[a-z0-9][a-z0-9_.-]{1,220}[a-z0-9]", name) is None:
        return "is not 3 to 63 lower-case letters, digits, '-', '_' and '.'"
    if any(len(part) > LONGEST_BUCKET for part in name.split(".")):
        return f"has more than {LONGEST_BUCKET} characters"
    if "." in name:
        return "has a '.': such a name is a domain, which must be verified as yours; use '-'"
    if name.startswith("goog") or "google" in name:
        return "begins with 'goog' or contains 'google', which are Google's: give it another name"
    return None
