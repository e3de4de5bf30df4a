"""FLOPs per token of a run: active parameters, frozen weights; the accelerator by its driver's
name."""

from __future__ import annotations

import pytest

from drillyard.modelspec import model_spec
from drillyard.telemetry import describe_model


def describe(
    config: dict, count: int, trainable: int, device: str = "cpu", precision: str = "bf16"
) -> dict:
    return describe_model(
        config, count=count, trainable=trainable, device=device, precision=precision
    )


def test_a_dense_model_takes_6_flops_per_parameter_and_token():
    described = describe({"model_type": "llama"}, 6_738_415_616, 6_738_415_616, "NVIDIA H200")
    assert (described["formula"], described["flops_per_token"]) == ("6N", 6 * 6_738_415_616)
    assert described["accelerator"].name == "h200"


def test_of_a_mixture_of_experts_only_active_parameters_count():
    spec = model_spec({"model_type": "mixtral"})
    described = describe({"model_type": "mixtral"}, spec.total_parameters, spec.total_parameters)
    assert described["flops_per_token"] == 6 * spec.active_parameters
    assert described["accelerator"] is None


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_frozen_weights_take_4(family):
    spec = model_spec({"model_type": family})
    adapters = 1_000_000
    described = describe({"model_type": family}, spec.total_parameters + adapters, adapters)
    assert described["formula"] == "4N frozen + 6N trained"
    assert described["flops_per_token"] == 4 * spec.active_parameters + 6 * adapters


def test_a_family_that_is_not_known_counts_whole():
    assert describe({"model_type": "novel"}, 1000, 1000)["flops_per_token"] == 6000
