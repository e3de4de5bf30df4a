"""A launched run's address, `platform://cluster/run`, which means the same on every machine."""

from __future__ import annotations

import re
from dataclasses import dataclass

from drillyard.errors import UserError

_HANDLE = re.compile(r"(?P<platform>[a-z]+)://(?P<cluster>[a-z][a-z0-9-]*)/(?P<run>[a-z0-9][a-z0-9._-]*)")


@dataclass(frozen=True, order=True)
class Handle:
    """Where a run is."""

    platform: str
    cluster: str
    run: str

    def __str__(self) -> str:
        return f"{self.platform}://{self.cluster}/{self.run}"


def parse_handle(text: str) -> Handle:
    """The handle that `text` is. Raises UserError otherwise."""
    found = _HANDLE.fullmatch(text)
    if found is None:
        raise UserError(
            f"'{text}' is not a run's handle; one looks like slurm://my-cluster/my-run (drillyard runs list)"
        )
    return Handle(**found.groupdict())
