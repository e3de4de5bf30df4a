"""A price is that of the machine, the region and the way of buying, or it is not known."""

from __future__ import annotations

import pytest

from drillyard.hardware import catalog


def test_a_gpu_hour_and_a_node_hour_are_one_price():
    p5 = catalog().machine("p5.48xlarge")
    price = catalog().price("p5.48xlarge", "on-demand", "us-east-1")
    assert (price.node_hour(p5).value, price.gpu_hour(p5).value) == (55.04, 6.88)
    a4 = catalog().machine("a4-highgpu-8g")
    flex = catalog().price("a4-highgpu-8g", "flex-start", "us-central1")
    assert flex.gpu_hour(a4).value == pytest.approx(8.05)
    assert flex.node_hour(a4).value == pytest.approx(64.40)
    assert flex.gpu_hour(a4).unverified


def test_a_price_is_dated():
    assert catalog().price("p5en.48xlarge", "spot", "us-east-2").provenance.row.date == "2026-08-06"


def test_queued_flex_start_is_billed_as_flex_start():
    flex, queued = (
        catalog().price("a4-highgpu-8g", one, "us-central1")
        for one in ("flex-start", "flex-start-queued")
    )
    assert flex is queued is not None


@pytest.mark.parametrize(
    ("machine", "consumption", "region"),
    [
        ("a4-highgpu-8g", "on-demand", "us-central1"),
        ("a4-highgpu-8g", "flex-start", "europe-west4"),
        ("p5.48xlarge", "spot", "us-east-1"),
        ("p5e.48xlarge", "on-demand", None),
        ("p5.48xlarge", "reservation", None),
    ],
)
def test_there_is_no_price_of_something_else(machine, consumption, region):
    assert catalog().price(machine, consumption, region) is None


def test_without_a_region_any_known_one_is_given_and_says_which():
    assert catalog().price("gpu-h100-sxm", "on-demand").region == "eu-north1"
