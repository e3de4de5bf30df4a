"""The configs as JSON Schema, with every field's meaning, default and limits."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from drillyard.config.cluster import cluster_model
from drillyard.config.run import RunConfig
from drillyard.config.workload import WorkloadRunConfig


def config_model(which: str) -> type[BaseModel]:
    """The model of `run`, `cluster` or `workload`, a run config with a command of its own."""
    models: dict[str, type[BaseModel]] = {
        "run": RunConfig,
        "cluster": cluster_model(),
        "workload": WorkloadRunConfig,
    }
    return models[which]


def json_schema(which: str) -> dict[str, Any]:
    """The schema (draft 2020-12) of `run`, `cluster` or `workload`."""
    schema = config_model(which).model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
