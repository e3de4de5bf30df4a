"""How one logs in to the nodes that a cloud makes: a user of theirs, and the public half of a
key."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from drillyard.errors import UserError

DEFAULT_USER = "drillyard"
NEW_KEY = "~/.ssh/drillyard"
_KEY_TYPES = ("ssh-", "ecdsa-", "sk-ssh-", "sk-ecdsa-")
_NEW_USER = re.compile("[a-z_][a-z0-9_-]{0,31}")
"""useradd(8) of Debian and Ubuntu."""


def user_problem(user: str) -> str | None:
    """Why the nodes cannot make a user of this name, or None."""
    if _NEW_USER.fullmatch(user) is not None:
        return None
    return (
        f"'{user}' is not a name that the nodes make a user of: at most 32 lower-case letters,"
        " digits, '_' and '-', beginning with a letter or '_'"
    )


def public_key(identity_file: str) -> str:
    """The public half of a key, one line. Raises UserError."""
    path = Path(f"{identity_file}.pub")
    make = f"ssh-keygen -t ed25519 -f {shlex.quote(identity_file)}"
    if Path(identity_file).exists():
        make = f"ssh-keygen -y -f {shlex.quote(identity_file)} >{shlex.quote(str(path))}"
    text = file_text(path, f"the public half of the key; make it: {make}").strip()
    if not text.startswith(_KEY_TYPES) or len(text.splitlines()) != 1:
        raise UserError(f"{path}: is not the public half of an ssh key; make it again: {make}")
    return text


def script_text(file: str) -> str:
    """The text of a script for the nodes. Raises UserError."""
    text = file_text(Path(file), "write it, or remove the setting")
    if not text.startswith("#!"):
        raise UserError(f"{file}: is not a script: its first line must be one such as #!/bin/sh")
    return text


def file_text(path: Path, fix: str) -> str:
    """The text of a file of this machine. Raises UserError, with `fix`, where there is none."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}: {fix}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: is not text: {fix}") from None


def verbatim(text: str) -> str:
    """A text in which Terraform reads no expressions: their beginnings, doubled, are text."""
    return text.replace("${", "$${").replace("%{", "%%{")
