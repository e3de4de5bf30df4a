"""The Terraform or OpenTofu of this machine: which one is used, and whether it is new enough."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from drillyard.errors import NotFoundError, UserError
from drillyard.programs import Programs

NAMES = ("terraform", "tofu")
"""In the order of preference; both read the same documents and take the same options."""
INSTALL = {
    "terraform": "https://developer.hashicorp.com/terraform/install",
    "tofu": "https://opentofu.org/docs/intro/install",
}
_SECONDS = 60.0


@dataclass(frozen=True)
class TerraformProgram:
    """A program that was found on PATH. `version`: (1, 11, 4)."""

    path: str
    name: str
    version: tuple[int, ...]


def minimum_version(document: Mapping[str, Any]) -> tuple[int, ...]:
    """The oldest version that may read a Terraform document: `>=` of its required_version."""
    required = str(document.get("terraform", {}).get("required_version", ""))
    found = re.search(r">=\s*([0-9.]+)", required)
    return _numbers(found[1]) if found else (0,)


def find_terraform(minimum: tuple[int, ...]) -> TerraformProgram:
    """The first of `NAMES` on PATH that is new enough. Raises NotFoundError where there is none,
    UserError where all are too old or print no version."""
    wanted = ".".join(map(str, minimum))
    refused = []
    for name in NAMES:
        path = shutil.which(name)
        if path is None:
            continue
        version = _version(path)
        if version is None:
            refused.append(f"{path} prints no version")
        elif version < minimum:
            refused.append(f"{path} is {'.'.join(map(str, version))}")
        else:
            return TerraformProgram(path, name, version)
    how = f"install it: {INSTALL['terraform']} (or OpenTofu: {INSTALL['tofu']})"
    if refused:
        raise UserError(f"terraform {wanted} or newer is needed; {', '.join(refused)}; {how}")
    raise NotFoundError(
        f"neither terraform nor tofu is on PATH; {wanted} or newer is needed; {how}"
    )


def _version(path: str) -> tuple[int, ...] | None:
    ended = Programs().run([path, "version", "-json"], timeout=_SECONDS)
    found = re.search(r'"terraform_version"\s*:\s*"v?([0-9]+\.[0-9]+(?:\.[0-9]+)?)', ended.stdout)
    # Before 0.13 there was no JSON.
    found = found or re.match(
        r"(?:Terraform|OpenTofu) v([0-9]+\.[0-9]+(?:\.[0-9]+)?)", ended.stdout
    )
    return _numbers(found[1]) if found else None


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.strip(".").split("."))
