"""What the tag of a container image tells about its contents, where the image is a well-known one: CUDA and glibc.

An image that is not known, or whose tag does not follow the pattern of its name, tells nothing: nobody guesses. The
facts stand in images.yaml.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from pydantic import Field

from drillyard.hardware.catalog import packaged_rows
from drillyard.hardware.facts import CatalogRow, FactSource, Record

_REFERENCE = re.compile(r"(docker://)?(?P<path>[^@]+?)(:(?P<tag>[\w][\w.-]*))?(@sha256:[0-9a-f]+)?")
_DEFAULT_REGISTRY = "docker.io"


class Release(Record):
    """What an image holds from release `first` on, until the next one that is named."""

    first: str
    ubuntu: str
    cuda: str


class KnownImage(CatalogRow):
    """One well-known image: where it is and how to read its tags."""

    name: str
    registries: tuple[str, ...]
    tag: str
    releases: tuple[Release, ...] = ()
    ubuntu_glibc: dict[str, str] = Field(default={})


@dataclass(frozen=True, slots=True)
class ImageContents:
    """Versions in an image; None where its tag does not tell."""

    cuda: str | None
    glibc: str | None
    source: FactSource


def image_contents(image: str) -> ImageContents | None:
    """What the reference `image` tells about the image, or None. enroot's form `registry#name:tag` is read too."""
    read = _REFERENCE.fullmatch(image.replace("#", "/", 1))
    if read is None or read["tag"] is None:
        return None
    for known in _known():
        names = [f"{registry}/{known.name}" for registry in known.registries]
        if _DEFAULT_REGISTRY in known.registries:
            names.append(known.name)
        found = re.fullmatch(known.tag, read["tag"]) if read["path"] in names else None
        if found is not None:
            return _contents(known, found.groupdict())
    return None


def version_at_least(version: str, floor: str) -> bool:
    """Whether dotted `version` is `floor` or later."""
    return _numbers(version) >= _numbers(floor)


def _contents(known: KnownImage, told: Mapping[str, str]) -> ImageContents | None:
    cuda, ubuntu = told.get("cuda"), told.get("ubuntu")
    if "release" in told:
        since = [release for release in known.releases if version_at_least(told["release"], release.first)]
        if not since:
            return None
        cuda, ubuntu = since[-1].cuda, since[-1].ubuntu
    glibc = _known()[0].ubuntu_glibc.get(ubuntu) if ubuntu is not None else None
    return ImageContents(cuda, glibc, known.provenance.row)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


@cache
def _known() -> tuple[KnownImage, ...]:
    return packaged_rows(KnownImage, "images")
