"""What `plan` says exists, what Terraform made and what `leaks` lists are the same set, for every
machine in every way of buying it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.integration.provision.same_sets import differences
from tests.unit.provision import vm_clusters
from tests.unit.provision.clusters import OFFERS

PROJECTS = 5


@pytest.mark.parametrize("number", range(PROJECTS))
def test_plan_terraform_and_leaks_have_the_same_set(tmp_path: Path, number: int) -> None:
    offers = OFFERS[number::PROJECTS]
    assert len(offers) >= 25
    assert differences(tmp_path, offers) == []


def test_the_same_of_every_machine_as_hosts(tmp_path: Path) -> None:
    offers = sorted({machine: mode for machine, mode in vm_clusters.OFFERS}.items())
    assert len(offers) >= 25
    assert differences(tmp_path, offers, vm_clusters.config) == []
