"""The trainer against plain transformers and plain torch: what it computes is right, not only alike
on all layouts.

The documents of a packed batch go alone through the model as transformers builds it, without masks,
positions, chunks or sharding of ours. For Llama a plain loop of torch's AdamW follows for all
steps.
"""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.distributed import training_case
from tests.distributed.ranks import run_ranks
from tests.distributed.training_case import (
    build,
    full_parameters,
    make_config,
    norms_in_fp64,
    run_steps,
    write_documents,
)
from tests.unit.models.tiny import CONFIGS, model_config
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, PreTrainedModel

from drillyard.data.mapped_sequences import Batch
from drillyard.data.prepared_data import prepare
from drillyard.evaluation.held_out_loss import evaluate_loss
from drillyard.training.trainer import Trainer

Document = tuple[torch.Tensor, torch.Tensor]


def documents_of(trainer: Trainer, step: int, eos_token_id: int) -> list[Document]:
    """(tokens, labels) of each document of a step's global batch. Documents begin and end with the
    tokenizer's one special token; the loader's own marks of where one begins are not used."""
    batch = trainer.data.read(trainer.data.indices(step, trainer.shape))
    return split_at_marks(batch, eos_token_id)


def split_at_marks(batch: Batch, eos_token_id: int) -> list[Document]:
    documents = []
    for tokens, labels in zip(batch.input_ids, batch.labels, strict=True):
        marks = np.flatnonzero(tokens == eos_token_id).tolist()
        for first, last in zip(marks[::2], marks[1::2], strict=False):
            part = slice(first, last + 1)
            if (labels[part] != -100).any():
                documents.append((torch.from_numpy(tokens[part]), torch.from_numpy(labels[part])))
    return documents


def plain_loss(model: PreTrainedModel, documents: list[Document]) -> torch.Tensor:
    """The mean loss over all tokens with a label, each document alone through the model's own
    forward."""
    total = torch.zeros((), dtype=torch.float64)
    for tokens, labels in documents:
        logits = model(input_ids=tokens[None], use_cache=False).logits[0]
        total = total + F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
    return total / sum(int((labels != -100).sum()) for _, labels in documents)


def plain_copy(model: PreTrainedModel) -> PreTrainedModel:
    """The model as transformers builds it, with the same weights, whole on every rank
    (collective)."""
    config = copy.deepcopy(model.config)
    plain: PreTrainedModel = AutoModelForCausalLM.from_config(
        config, dtype=torch.float64, attn_implementation=config._attn_implementation
    )
    plain.load_state_dict(full_parameters(model), strict=False)
    plain.tie_weights()
    return plain


def packed_against_alone(directory: str) -> dict[str, tuple[float, float, int]]:
    """Per architecture: the trainer's loss of a packed batch, that of its documents alone, and
    their number."""
    # The norms stay transformers' own, those of one model as those of the other.
    training_case.norms_in_fp64 = lambda model: None  # type: ignore[assignment]
    found = {}
    for architecture in CONFIGS:
        config = make_config(
            Path(directory),
            model={
                "config": model_config(architecture).config,
                "init": "random",
                "attention": "eager" if architecture == "gemma2" else "sdpa",
            },
        )
        trainer, model = build(config)
        with torch.no_grad():
            for shard in trainer.optimizer.shards:
                if shard.parameter.ndim > 1:
                    shard.local.mul_(8.0)
        plain = plain_copy(model.causal_lm)
        documents = documents_of(trainer, 0, model.causal_lm.config.eos_token_id)
        with torch.no_grad():
            alone = float(plain_loss(plain, documents))
        found[architecture] = (float(run_steps(trainer, 0, 1)[0, 0]), alone, len(documents))
    return found


def train_plainly(trainer: Trainer, model: PreTrainedModel) -> list[list[float]]:
    """Losses and gradient norms of a loop with torch's own AdamW, clipping and schedule, as the
    config means them."""
    settings = trainer.config.training
    peak, warmup, total = (
        settings.optimizer.learning_rate,
        settings.schedule.warmup_steps,
        trainer.total_steps,
    )
    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    others = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        lr=peak,
        betas=(0.9, 0.95),
        eps=1e-8,
    )
    rows = []
    for step in range(total):
        share = (step - warmup) / (total - warmup)
        rate = (
            peak * (step + 1) / warmup
            if step < warmup
            else peak * 0.5 * (1 + math.cos(math.pi * share))
        )
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = plain_loss(model, documents_of(trainer, step, model.config.eos_token_id))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        rows.append([loss.item(), norm.item()])
    return rows


def trainer_against_plain_loop(directory: str) -> dict[str, Any]:
    trainer, model = build(make_config(Path(directory)))
    # Norms and biases start where decay would not show; moved, it does.
    with torch.no_grad():
        for shard in trainer.optimizer.shards:
            if shard.parameter.ndim < 2:
                shard.local.mul_(3.0)
    plain = plain_copy(model.causal_lm)
    norms_in_fp64(plain)
    expected = np.array(train_plainly(trainer, plain))
    return {"found": run_steps(trainer, 0, trainer.total_steps), "expected": expected}


def evaluation_against_plain(directory: str) -> dict[str, Any]:
    """Held-out figures of whole texts, of all of them and of a part, and the same from documents
    alone."""
    data = make_config(Path(directory)).data.model_dump(exclude={"format", "source"})
    config = make_config(
        Path(directory), data={**data, "format": "text", "source": f"{directory}/texts.jsonl"}
    )
    trainer, model = build(config)
    (sequences,) = trainer.data.sources
    options: dict[str, Any] = {"attention": model.attention, "batch_size": 3, "chunk_tokens": None}
    whole, part = (
        evaluate_loss(model.root, sequences, trainer.ranks, limit=limit, **options)
        for limit in (None, 2)
    )
    plain = plain_copy(model.causal_lm)
    norms_in_fp64(plain)
    documents = split_at_marks(
        sequences.read(range(len(sequences))), model.causal_lm.config.eos_token_id
    )
    tokenizer = prepare(config, only_open=True).tokenizer
    with torch.no_grad():
        loss = float(plain_loss(plain, documents))
    return {
        "whole": (whole["loss"], whole["tokens"], whole["bits_per_byte"]),
        "expected": (
            loss,
            sum(int((labels != -100).sum()) for _, labels in documents),
            sum(len(tokenizer.decode(tokens[1:-1]).encode()) for tokens, _ in documents),
        ),
        "bits per byte of a part": part["bits_per_byte"],
    }


def both_comparisons(directory: str) -> dict[str, Any]:
    return {
        "loop": trainer_against_plain_loop(directory),
        "evaluation": evaluation_against_plain(directory),
        "packed": packed_against_alone(directory),
    }


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("reference")
    write_documents(folder)
    texts = [f"{number}: " + "größe und maß, " * (number % 5 + 1) for number in range(40)]
    (folder / "texts.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in texts)
    )
    (found,) = run_ranks(both_comparisons, 1, str(folder))
    return found


def test_a_packed_batchs_loss_is_that_of_its_documents_alone_for_every_architecture(
    results: dict[str, Any],
) -> None:
    assert results["packed"].keys() == CONFIGS.keys()
    for architecture, (packed, alone, count) in results["packed"].items():
        assert count > 4, "several documents share a sequence"
        assert packed == pytest.approx(alone, rel=1e-6, abs=0), architecture


def test_a_held_out_loss_and_its_bits_per_byte_are_those_of_the_documents_alone(
    results: dict[str, Any],
) -> None:
    loss, tokens, bits_per_byte = results["evaluation"]["whole"]
    expected_loss, expected_tokens, text_bytes = results["evaluation"]["expected"]
    assert tokens == expected_tokens
    assert loss == pytest.approx(expected_loss, rel=1e-12)
    assert bits_per_byte == pytest.approx(
        expected_loss * expected_tokens / math.log(2) / text_bytes, rel=1e-12
    )
    assert results["evaluation"]["bits per byte of a part"] is None


def test_twenty_steps_are_those_of_a_plain_loop(results: dict[str, Any]) -> None:
    found, expected = results["loop"]["found"], results["loop"]["expected"]
    assert (expected[:, 1] > 0.5).any(), "clipping was never active"
    np.testing.assert_allclose(found, expected, rtol=1e-9)
