"""All metrics of the held-out parts in one call: with any tokenizer, and when one of them fails."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from drillyard.config.run import RunConfig
from drillyard.evaluation.evaluator import HeldOutEvaluator
from drillyard.evaluation.failures import EvaluationFailed
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
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")


@pytest.fixture
def held_out(tmp_path: Path) -> HeldOutEvaluator:
    """Three questions of unequal length for a model of random weights, two to a batch."""
    return evaluator(tmp_path, ROWS)


def evaluator(tmp_path: Path, rows: list[dict[str, Any]], **model: Any) -> HeldOutEvaluator:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = tokenizer_without_pad()
    template = model.pop("chat_template", "")
    config = RunConfig.model_validate(
        {
            "name": "run",
            "model": {"config": {"architecture": "llama"}, "init": "random"},
            "data": {
                "source": "builtin:python-stdlib",
                "format": "function-calling" if template else "text-to-sql",
                "sequence_length": 64,
                "held_out": {"source": str(tmp_path / "rows.jsonl")},
            },
            "training": {"steps": 1, "optimizer": {"learning_rate": 1e-3}},
            "evaluation": {
                "metrics": ["function-call" if template else "sql-execution"],
                "max_new_tokens": 4,
                "batch_size": 2,
            },
        }
    )
    sizes = model | {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), initializer_range=0.5, **sizes))
    text: Any = SimpleNamespace(
        chat_template=template,
        special_tokens={"eos_token": "<eos>"},
        template_file=None,
        date=None,
    )
    data: Any = SimpleNamespace(tokenizer=tokenizer, held_out={"rows": None}, text_tokenizer=text)
    warnings: list[str] = []
    return HeldOutEvaluator(
        config,
        data,
        LanguageModelLoss(model),
        ONE_RANK,
        tmp_path / "evaluations",
        attention="eager",
        warn=warnings.append,
    )


def test_a_tokenizer_without_a_pad_token_answers_questions_of_unequal_length(
    held_out: HeldOutEvaluator, tmp_path: Path
) -> None:
    figures = held_out.sql_execution("rows", "step-1")
    assert figures["questions"] == len(ROWS)
    lines = (tmp_path / "evaluations" / "step-1" / "rows.jsonl").read_text().splitlines()
    assert len({len(json.loads(line)["prompt"]) for line in lines}) == len(ROWS)


def warnings_of(held_out: HeldOutEvaluator) -> list[str]:
    return held_out.warn.__self__  # type: ignore[attr-defined, no-any-return]


def test_rows_that_cannot_be_read_cost_only_themselves(tmp_path: Path) -> None:
    rows = [ROWS[0], {**ROWS[1], "schema": None}, {"question": "a?", "sql": "SELECT 1"}, ROWS[2]]
    held_out = evaluator(tmp_path, rows)
    figures = held_out.sql_execution("rows", "step-1")
    assert (figures["questions"], figures["rows_at_fault"]) == (2, 2)
    (warning,) = warnings_of(held_out)
    assert "rows: 2 rows" in warning and f"{tmp_path / 'rows.jsonl'}, line 2" in warning


def test_where_no_row_can_be_read_the_first_is_named(tmp_path: Path) -> None:
    held_out = evaluator(tmp_path, [{**row, "schema": None} for row in ROWS])
    with pytest.raises(EvaluationFailed, match="line 1"):
        held_out.sql_execution("rows", "step-1")


def test_a_prompt_longer_than_the_context_is_not_judged(tmp_path: Path) -> None:
    held_out = evaluator(tmp_path, ROWS, max_position_embeddings=60)
    figures = held_out.sql_execution("rows", "step-1")
    assert (figures["questions"], figures["too_long"], figures["unjudged"]) == (2, 1, 1)
    (warning,) = warnings_of(held_out)
    assert "1 of 3" in warning and "102 tokens" in warning and "60" in warning
    written = (tmp_path / "evaluations" / "step-1" / "rows.jsonl").read_text().splitlines()
    (left,) = [line for line in map(json.loads, written) if line["verdict"] == "unjudged"]
    assert "102 tokens" in left["reason"] and left["predicted"] == ""


TOOLS = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
TURNS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    "CALL{% endfor %}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
HERMES = "<tool_call>{{ c.function | tojson }}</tool_call>"
OWN_NOTATION = "@{{ c.function.name }}: {{ c.function.arguments | tojson }}@"
CALLING = [
    {
        "question": [[{"role": "user", "content": "Weather?"}]],
        "function": [
            {
                "name": "weather",
                "parameters": {"type": "dict", "properties": {"city": {"type": "string"}}},
            }
        ],
        "ground_truth": [{"weather": {"city": ["Paris", "Paris, France"]}}],
    }
]


def test_a_template_whose_calls_the_judge_reads_is_evaluated(tmp_path: Path) -> None:
    held_out = evaluator(tmp_path, CALLING, chat_template=TOOLS + TURNS.replace("CALL", HERMES))
    assert warnings_of(held_out) == []
    assert held_out.function_call("rows", "step-1")["questions"] == 1


def test_a_template_whose_calls_the_judge_cannot_read_is_named_before(tmp_path: Path) -> None:
    template = TOOLS + TURNS.replace("CALL", OWN_NOTATION)
    held_out = evaluator(tmp_path, CALLING, chat_template=template)
    (warning,) = warnings_of(held_out)
    assert "@get_weather: " in warning and "wrong_count" in warning
    with pytest.raises(EvaluationFailed, match=r"1 of 1 .*@weather: ") as caught:
        held_out.function_call("rows", "step-1")
    assert caught.value.stack is None
    assert not (tmp_path / "evaluations").exists()


def test_some_rows_that_the_template_cannot_write_are_a_warning(tmp_path: Path) -> None:
    """This template writes the first of several calls alone."""
    template = TOOLS + TURNS.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]").replace(
        "CALL", HERMES
    )
    twice = {**CALLING[0], "ground_truth": CALLING[0]["ground_truth"] * 2}  # type: ignore[operator]
    held_out = evaluator(tmp_path, [*CALLING, twice], chat_template=template)
    assert held_out.function_call("rows", "step-1")["questions"] == 2
    (warning,) = warnings_of(held_out)
    assert "1 of 2 rows" in warning


def test_a_start_that_has_lost_its_claim_writes_no_predictions(
    held_out: HeldOutEvaluator, tmp_path: Path
) -> None:
    def ends() -> None:
        raise SystemExit(1)

    held_out.before_write = ends
    with pytest.raises(SystemExit):
        held_out.sql_execution("rows", "step-1")
    assert not (tmp_path / "evaluations").exists()
