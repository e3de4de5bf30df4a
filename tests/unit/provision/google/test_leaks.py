"""What `leaks` finds in a project, what it leaves alone, and what it says where it cannot know."""

from __future__ import annotations

import random

import pytest
from tests.unit.provision.google.google_cloud import GoogleCloud
from tests.unit.provision.google.seeded_project import Seeds, address, with_identities

from drillyard.provision.cluster_plan import ClusterPlan
from drillyard.provision.google.api import GoogleApis
from drillyard.provision.google.inventory import take_inventory
from drillyard.provision.google.leaks import find_leaks
from drillyard.provision.google.ownership import Ownership

OURS = {"drillyard-cluster": "train"}


@pytest.mark.parametrize("seed", [1, 2])
def test_all_of_500_leaks_are_found_and_no_decoy(
    cloud: GoogleCloud, apis: GoogleApis, plan: ClusterPlan, seed: int
) -> None:
    cloud.page_size = 40
    seeds = Seeds(cloud, random.Random(seed))
    seeds.fill(500)
    plan = with_identities(plan)

    taken = take_inventory(apis, plan.region)
    recognised = Ownership(plan, taken, apis.number()).recognise()
    kinds = {each.path: each.kind for each in taken.things}
    found = {address(kinds[path], path) for path in recognised.ours}
    assert found == seeds.expected
    assert not recognised.doubtful

    report = find_leaks(plan, apis)
    assert (len(report.leaks), report.exit_code) == (len(seeds.expected), 1)
    assert not report.unknown
