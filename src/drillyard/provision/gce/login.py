"""How one logs in to the nodes: by a key in their metadata, or by the project's OS Login.

Google's agent on a machine makes the user of a key (https://cloud.google.com/compute/docs/connect/add-ssh-keys).
Keys of the whole project are kept out: they would let others in. With OS Login the project's roles
decide, and no key is put anywhere (https://cloud.google.com/compute/docs/oslogin).
"""

from __future__ import annotations

from collections.abc import Iterator

from drillyard.config.cluster import ClusterConfig
from drillyard.config.problems import Problem
from drillyard.errors import UserError
from drillyard.hardware.cloud_limits import limit
from drillyard.provision.gce.config import GceConfig
from drillyard.provision.node_login import (
    DEFAULT_USER,
    NEW_KEY,
    public_key,
    script_text,
    user_problem,
)


def login_problems(cluster: ClusterConfig) -> Iterator[Problem]:
    """What is wrong with the settings by which one logs in, and with the files that they name."""
    section = cluster.section_as(GceConfig)
    key = section.identity_file
    if section.os_login and section.user is None:
        message = (
            "missing: with os_login it is the name that the project has for you: gcloud compute"
            " os-login describe-profile --format='value(posixAccounts[0].username)'"
        )
        yield Problem(("gce", "user"), message)
    if not section.os_login and (wrong := user_problem(user_of(section))) is not None:
        yield Problem(("gce", "user"), wrong)
    if not section.os_login and key in (None, "none"):
        message = (
            "missing: the key by which you log in to the nodes: ssh-keygen -t ed25519 -f"
            f" {NEW_KEY}, then gce: {{identity_file: {NEW_KEY}}}; or os_login: true"
        )
        yield Problem(("gce", "identity_file"), message)
    elif not section.os_login:
        try:
            public_key(str(key))
        except UserError as error:
            yield Problem(("gce", "identity_file"), str(error))
    if section.startup_script is not None:
        try:
            startup_script(section.startup_script)
        except UserError as error:
            yield Problem(("gce", "startup_script"), str(error))


def user_of(section: GceConfig) -> str:
    """The login on the nodes."""
    return section.user or DEFAULT_USER


def startup_script(file: str) -> str:
    """The text of the script. Raises UserError."""
    text = script_text(file)
    allowed = limit("metadata-value")
    if not allowed.allows(size := len(text.encode())):
        raise UserError(
            f"{file}: has {size} bytes, and a node takes {allowed.in_words}: let it fetch the rest"
        )
    return text
