"""The digests of the images that a cluster's DaemonSets run, privileged on every GPU node.

Their publishers name tags, which can be moved. So `up` asks the registry which digest a tag names,
once: it puts the digest into the chart's values and records it in the bucket of the state, and each
later `up` installs the recorded one and says when the tag has moved. `cluster.images` of the config
decides otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from drillyard.errors import UserError
from drillyard.programs import parallel_map
from drillyard.provision.cluster_chart import OWN_CHART, images_of, with_images
from drillyard.provision.cluster_plan import ClusterPlan

_AT_ONCE = 8
Digests = Mapping[str, str]
"""Digest by image with its tag."""


def with_digests(plan: ClusterPlan, digests: Digests) -> ClusterPlan:
    """The plan whose DaemonSets run these digests."""
    releases = [
        replace(each, values=with_images(each.values, digests)) if each.chart == OWN_CHART else each
        for each in plan.releases
    ]
    return replace(plan, releases=tuple(releases))


def has_images(plan: ClusterPlan) -> bool:
    """Whether the cluster gets DaemonSets."""
    return bool(_images(plan))


def given_digests(plan: ClusterPlan) -> dict[str, str]:
    """Those of the config, by their images."""
    parts = (each.rpartition("@") for each in _images(plan))
    return {image: digest for image, _, digest in parts if ":" in image.rpartition("/")[2]}


def chosen_digests(
    plan: ClusterPlan,
    recorded: Digests,
    digest_of: Callable[[str], str],
    report: Callable[[str], None],
) -> dict[str, str]:
    """The digest of every image of the plan that has none: the recorded one, or else what the
    registry says. Raises one UserError with all images whose digest is not found."""
    images = [each for each in _images(plan) if "@" not in each]

    def ask(image: str) -> str | UserError:
        try:
            return digest_of(image)
        except UserError as error:
            return error

    chosen, failed = dict[str, str](), dict[str, UserError]()
    for image, found in zip(images, parallel_map(ask, images, _AT_ONCE), strict=True):
        known = recorded.get(image)
        if known is None and isinstance(found, UserError):
            failed[image] = found
            continue
        chosen[image] = known or str(found)
        if isinstance(found, UserError):
            report(f"{image}: stays at {known}; whether its tag has moved is unknown: {found}")
        elif known is None:
            report(f"{image}: {found}")
        elif known != found:
            report(
                f"warning: {image}: its tag has moved to {found}, and the cluster stays at {known}"
                f"\nTake the new one: {_option({image: found})}"
            )
    if failed:
        unknown = dict.fromkeys(failed, "sha256:DIGEST")
        raise UserError(
            "\n".join(f"{image}: its digest is unknown: {why}" for image, why in failed.items())
            + "\nAsk where the registry answers: docker buildx imagetools inspect IMAGE"
            f"\nThen give it: {_option(unknown)}"
        )
    return chosen


def _option(digests: Digests) -> str:
    pinned = ", ".join(f"{image}@{digest}" for image, digest in digests.items())
    return f"--set 'cluster.images=[{pinned}]', or images: [{pinned}] in the section cluster"


def _images(plan: ClusterPlan) -> list[str]:
    values = (each.values for each in plan.releases if each.chart == OWN_CHART)
    return list(dict.fromkeys(image for each in values for image in images_of(each)))
