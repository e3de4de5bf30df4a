"""Ranges of addresses: computed ones never overlap, whatever is given."""

from __future__ import annotations

import re
from ipaddress import IPv4Network
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drillyard.config.creation import AddressRanges
from drillyard.hardware.cloud_limits import address_ranges
from drillyard.provision.gcp.address_ranges import (
    RangeSizes,
    cluster_ranges,
    pods_prefix,
    range_problems,
    subnet_prefix,
)


@st.composite
def sizes(draw):
    data_nodes = st.integers(0, 8000)
    return RangeSizes(
        addresses=draw(st.integers(1, 16000)),
        nodes=draw(st.integers(1, 8000)),
        max_pods=draw(st.sampled_from([8, 16, 32, 64, 110, 128])),
        data_nodes=tuple(draw(st.lists(data_nodes, max_size=17))),
    )


@st.composite
def some_range(draw):
    room = draw(st.sampled_from(["10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10"]))
    network = IPv4Network(room)
    prefix = draw(st.integers(network.prefixlen + 2, 26))
    number = draw(st.integers(0, (1 << (prefix - network.prefixlen)) - 1))
    start = int(network.network_address) + number * (1 << (32 - prefix))
    return f"{IPv4Network((start, prefix))}"


given_ranges = st.builds(
    AddressRanges,
    nodes=st.none() | some_range(),
    pods=st.none() | some_range(),
    services=st.none() | some_range(),
    data=st.none() | some_range(),
)


KEYS = ("nodes", "pods", "services", "data")


@st.composite
def any_range(draw):
    prefix = draw(st.integers(6, 30))
    return str(IPv4Network((draw(st.integers(0, (1 << prefix) - 1)) << (32 - prefix), prefix)))


def every_range(found):
    return [found.nodes, found.pods, found.services, *found.data]


@settings(max_examples=300, deadline=None)
@given(given_ranges, sizes())
def test_ranges_without_a_problem_never_overlap_and_have_room(ranges, wanted):
    if list(range_problems(ranges, wanted)):
        return
    found = cluster_ranges(ranges, wanted)
    assert not any(one.overlaps(other) for one, other in combinations(every_range(found), 2))
    kept = [each.network for each in address_ranges() if not each.usable]
    assert not any(each.overlaps(other) for each in every_range(found) for other in kept)
    assert found.nodes.num_addresses >= wanted.addresses + 4
    used = [nodes for nodes in wanted.data_nodes if nodes]
    for subnet, nodes in zip(found.data, used, strict=True):
        assert subnet.num_addresses >= nodes + 4
    # GKE gives each node a block of twice its pods, a power of two.
    block = 1 << (2 * wanted.max_pods - 1).bit_length()
    assert found.pods.num_addresses >= wanted.nodes * block


@settings(max_examples=100, deadline=None)
@given(given_ranges, sizes())
def test_a_given_range_is_used_as_it_is(ranges, wanted):
    if list(range_problems(ranges, wanted)):
        return
    found = cluster_ranges(ranges, wanted)
    for key in ("nodes", "pods", "services"):
        if (text := getattr(ranges, key)) is not None:
            assert str(getattr(found, key)) == text
    if ranges.data is not None:
        assert all(each.subnet_of(IPv4Network(ranges.data)) for each in found.data)


@settings(max_examples=100, deadline=None)
@given(sizes())
def test_defaults_always_fit(wanted):
    assert list(range_problems(AddressRanges(), wanted)) == []
    cluster_ranges(AddressRanges(), wanted)


def test_a_growing_cluster_keeps_its_ranges():
    small, large = (RangeSizes(n + 7, n + 6, 32, (n,) * 9) for n in (2, 1990))
    assert cluster_ranges(AddressRanges(), small) == cluster_ranges(AddressRanges(), large)


def test_further_networks_leave_the_others_where_they_are():
    last = cluster_ranges(AddressRanges(), RangeSizes(9, 8, 32, (0,) * 8 + (2,) * 9))
    every = cluster_ranges(AddressRanges(), RangeSizes(9, 8, 32, (2,) * 17))
    assert every.data[8:] == last.data


def problems(wanted=None, **ranges):
    wanted = wanted or RangeSizes(2000, 2000, 32, (2000,) * 8)
    return {
        ".".join(map(str, each.path)): each.message
        for each in range_problems(AddressRanges(**ranges), wanted)
    }


def test_ranges_that_are_too_small_are_named_with_the_size_that_they_need():
    found = problems(nodes="10.0.0.0/22", pods="10.4.0.0/16", services="10.8.0.0/28")
    assert "/21" in found["cluster.ranges.nodes"]
    assert "/15" in found["cluster.ranges.pods"]
    assert "/27" in found["cluster.ranges.services"]
    assert "/18" in problems(data="192.168.0.0/19")["cluster.ranges.data"]


def test_the_size_that_an_error_names_is_enough():
    assert not problems(nodes="10.0.0.0/21", pods="10.4.0.0/15", services="10.8.0.0/27")
    assert not problems(data="192.168.0.0/18")


def test_given_ranges_that_overlap_are_refused():
    assert list(problems(nodes="10.0.0.0/16", pods="10.0.0.0/15")) == ["cluster.ranges.pods"]


def test_a_range_that_gke_has_itself_is_refused():
    assert "172.17.0.0/16" in problems(data="172.16.0.0/12")["cluster.ranges.data"]
    assert "34.118.224.0/20" in problems(services="34.118.224.0/20")["cluster.ranges.services"]


@pytest.mark.parametrize("public", ["8.8.0.0/16", "35.0.0.0/12", "100.0.0.0/10", "192.0.0.0/16"])
def test_public_addresses_are_refused(public):
    for key in ("nodes", "pods", "services", "data"):
        assert list(problems(**{key: public})) == [f"cluster.ranges.{key}"]


@pytest.mark.parametrize(
    "private", ["10.0.0.0/14", "172.18.0.0/15", "100.64.0.0/14", "240.0.0.0/8"]
)
def test_ranges_that_a_vpc_may_have_are_taken(private):
    assert not problems(pods=private)


@settings(max_examples=200, deadline=None)
@given(st.builds(AddressRanges, **dict.fromkeys(KEYS, st.none() | any_range())), sizes())
def test_the_range_that_an_error_names_is_accepted(ranges, wanted):
    texts = ranges.model_dump()
    for _ in range(len(KEYS) + 1):
        found = list(range_problems(AddressRanges(**texts), wanted))
        if not found:
            return
        for each in found:
            [suggested] = re.findall(r"such as ([0-9./]+)", each.message)
            texts[each.path[-1]] = suggested
    raise AssertionError(found)


def test_more_pods_than_any_default_has_room_for():
    wanted = RangeSizes(20000, 20000, 256, ())
    assert list(problems(wanted)) == ["cluster.ranges.pods"]
    assert not problems(wanted, pods="240.0.0.0/8")


def test_prefixes():
    assert [subnet_prefix(n) for n in (1, 4, 5, 12, 250, 252, 253, 2044, 4092)] == [
        *(29, 29, 28, 28, 24, 24, 23, 21, 20)
    ]
    # The documented table: 110 pods of a node take a /24, 32 a /26, 8 a /28.
    assert [pods_prefix(2, pods) for pods in (8, 32, 110, 256)] == [27, 25, 23, 22]
