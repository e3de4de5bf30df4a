"""Whether the image that a Dockerfile starts from fits a cluster's machines, before it is built."""

from __future__ import annotations

from collections.abc import Iterator

from drillyard.config.cluster import ClusterConfig
from drillyard.errors import ConfigError
from drillyard.hardware.catalog import Catalog
from drillyard.hardware.image_tags import image_contents, version_at_least
from drillyard.launch.image_rules import floor_findings, image_floors
from drillyard.provision.images.dockerfile import BaseImage

PLATFORMS = {"x86_64": "linux/amd64", "arm64": "linux/arm64"}


def image_platform(cluster: ClusterConfig | None, facts: Catalog) -> str:
    """The platform of images for the cluster's machines, `linux/amd64` or `linux/arm64`."""
    machine = None if cluster is None else facts.find_machine(cluster.machine or "")
    return PLATFORMS["x86_64" if machine is None else machine.architecture]


def require_base(
    base: BaseImage,
    dockerfile: str,
    cluster: ClusterConfig | None,
    facts: Catalog,
    driver: str | None,
) -> list[str]:
    """What is not known of the base, a line each: whether it fits, which of its builds it is.

    Raises one ConfigError with every version of it that is too old for the cluster's machine or its
    network stack, or too new for `driver`, that of the nodes.
    """
    place = f"{dockerfile}:{base.line}"
    fix = f"--build-arg {base.argument}=IMAGE" if base.argument else f"another FROM in {dockerfile}"
    wrong, unknown = list[str](), list[str]()
    for fatal, message in _findings(base.image, cluster, facts, driver):
        (wrong if fatal else unknown).append(f"{place}: {message}")
    if wrong:
        raise ConfigError("\n".join([*wrong, f"Choose another base: {fix}"]))
    if base.image != "scratch" and "@" not in base.image:
        unknown.append(
            f"{place}: {base.image} can be moved to another build; the same bytes each time need"
            f" its digest: docker buildx imagetools inspect {base.image}"
        )
    return unknown


def _findings(
    image: str, cluster: ClusterConfig | None, facts: Catalog, driver: str | None
) -> Iterator[tuple[bool, str]]:
    if cluster is not None:
        machine = None if cluster.machine is None else facts.machine(cluster.machine)
        for found in floor_findings(image, image_floors(cluster, machine, facts)):
            yield found.fatal, found.message
    if driver is None:
        return
    contents = image_contents(image)
    if contents is None or contents.driver is None:
        yield False, f"the tag of {image} does not show which driver it needs"
    elif not version_at_least(driver, contents.driver.value):
        yield (
            True,
            f"{image} has CUDA {contents.cuda}, which needs driver"
            f" {contents.driver.value} or later ({contents.driver.source}); the nodes have"
            f" {driver}: take an earlier CUDA, or a later driver",
        )
