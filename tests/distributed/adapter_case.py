"""Runs with adapters for the tests: a tiny pretrained model of any architecture, and the same
training in plain peft.

`train_with_peft` uses nothing of Drillyard but the recorded batches: peft's model in one process,
each document of a packed sequence alone.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.distributed.training_case import build, make_config, run_steps, write_documents

from drillyard.config.run import RunConfig
from drillyard.data.prepared_data import prepare
from drillyard.estimation.resolved_setup import ResolvedSetup
from drillyard.models.export import export
from drillyard.models.meta_model import build_model
from drillyard.models.random_init import init_random
from drillyard.training import model_setup

LORA = {"rank": 4, "alpha": 12.0, "target_modules": "all-linear"}


def write_base(
    directory: Path, config: dict[str, Any], dtype: torch.dtype = torch.float32
) -> RunConfig:
    """Documents, and a random model of `config` with a tokenizer in `directory`/base; returns a run
    config."""
    write_documents(directory)
    made = make_config(
        directory, model={"config": config, "init": "random"}, training__precision="fp32"
    )
    prepared = prepare(made)
    tokenizer = prepared.tokenizer
    special = {
        name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")
    }
    model = build_model(
        made.model,
        vocab_size=len(tokenizer),
        dtype=torch.float32,
        attention="sdpa",
        sequence_length=64,
        **special,
    )
    model.to_empty(device="cpu")
    init_random(model, 3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Norms and biases of a trained model are not all alike.
            if parameter.ndim == 1:
                parameter.add_(
                    torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name)))
                    * 0.1
                )
    export(model, directory / "base", tokenizer=prepared.tokenizer_files, dtype=dtype)
    return adapter_config(directory)


def adapter_config(directory: Path, **changes: Any) -> RunConfig:
    """The run config of adapters on the base in `directory`; `changes` as for `make_config`."""
    settings: dict[str, Any] = {
        "model": {"id": str(directory / "base"), "lora": dict(LORA)},
        "data__tokenizer": str(directory / "base"),
        "training__precision": "fp32",
        "training__optimizer": {"learning_rate": 1.0e-2, "weight_decay": 0.1},
    }
    return make_config(directory, **(settings | changes))


def shard_frozen_weights() -> None:
    """In this process, as where neither memory nor files can hold them whole. What is gathered is
    kept within a step as before, for that decides the order of sums."""
    model_setup.weights_in_files = lambda *_: set()
    resolve = model_setup.resolve_setup

    def resolve_sharded(*arguments: Any, **options: Any) -> ResolvedSetup:
        found = resolve(*arguments, **options)
        return replace(found, setup=replace(found.setup, keeps_frozen_whole=False))

    model_setup.resolve_setup = resolve_sharded


def record_batches(config: RunConfig, path: Path) -> None:
    """Write the documents of every step, as lists of (tokens, labels), for `train_with_peft`."""
    trainer, _ = build(config)
    steps = []
    for step in range(trainer.total_steps):
        batch = trainer.data.read(trainer.data.indices(step, trainer.shape))
        documents = []
        for tokens, labels, number in zip(
            batch.input_ids, batch.labels, batch.document_ids, strict=True
        ):
            for document in np.unique(number):
                inside = number == document
                if (labels[inside] != -100).any():
                    documents.append([tokens[inside].tolist(), labels[inside].tolist()])
        steps.append(documents)
    path.write_text(json.dumps(steps))


def train(config: RunConfig, folder: str, dtype: torch.dtype | None = None) -> list[float]:
    """All steps of `config` on this rank; the adapter before and after them is in `folder`/start
    and `folder`/end."""
    trainer, model = build(config)
    export(model.causal_lm, Path(folder) / "start", adapters="alone")
    rows = run_steps(trainer, 0, trainer.total_steps)
    export(model.causal_lm, Path(folder) / "end", adapters="alone", dtype=dtype)
    return [float(loss) for loss in rows[:, 0]]


def train_with_peft(config: RunConfig, folder: Path, lora: dict[str, Any]) -> list[float]:
    """The losses of `config` in plain peft, from the adapter of `folder`/start; its end is in
    `folder`/peft."""
    settings = {
        "base": config.model.id,
        "lora": lora,
        "start": str(folder / "start" / "adapter_model.safetensors"),
        "steps": str(folder / "steps.json"),
        "peak": config.training.optimizer.learning_rate,
        "warmup": config.training.schedule.warmup_steps,
        "clipping": config.training.gradient_clipping,
        "output": str(folder / "peft"),
    }
    (folder / "settings.json").write_text(json.dumps(settings))
    program = Path(__file__).with_name("plain_peft.py")
    subprocess.run(
        [sys.executable, str(program), str(folder / "settings.json")], check=True, timeout=600
    )
    found: list[float] = json.loads((folder / "peft" / "losses.json").read_text())
    return found
