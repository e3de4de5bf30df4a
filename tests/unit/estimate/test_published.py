"""The published form of estimates as JSON: what is printed is what the schema says, and nothing else."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError
from tests.unit.estimate.asked import SMALL, question, run_config, two_nodes

from drillyard.config.cluster import ClusterConfig
from drillyard.estimate.as_json import prediction_json, sweep_json
from drillyard.estimate.axes import parse_axes
from drillyard.estimate.model import OwnModel, model_of
from drillyard.estimate.place import place_of_accelerator, place_of_cluster
from drillyard.estimate.prediction import predict
from drillyard.estimate.published import Estimate, Sweep, estimate_schema
from drillyard.estimate.question import Question
from drillyard.estimate.simulation import simulate_run
from drillyard.estimate.sweep import sweep
from drillyard.hardware import catalog


def on_a_cluster() -> Question:
    cluster = ClusterConfig.model_validate(
        {"name": "c", "platform": "gce", "location": {"project": "p", "zone": "us-central1-b"}, "nodes": 2}
        | {"machine": "a4-highgpu-8g", "consumption": "spot"}
    )
    return question(run_config(training={"micro_batch_size": 64}), place_of_cluster(cluster, catalog()))


def counted() -> Question:
    asked = question()
    return replace(asked, model=model_of(asked.config, OwnModel(None, 10**10)))


QUESTIONS = {
    "in full": lambda: question(run_config(SMALL, checkpoint={"every_steps": 10})),
    "that does not fit": on_a_cluster,
    "with LoRA": lambda: question(run_config(model={"lora": {"rank": 8}})),
    "of an accelerator": lambda: question(run_config(SMALL), place_of_accelerator("h100", 8, catalog())),
    "of a CPU": lambda: question(run_config(SMALL), place_of_accelerator("cpu", 2, catalog())),
    "of counts": counted,
    "in epochs": lambda: question(run_config(SMALL, training={"steps": None, "epochs": 1.0})),
}


def printed(value: dict[str, Any]) -> Any:
    return json.loads(json.dumps(value, allow_nan=False))


@pytest.mark.parametrize("name", QUESTIONS)
def test_every_kind_of_answer_follows_the_schema(name: str) -> None:
    Estimate.model_validate(printed(prediction_json(predict(QUESTIONS[name]()))))


def test_a_simulated_answer_and_a_sweep_follow_it_too() -> None:
    prediction = predict(question(run_config(SMALL)))
    Estimate.model_validate(printed(prediction_json(prediction, simulate_run(prediction, seed=1))))
    found = sweep(question(run_config(SMALL), two_nodes()), parse_axes("nodes=1,2,micro_batch_size=1,4096"))
    value = Sweep.model_validate(printed(sweep_json(found, "run")))
    assert value.axes == {"nodes": [1, 2], "micro_batch_size": [1, 4096]}
    assert [point.values["nodes"] for point in value.points] == [1, 1, 2, 2]


def test_an_answer_that_says_more_or_less_is_not_of_the_form() -> None:
    value = printed(prediction_json(predict(question(run_config(SMALL)))))
    for wrong in ({**value, "more": 1}, {key: one for key, one in value.items() if key != "cost"}):
        with pytest.raises(ValidationError):
            Estimate.model_validate(wrong)


def test_numbers_are_those_of_the_prediction() -> None:
    prediction = predict(on_a_cluster())
    value = Estimate.model_validate(printed(prediction_json(prediction)))
    assert value.verdict == prediction.verdict == "does not fit"
    assert value.memory is not None and value.memory.alternatives
    assert prediction.cost is not None and value.cost is not None
    assert value.cost.usd_per_step.low.value == prediction.cost.of_step.low.value
    assert value.cost.usd_per_gpu_hour.date == prediction.cost.price.of_gpu.fact.date
    assert value.place.region == "us-central1" and value.place.gpus == 16
    assert {outlook.rate for outlook in value.run_time.failures} == {"llama3", "rsc1", "rsc2"}  # type: ignore[union-attr]
    assert sum(quota.amount for quota in value.quotas if "GPU" in quota.metric) == 16


def test_the_schema_describes_both_forms_and_lets_fields_be_added() -> None:
    schema = estimate_schema()
    assert schema["$schema"].endswith("2020-12/schema")
    kinds = {schema["$defs"][one["$ref"].rpartition("/")[2]]["properties"]["kind"]["const"] for one in schema["anyOf"]}
    assert kinds == {"estimate", "sweep"}
    assert not any("additionalProperties" in definition for definition in schema["$defs"].values())
