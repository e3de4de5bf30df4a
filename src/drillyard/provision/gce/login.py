"""How one logs in to the nodes: by a key in their metadata, or by the project's OS Login.

Google's agent on a machine makes the user of a key (https://cloud.google.com/compute/docs/connect/add-ssh-keys).
Keys of the whole project are kept out: they would let others in. With OS Login the project's roles
decide, and no key is put anywhere (https://cloud.google.com/compute/docs/oslogin).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from drillyard.config.cluster import ClusterConfig
from drillyard.config.problems import Problem
from drillyard.errors import UserError
from drillyard.hardware.cloud_limits import limit
from drillyard.provision.gce.config import DEFAULT_USER, GceConfig

_KEY_TYPES = ("ssh-", "ecdsa-", "sk-ssh-", "sk-ecdsa-")
_NEW_KEY = "~/.ssh/drillyard"
_NEW_USER = re.compile("[a-z_][a-z0-9_-]{0,31}")
"""useradd(8) of Debian and Ubuntu."""


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
    if not section.os_login and _NEW_USER.fullmatch(user_of(section)) is None:
        message = (
            f"'{section.user}' is not a name that the nodes make a user of: at most 32 lower-case"
            " letters, digits, '_' and '-', beginning with a letter or '_'"
        )
        yield Problem(("gce", "user"), message)
    if not section.os_login and key in (None, "none"):
        message = (
            "missing: the key by which you log in to the nodes: ssh-keygen -t ed25519 -f"
            f" {_NEW_KEY}, then gce: {{identity_file: {_NEW_KEY}}}; or os_login: true"
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


def public_key(identity_file: str) -> str:
    """The public half of a key, one line. Raises UserError."""
    path = Path(f"{identity_file}.pub")
    make = f"ssh-keygen -t ed25519 -f {shlex.quote(identity_file)}"
    if Path(identity_file).exists():
        make = f"ssh-keygen -y -f {shlex.quote(identity_file)} >{shlex.quote(str(path))}"
    text = _read(path, f"the public half of the key; make it: {make}").strip()
    if not text.startswith(_KEY_TYPES) or len(text.splitlines()) != 1:
        raise UserError(f"{path}: is not the public half of an ssh key; make it again: {make}")
    return text


def startup_script(file: str) -> str:
    """The text of the script. Raises UserError."""
    text = _read(Path(file), "write it, or remove the setting")
    allowed = limit("metadata-value")
    if not allowed.allows(size := len(text.encode())):
        raise UserError(
            f"{file}: has {size} bytes, and a node takes {allowed.in_words}: let it fetch the rest"
        )
    if not text.startswith("#!"):
        raise UserError(f"{file}: is not a script: its first line must be one such as #!/bin/sh")
    return text


def _read(path: Path, fix: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}: {fix}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: is not text: {fix}") from None
