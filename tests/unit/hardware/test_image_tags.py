"""What the tag of an image tells: of well-known images only, and nothing is guessed."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drillyard.hardware.catalog import raw_rows
from drillyard.hardware.image_tags import image_contents, version_at_least


@pytest.mark.parametrize(
    ("image", "cuda", "glibc"),
    [
        ("nvidia/cuda:12.8.1-cudnn-devel-ubuntu22.04", "12.8", "2.35"),
        ("docker.io/nvidia/cuda:13.0.2-base-ubuntu24.04", "13.0", "2.39"),
        ("nvcr.io/nvidia/cuda:11.8.0-runtime-ubuntu20.04", "11.8", "2.31"),
        ("nvcr.io/nvidia/pytorch:23.04-py3", "11.1", "2.31"),
        ("nvcr.io/nvidia/pytorch:23.05-py3", "12.1", "2.35"),
        ("nvcr.io/nvidia/pytorch:25.01-py3-igpu", "12.8", "2.39"),
        ("docker://nvcr.io#nvidia/pytorch:26.10-py3", "13.1", "2.39"),
        ("pytorch/pytorch:2.7.0-cuda12.8-cudnn9-runtime", "12.8", None),
        (f"nvidia/cuda:12.8.1-base-ubuntu22.04@sha256:{'0' * 64}", "12.8", "2.35"),
    ],
)
def test_known_tags(image, cuda, glibc):
    message = image_contents(image)
    assert (message.cuda, message.glibc) == (cuda, glibc)
    assert message.source.text


@pytest.mark.parametrize(
    "image",
    [
        "nvidia/cuda",
        "nvidia/cuda:latest",
        "nvidia/cuda:12.8.1-base-ubi9",
        "nvcr.io/nvidia/pytorch:19.10-py3",
        "nvcr.io/nvidia/pytorch:latest",
        "registry.example/nvidia/cuda:12.8.1-base-ubuntu22.04",
        "me/pytorch:25.01-py3",
        "/images/nvidia+pytorch+24.04-py3.sqsh",
        "pytorch/pytorch@sha256:" + "0" * 64,
        "",
    ],
)
def test_what_is_not_known_tells_nothing(image):
    assert image_contents(image) is None


@given(st.text(max_size=60))
def test_no_text_breaks_the_reading(text):
    image_contents(text)


def test_releases_are_in_order_and_never_go_back():
    for row in raw_rows("images"):
        for field in ("first", "ubuntu", "cuda"):
            values = [release[field] for release in row.get("releases", [])]
            assert all(
                version_at_least(later, earlier) for earlier, later in itertools.pairwise(values)
            )


@pytest.mark.parametrize(
    ("version", "floor", "enough"),
    [
        ("2.35", "2.35", True),
        ("2.4", "2.35", False),
        ("12.10", "12.8", True),
        ("13", "12.8", True),
        ("12", "12.8", False),
    ],
)
def test_versions_are_numbers_and_not_text(version, floor, enough):
    assert version_at_least(version, floor) is enough
