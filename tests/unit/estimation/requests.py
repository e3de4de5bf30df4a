"""Questions for tests: Llama 3.1 70B, as published configs have it, on two nodes of eight B200s."""

from __future__ import annotations

from typing import Any

from drillyard.config import RunConfig
from drillyard.estimation.model_source import ModelOptions, find_model
from drillyard.estimation.request import EstimateRequest
from drillyard.estimation.target import Target, machine_target
from drillyard.hardware import catalog

LLAMA_70B = {
    "architecture": "llama", "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
    "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256,
}  # fmt: skip
SMALL = {
    "architecture": "llama", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8,
    "num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 32000,
}  # fmt: skip


def run_config(shapes: dict[str, Any] = LLAMA_70B, **changes: Any) -> RunConfig:
    """A run of 1,000 steps with micro-batches of 8 x 4096 tokens; `changes` are whole sections or parts of them."""
    content: dict[str, Any] = {
        "name": "run",
        "model": {"init": "random", "config": shapes},
        "data": {"source": "builtin:python-stdlib", "sequence_length": 4096, "tokenizer": "tokenizer"},
        "training": {"steps": 1000, "micro_batch_size": 8, "optimizer": {"learning_rate": 1e-4}},
    }
    for section, values in changes.items():
        content[section] = {**content.get(section, {}), **values}
    return RunConfig.model_validate(content)


def two_nodes(machine: str = "a4-highgpu-8g", nodes: int = 2, **options: Any) -> Target:
    return machine_target(machine, nodes, catalog(), **options)


def question(config: RunConfig | None = None, place: Target | None = None, **options: Any) -> EstimateRequest:
    """What is predicted of `config` at `place`."""
    asked = config or run_config()
    model = find_model(asked, ModelOptions())
    return EstimateRequest(config=asked, model=model, place=place or two_nodes(), facts=catalog(), **options)
