"""All metrics of the held-out parts in one call: with any tokenizer, and when one of them fails."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from drillyard.config.run import RunConfig
from drillyard.evaluation.evaluator import HeldOutEvaluator
from drillyard.models.loss import LanguageModelLoss
from drillyard.parallel.ranks import Ranks

ONE_RANK = Ranks(0, 1, 0, 1, torch.device("cpu"), None, 1)  # type: ignore[arg-type]
ROWS = [
    {
        "schema": f"CREATE TABLE {name} (a INT); INSERT INTO {name} VALUES (1);",
        "question": "a?",
        "sql": "SELECT 1",
    }
    for name in ("t", "tt", "a_table_with_a_long_name")
]


def tokenizer_without_pad() -> PreTrainedTokenizerFast:
    """Bytes as tokens, and an end-of-text token that is no pad token: the layout of GPT-2 and Llama
    3."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate([*alphabet, "<eos>"])}
    backend = Tokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")


@pytest.fixture
def held_out(tmp_path: Path) -> HeldOutEvaluator:
    """Three questions of unequal length for a model of random weights, two to a batch."""
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    tokenizer = tokenizer_without_pad()
    config = RunConfig.model_validate(
        {
            "name": "run",
            "model": {"config": {"architecture": "llama"}, "init": "random"},
            "data": {
                "source": "builtin:python-stdlib",
                "format": "text-to-sql",
                "sequence_length": 64,
                "held_out": {"source": str(tmp_path / "rows.jsonl")},
            },
            "training": {"steps": 1, "optimizer": {"learning_rate": 1e-3}},
            "evaluation": {"metrics": ["sql-execution"], "max_new_tokens": 4, "batch_size": 2},
        }
    )
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), initializer_range=0.5, **sizes))
    data: Any = SimpleNamespace(tokenizer=tokenizer, held_out={"rows": None})
    return HeldOutEvaluator(
        config,
        data,
        LanguageModelLoss(model),
        ONE_RANK,
        tmp_path / "evaluations",
        attention="eager",
    )


def test_a_tokenizer_without_a_pad_token_answers_questions_of_unequal_length(
    held_out: HeldOutEvaluator, tmp_path: Path
) -> None:
    figures = held_out.sql_execution("rows", "step-1")
    assert figures["questions"] == len(ROWS)
    lines = (tmp_path / "evaluations" / "step-1" / "rows.jsonl").read_text().splitlines()
    assert len({len(json.loads(line)["prompt"]) for line in lines}) == len(ROWS)


def test_a_start_that_has_lost_its_claim_writes_no_predictions(
    held_out: HeldOutEvaluator, tmp_path: Path
) -> None:
    def ends() -> None:
        raise SystemExit(1)

    held_out.before_write = ends
    with pytest.raises(SystemExit):
        held_out.sql_execution("rows", "step-1")
    assert not (tmp_path / "evaluations").exists()
