"""CUDA and glibc of well-known container images, read from their tags by the patterns in
images.yaml.

An unknown image, or a tag that does not match its pattern, gives None: nothing is guessed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from pydantic import Field

from drillyard.hardware.catalog import packaged_rows
from drillyard.hardware.facts import CatalogRow, Fact, FactSource, Record

_REFERENCE = re.compile(r"(docker://)?(?P<path>[^@]+?)(:(?P<tag>[\w][\w.-]*))?(@sha256:[0-9a-f]+)?")
_DEFAULT_REGISTRY = "docker.io"


class Release(Record):
    """Versions in an image from release `first` until the next listed release."""

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
    cuda_drivers: dict[str, str] = Field(default={})


@dataclass(frozen=True, slots=True)
class ImageContents:
    """Versions in an image, and the oldest driver that runs its CUDA; None where its tag does not
    say."""

    cuda: str | None
    glibc: str | None
    source: FactSource
    driver: Fact[str] | None


def image_contents(image: str) -> ImageContents | None:
    """The contents of the image at the reference `image`, or None; also in enroot's form
    `registry#name:tag`."""
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


def _contents(known: KnownImage, found: Mapping[str, str]) -> ImageContents | None:
    cuda, ubuntu = found.get("cuda"), found.get("ubuntu")
    if "release" in found:
        since = [
            release
            for release in known.releases
            if version_at_least(found["release"], release.first)
        ]
        if not since:
            return None
        cuda, ubuntu = since[-1].cuda, since[-1].ubuntu
    first = _known()[0]
    glibc = first.ubuntu_glibc.get(ubuntu) if ubuntu is not None else None
    major = (cuda or "").partition(".")[0]
    driver = first.fact(f"cuda_drivers.{major}") if major in first.cuda_drivers else None
    return ImageContents(cuda, glibc, known.provenance.row, driver)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


@cache
def _known() -> tuple[KnownImage, ...]:
    return packaged_rows(KnownImage, "images")
