"""The configs as JSON Schema, with every field's meaning, default and limits."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from drillyard.config.cluster import ClusterConfig
from drillyard.config.run import RunConfig
from drillyard.config.workload import WorkloadRunConfig

MODELS: dict[str, type[BaseModel]] = {"run": RunConfig, "cluster": ClusterConfig, "workload": WorkloadRunConfig}


def json_schema(which: str) -> dict[str, Any]:
    """The schema (draft 2020-12) of `run`, `cluster` or `workload`, a run config with a command of its own."""
    schema = MODELS[which].model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
