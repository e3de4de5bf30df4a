"""What a cluster's machines need of a container image: the oldest CUDA and the oldest glibc.

A network stack's libraries, which are mounted into the image, need its C library to be new enough.
Programs of an older CUDA have no code for a newer GPU. What an image has is read from its tag
(`hardware/image_tags.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from drillyard.config.cluster import ClusterConfig
from drillyard.hardware.catalog import Catalog
from drillyard.hardware.facts import Fact
from drillyard.hardware.image_tags import image_contents, version_at_least
from drillyard.hardware.machines import Machine
from drillyard.launch.network import stack_of

_CUDA_COMMAND = "python3 -c 'import torch; print(torch.version.cuda)'"


@dataclass(frozen=True)
class ImageFloor:
    """The oldest version of `part` that an image may have, and who needs it; `command` prints the
    version where it is run in the image."""

    part: Literal["cuda", "glibc"]
    oldest: Fact[str]
    needed_by: str
    command: str

    @property
    def title(self) -> str:
        return {"glibc": "glibc", "cuda": "CUDA"}[self.part]

    @property
    def rule(self) -> str:
        return f"{self.needed_by} needs {self.title} >= {self.oldest.value} ({self.oldest.source})"


@dataclass(frozen=True)
class FloorFinding:
    """What a floor says of an image; `fatal`: the image is too old, otherwise its tag does not
    show it."""

    fatal: bool
    message: str


def image_floors(
    cluster: ClusterConfig, machine: Machine | None, facts: Catalog
) -> Iterator[ImageFloor]:
    """What runs on the cluster need of their image."""
    stack = stack_of(cluster, machine, facts)
    if stack is not None and cluster.nodes > 1 and "glibc" in stack.requires:
        glibc: Fact[str] = stack.fact("requires.glibc")
        yield ImageFloor("glibc", glibc, f"network stack {stack.name}", "ldd --version")
    accelerator = None if machine is None else facts.accelerator_of(machine)
    if accelerator is not None and accelerator.min_cuda is not None:
        cuda: Fact[str] = accelerator.fact("min_cuda")
        yield ImageFloor("cuda", cuda, accelerator.title, _CUDA_COMMAND)


def floor_findings(image: str, floors: Iterator[ImageFloor]) -> Iterator[FloorFinding]:
    """What is wrong with an image, or cannot be seen."""
    contents = image_contents(image)
    for floor in floors:
        version = None if contents is None else getattr(contents, floor.part)
        if contents is None or version is None:
            yield FloorFinding(
                False,
                f"{floor.rule}, and the tag of {image} does not show it; run in the image:"
                f" {floor.command}",
            )
        elif not version_at_least(version, floor.oldest.value):
            has = f"{image} has {floor.title} {version} ({contents.source.text})"
            yield FloorFinding(True, f"{has}; {floor.rule}: take a later tag")
