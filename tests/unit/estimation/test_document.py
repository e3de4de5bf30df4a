"""The published form of estimates as JSON: what is printed is what the schema says, and nothing
else."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError
from tests.unit.estimation.requests import SMALL, request_of, run_config, two_nodes

from drillyard.config.cluster import ClusterConfig
from drillyard.config.sweep_grammar import parse_axes
from drillyard.estimation.document import (
    EstimateDocument,
    SweepDocument,
    estimate_document,
    estimate_schema,
    sweep_document,
)
from drillyard.estimation.model_source import ModelOptions, find_model
from drillyard.estimation.request import EstimateRequest
from drillyard.estimation.run_estimate import estimate_run
from drillyard.estimation.simulation_estimate import simulate_run
from drillyard.estimation.sweep import run_sweep
from drillyard.estimation.target import accelerator_target, cluster_target
from drillyard.hardware import catalog


def on_a_cluster() -> EstimateRequest:
    cluster = ClusterConfig.model_validate(
        {
            "name": "c",
            "platform": "gce",
            "location": {"project": "p", "zone": "us-central1-b"},
            "nodes": 2,
        }
        | {"machine": "a4-highgpu-8g", "consumption": "spot"}
    )
    return request_of(
        run_config(training={"micro_batch_size": 64}), cluster_target(cluster, catalog())
    )


def counted() -> EstimateRequest:
    request = request_of()
    return replace(request, model=find_model(request.config, ModelOptions(None, 10**10)))


QUESTIONS = {
    "in full": lambda: request_of(run_config(SMALL, checkpoint={"every_steps": 10})),
    "that does not fit": on_a_cluster,
    "with LoRA": lambda: request_of(run_config(model={"lora": {"rank": 8}})),
    "of an accelerator": lambda: request_of(
        run_config(SMALL), accelerator_target("h100", 8, catalog())
    ),
    "of a CPU": lambda: request_of(run_config(SMALL), accelerator_target("cpu", 2, catalog())),
    "of counts": counted,
    "in epochs": lambda: request_of(run_config(SMALL, training={"steps": None, "epochs": 1.0})),
}


def printed(document: EstimateDocument | SweepDocument) -> Any:
    return json.loads(document.as_text())


@pytest.mark.parametrize("name", QUESTIONS)
def test_every_kind_of_answer_follows_the_schema(name: str) -> None:
    EstimateDocument.model_validate(printed(estimate_document(estimate_run(QUESTIONS[name]()))))


@pytest.mark.slow
def test_a_simulated_answer_and_a_sweep_follow_it_too() -> None:
    estimate = estimate_run(request_of(run_config(SMALL)))
    EstimateDocument.model_validate(
        printed(estimate_document(estimate, simulate_run(estimate, seed=1)))
    )
    found = run_sweep(
        request_of(run_config(SMALL), two_nodes()),
        parse_axes(["nodes=1,2", "micro_batch_size=1,4096"]),
    )
    value = SweepDocument.model_validate(printed(sweep_document(found, "run")))
    assert value.axes == {"nodes": [1, 2], "micro_batch_size": [1, 4096]}
    assert [point.values["nodes"] for point in value.points] == [1, 1, 2, 2]


def test_an_answer_that_says_more_or_less_is_not_of_the_form() -> None:
    value = printed(estimate_document(estimate_run(request_of(run_config(SMALL)))))
    for wrong in ({**value, "more": 1}, {key: one for key, one in value.items() if key != "cost"}):
        with pytest.raises(ValidationError):
            EstimateDocument.model_validate(wrong)


def test_numbers_are_those_of_the_estimate() -> None:
    estimate = estimate_run(on_a_cluster())
    value = EstimateDocument.model_validate(printed(estimate_document(estimate)))
    assert value.verdict == estimate.verdict == "does not fit"
    assert value.memory is not None and value.memory.alternatives
    assert estimate.cost is not None and value.cost is not None
    assert value.cost.usd_per_step.low.value == estimate.cost.of_step.low.value
    assert value.cost.usd_per_gpu_hour.date == estimate.cost.price.of_gpu.date
    assert value.place.region == "us-central1" and value.place.gpus == 16
    assert {outlook.rate for outlook in value.run_time.failures} == {"llama3", "rsc1", "rsc2"}  # type: ignore[union-attr]
    assert sum(quota.amount for quota in value.quotas if "GPU" in quota.metric) == 16


def test_the_schema_describes_both_forms_and_lets_fields_be_added() -> None:
    schema = estimate_schema()
    assert schema["$schema"].endswith("2020-12/schema")
    kinds = {
        schema["$defs"][one["$ref"].rpartition("/")[2]]["properties"]["kind"]["const"]
        for one in schema["anyOf"]
    }
    assert kinds == {"estimate", "sweep"}
    assert not any("additionalProperties" in definition for definition in schema["$defs"].values())
