"""Rules of places: the region of a cluster, the zones of its pools, the location of its bucket.

What exists is `hardware/regions.yaml`, over which a user's hardware file may lay newer regions.
What a zone has (machines, GPUs, RDMA) only the project knows: `plan --check`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import get_close_matches

from drillyard.config.cluster import ClusterConfig
from drillyard.config.problems import Problem
from drillyard.hardware.capacity import region_of
from drillyard.hardware.catalog import Catalog
from drillyard.hardware.cluster_parts import Region
from drillyard.provision.cluster_plan import Pool
from drillyard.provision.gcp.names import REGION, ZONE
from drillyard.provision.pools import key_path

_EXAMPLE = "us-central1"


def place_problems(
    cluster: ClusterConfig, pools: Sequence[Pool], facts: Catalog
) -> Iterator[Problem]:
    """What is wrong with the region and the zones: each is there, and they are of one region."""
    location, region = cluster.location, region_of(cluster)
    assert location is not None and region is not None
    zone = location.zone
    known = facts.regions.get(region)
    if location.region is not None and (known is None or not known.zones):
        yield Problem(("location", "region"), _unknown_region(region, zone, facts))
    if location.region is None and known is None:
        region = _EXAMPLE  # The zone alone is what is wrong.
    if zone is not None and (wrong := _zone_problem(zone, region, facts)) is not None:
        yield Problem(("location", "zone"), wrong)
    for pool in pools:
        # Without a zone of its own a pool is in the file's, of which it is said already.
        own = pool.key and pool.zone != zone
        if own and (wrong := _zone_problem(pool.zone, region, facts)) is not None:
            yield Problem(key_path(pool, "zone"), wrong)


def bucket_location_problem(location: str, facts: Catalog) -> str | None:
    """Why a bucket cannot be in `location`, or None. Cloud Storage takes either case."""
    by_case = {name.lower(): name for name in facts.regions}
    if location.lower() in by_case:
        return None
    if (region := _region_of_zone(location, facts)) is not None:
        return f"{location} is a zone, and buckets are in regions: write {region.name}"
    near = _nearest(location.lower(), by_case)
    hint = f"did you mean {by_case[near]}?" if near else "write a region, US, EU or ASIA"
    return f"'{location}' is not a location of buckets; {hint}"


def _unknown_region(region: str, zone: str | None, facts: Catalog) -> str:
    if (named := _region_of_zone(region, facts)) is not None:
        return f"{region} is a zone: write {named.name} here, and zone: {region}"
    of_zone = None if zone is None else _region_of_zone(zone, facts)
    names = [row.name for row in facts.regions.values() if row.zones]
    near = of_zone.name if of_zone is not None else _nearest(region, names)
    hint = f"did you mean {near}?" if near else "write one such as us-central1."
    return f"'{region}' is not a known region of Google Cloud; {hint}{_newer(region, facts)}"


def _zone_problem(zone: str, region: str, facts: Catalog) -> str | None:
    found, named = _region_of_zone(zone, facts), facts.regions.get(region)
    if found is not None and found.name == region:
        return None
    if found is not None:
        if named is None or not named.zones:
            return None  # The region is what is wrong.
        return (
            f"{zone} is not in the cluster's region {region} (location.region): write one of"
            f" {_zones(named)}, or region: {found.name}"
        )
    if (called := facts.regions.get(zone)) is not None and called.zones:
        return f"{zone} is a region; a pool is in one of its zones: {_zones(called)}"
    own = facts.regions.get(zone.rpartition("-")[0])
    if own is None and zone.rpartition("-")[0] == region and ZONE.fullmatch(zone):
        return None  # The same mistake as in the region.
    everywhere = [each for row in facts.regions.values() for each in row.zone_names]
    for likely in (zone.strip().lower(), f"{region}-{zone.strip().lower()}"):
        if likely in everywhere:
            return f"'{zone}' is not a known zone; did you mean {likely}?"
    if own is not None:
        return f"'{zone}' is not a known zone; {own.name} has {_zones(own)}.{_newer(zone, facts)}"
    near = _nearest(zone, named.zone_names if named is not None and named.zones else everywhere)
    which = f"did you mean {near}?" if near else f"write one such as {region}-a."
    return f"'{zone}' is not a known zone; {which}{_newer(zone, facts)}"


def _newer(place: str, facts: Catalog) -> str:
    """The way to give a place that is newer than our list, for what may be one."""
    region, _, ending = place.rpartition("-") if ZONE.fullmatch(place) else (place, "", "a")
    if REGION.fullmatch(region) is None:
        return ""
    known = facts.regions.get(region)
    zones = ", ".join((*(known.zones if known else ()), ending))
    row = f"regions: [{{name: {region}, zones: [{zones}]}}]"
    return f" If it is newer than our list, give it a row in a file (--hardware FILE): {row}"


def _region_of_zone(zone: str, facts: Catalog) -> Region | None:
    row = facts.regions.get(zone.rpartition("-")[0])
    return row if row is not None and zone in row.zone_names else None


def _zones(region: Region) -> str:
    return ", ".join(region.zone_names)


def _nearest(word: str, words: Sequence[str] | dict[str, str]) -> str | None:
    return next(iter(get_close_matches(word, list(words), n=1, cutoff=0.75)), None)
