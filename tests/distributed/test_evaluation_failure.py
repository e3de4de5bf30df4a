"""An evaluation that fails on one rank fails on all of them, leaves none waiting, and changes no
bit of training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.distributed.ranks import run_ranks
from tests.distributed.training_case import build, make_config, run_steps
from tests.integration.tiny_run import write_rows

from drillyard.config.run import RunConfig
from drillyard.data.prepared_data import prepare
from drillyard.evaluation import evaluator as held_out_module
from drillyard.evaluation.evaluator import HeldOutEvaluator
from drillyard.models.architectures import blocks
from drillyard.training import model_setup

if TYPE_CHECKING:
    from drillyard.evaluation.evaluator import EvaluationResults


def case_config(directory: str) -> RunConfig:
    return make_config(
        Path(directory),
        data__source=f"{directory}/rows.jsonl",
        data__format="text-to-sql",
        data__too_long="truncate",
        data__held_out={"fraction": 0.3},
        training__precision="fp32",
        evaluation={
            "metrics": ["loss", "sql-execution"],
            "samples": 6,
            "max_new_tokens": 4,
            "batch_size": 2,
        },
    )


def raising(function: Callable[..., Any], calls: int, error: Exception) -> Callable[..., Any]:
    """`function`, which raises instead once it was called `calls` times."""
    left = [calls]

    def called(*arguments: Any, **options: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise error
        return function(*arguments, **options)

    return called


def both_ways(directory: str) -> dict[bool, dict[str, Any]]:
    """`failures_and_losses` where gathered weights are given back at once, and where they are
    kept."""
    found = {}
    for keep_unsharded in (False, True):
        model_setup.unsharded_is_small = lambda *arguments, keep=keep_unsharded: keep  # type: ignore[misc]
        found[keep_unsharded] = failures_and_losses(directory)
    return found


def failures_and_losses(directory: str) -> dict[str, Any]:
    """What each way to fail on rank 1 gives on this rank, and the losses of the training steps
    between them, with those of steps alone."""
    trainer, _ = build(case_config(directory))
    alone = [run_steps(trainer, step, step + 1).tobytes() for step in range(6)]
    config = case_config(directory)
    trainer, model = build(config)
    with trainer.ranks.in_turn() as is_first:
        data = prepare(config, only_open=not is_first)
    held_out = HeldOutEvaluator(
        config, data, model.root, trainer.ranks, Path(directory) / "out", attention=model.attention
    )
    last_block: Any = blocks(model.causal_lm)[-1]
    out_of_memory = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
    sequences: Any = next(iter(data.held_out.values()))
    places: dict[str, tuple[Any, str, int, Exception]] = {
        # Its weights are gathered then, and those of the block before it given back.
        "amid a forward": (last_block, "forward", 1, out_of_memory),
        "amid an answer": (last_block, "forward", 6, out_of_memory),
        "before a forward": (sequences, "read", 0, OSError(5, "Input/output error")),
        "in the head": (model.causal_lm.lm_head, "forward", 2, RuntimeError("a kernel failed")),
        "without a forward": (held_out_module, "judge", 1, ZeroDivisionError("division by zero")),
    }
    found: dict[str, Any] = {"undisturbed": held_out.evaluate("undisturbed")}
    losses = [run_steps(trainer, 0, 1)]
    for step, (place, (owner, name, calls, error)) in enumerate(places.items(), start=1):
        with pytest.MonkeyPatch.context() as patch:
            if trainer.ranks.rank == 1:
                patch.setattr(owner, name, raising(getattr(owner, name), calls, error))
            found[place] = held_out.evaluate(place)
        losses.append(run_steps(trainer, step, step + 1))
    found["afterwards"] = held_out.evaluate("afterwards")
    return {"found": found, "losses": [loss.tobytes() for loss in losses], "alone": alone}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[bool, dict[str, Any]]]:
    directory = tmp_path_factory.mktemp("failing")
    write_rows(directory / "rows.jsonl", 60)
    return run_ranks(both_ways, 2, str(directory), timeout=400)


@pytest.mark.parametrize("keep_unsharded", [False, True])
def test_a_failure_on_one_rank_is_one_of_all_and_training_goes_on(
    results: list[dict[bool, dict[str, Any]]], keep_unsharded: bool
) -> None:
    one, other = (result[keep_unsharded] for result in results)
    assert one == other
    found: dict[str, EvaluationResults] = one["found"]
    failed = {place: [failure.metric for failure in each.failures] for place, each in found.items()}
    assert failed == {
        "undisturbed": [],
        "amid a forward": ["loss", "sql-execution"],
        "amid an answer": ["sql-execution"],
        "before a forward": ["loss"],
        "in the head": ["loss", "sql-execution"],
        "without a forward": ["sql-execution"],
        "afterwards": [],
    }
    (part,) = found["undisturbed"].results
    reason = found["amid a forward"].failures[0].reason
    assert reason == "rank 1: OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB"
    assert "OutOfMemoryError" in (found["amid a forward"].failures[0].stack or "")
    assert set(found["before a forward"].results[part]) >= {"sql_execution", "questions"}
    assert set(found["without a forward"].results[part]) >= {"loss", "perplexity"}
    assert one["losses"] == one["alone"]
