"""Requests for tests: Llama 3.1 70B, as published, on two nodes of eight B200s; and Daly's wall
time."""

from __future__ import annotations

import math
from typing import Any

from drillyard.config.run import RunConfig
from drillyard.estimation.model_source import ModelOptions, find_model
from drillyard.estimation.request import EstimateRequest
from drillyard.estimation.target import Target, machine_target
from drillyard.hardware import catalog

LLAMA_70B = {
    "architecture": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
SMALL = {
    "architecture": "llama",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
}


def run_config(shapes: dict[str, Any] = LLAMA_70B, **changes: Any) -> RunConfig:
    """A run of 1,000 steps with micro-batches of 8 x 4096 tokens; `changes` are whole sections or
    parts of them."""
    content: dict[str, Any] = {
        "name": "run",
        "model": {"init": "random", "config": shapes},
        "data": {
            "source": "builtin:python-stdlib",
            "sequence_length": 4096,
            "tokenizer": "tokenizer",
        },
        "training": {"steps": 1000, "micro_batch_size": 8, "optimizer": {"learning_rate": 1e-4}},
    }
    for section, values in changes.items():
        content[section] = {**content.get(section, {}), **values}
    return RunConfig.model_validate(content)


def two_nodes(machine: str = "a4-highgpu-8g", nodes: int = 2, **options: Any) -> Target:
    return machine_target(machine, nodes, catalog(), **options)


def request_of(
    config: RunConfig | None = None, target: Target | None = None, **options: Any
) -> EstimateRequest:
    """Estimate `config` on `target`."""
    request = config or run_config()
    model = find_model(request, ModelOptions())
    return EstimateRequest(
        config=request, model=model, target=target or two_nodes(), facts=catalog(), **options
    )


def daly_wall_seconds(
    work_seconds: float,
    interval_seconds: float,
    blocking_seconds: float,
    restart_seconds: float,
    mtbf_seconds: float,
) -> float:
    """Daly's complete wall time for `work_seconds` of work, saves without a drain."""
    cycle = (interval_seconds + blocking_seconds) / mtbf_seconds
    per_save = mtbf_seconds * math.exp(restart_seconds / mtbf_seconds) * math.expm1(cycle)
    return per_save * work_seconds / interval_seconds
