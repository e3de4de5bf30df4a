"""The accelerator table is consistent, and a name is found exactly or not at all."""

from __future__ import annotations

import pytest

from drillyard.hardware import accelerators, find_accelerator


@pytest.mark.parametrize(
    ("reported", "name", "bf16_tflops"),
    [
        ("NVIDIA H200", "h200", 989),
        ("NVIDIA H100 80GB HBM3", "h100", 989),
        ("NVIDIA H100 PCIe", "h100-pcie", 756),
        ("NVIDIA H100 NVL", "h100-nvl", 835),
        ("NVIDIA B200", "b200", 2250),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb", 312),
        ("NVIDIA A100 80GB PCIe", "a100-80gb", 312),
        ("NVIDIA L4", "l4", 121),
        ("b200", "b200", 2250),
        (" nvidia  h200 ", "h200", 989),
    ],
)
def test_found_by_the_drivers_name_and_by_ours(reported, name, bf16_tflops):
    accelerator = find_accelerator(reported)
    assert accelerator is not None
    assert accelerator.name == name
    assert accelerator.peak_flops["bf16"] == bf16_tflops * 1e12


@pytest.mark.parametrize(
    "name", ["", "cpu", "NVIDIA H100", "NVIDIA L40S", "NVIDIA B200 MIG 1g.23gb", "NVIDIA GeForce RTX 4090", "h1"]
)
def test_an_unknown_name_has_no_accelerator_rather_than_a_similar_one(name):
    assert find_accelerator(name) is None


def test_every_name_leads_to_one_row_with_source_and_date():
    for accelerator in accelerators():
        assert accelerator.source and accelerator.date
        for name in (accelerator.name, accelerator.title, *accelerator.reported_as):
            assert find_accelerator(name) is accelerator


def test_lower_precision_is_never_slower_and_fp8_is_twice_bf16():
    for accelerator in accelerators():
        peaks = [
            accelerator.peak_flops[p]
            for p in ("fp64", "fp32", "tf32", "bf16", "fp8", "fp4")
            if p in accelerator.peak_flops
        ]
        assert peaks == sorted(peaks)
        if "fp8" in accelerator.peak_flops:
            assert accelerator.peak_flops["fp8"] == pytest.approx(2 * accelerator.peak_flops["bf16"], rel=0.002)


def test_unverified_peaks_say_so_by_precision():
    b200, h20 = find_accelerator("b200"), find_accelerator("h20")
    assert [b200.peak_is_unverified(p) for p in ("bf16", "fp4")] == [False, True]
    assert [h20.peak_is_unverified(p) for p in ("bf16", "fp8")] == [False, True]
    assert find_accelerator("l4").peak_is_unverified("bf16")
