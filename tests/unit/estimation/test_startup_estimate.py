"""The line at the start of a run: it names what is known, calls a bound a bound, and says what is
not known and why."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from tests.facts import says

from drillyard.errors import UserError
from drillyard.estimation import startup_estimate as module
from drillyard.estimation.quantity import Range, quantity
from drillyard.estimation.setup import LoraSetup, Setup
from drillyard.estimation.startup_estimate import StartupEstimate, startup_estimate
from drillyard.hardware import find_accelerator
from drillyard.hardware.facts import FactSource
from drillyard.modelspec import model_spec, spec_from_counts

LLAMA_8B = model_spec(
    {
        "model_type": "llama",
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    }
)
H100 = find_accelerator("NVIDIA H100 80GB HBM3")
assert H100 is not None


def setup(**changes: Any) -> Setup:
    settings: dict[str, Any] = {
        "spec": LLAMA_8B,
        "precision": "bf16",
        "sequence_length": 4096,
        "micro_batch_size": 1,
        "gradient_accumulation": 1,
        "activation_checkpointing": "full",
        "shard": 8,
        "replicate": 1,
        "gpus_per_node": 8,
        "kernel": "varlen",
        "compiled": True,
        "loss_chunk_tokens": 1024,
        **changes,
    }
    return Setup(**settings)


def between(
    low: float, high: float, unit: str, *, is_bound: bool = False, unverified: bool = False
) -> Range:
    source = FactSource("a test", None, unverified)
    return Range(*(quantity("x", value, unit, "given", source) for value in (low, high)), is_bound)


def compared(
    peak: Range | None, seconds: Range | None, available: float | None = 80.0, **missing: str
) -> StartupEstimate:
    estimate: Any = None if peak is None else SimpleNamespace(total=peak, peak_at="loss")
    return StartupEstimate(setup(), available, estimate, seconds, missing)


@pytest.mark.parametrize(
    ("available", "verdict", "words"),
    [
        (80.0, "fits", "it fits: 50 to 70 of 80 GiB"),
        (70.0, "fits", "it fits: 50 to 70 of 70 GiB"),
        (60.0, "may not fit", "it may not fit: 50 to 70 of 60 GiB"),
        (40.0, "does not fit", "it does not fit: 50 to 70 of 40 GiB"),
        (None, None, "50 to 70 GiB per rank"),
    ],
)
def test_the_verdict_compares_both_ends_with_the_memory(
    available: float | None, verdict: str | None, words: str
) -> None:
    start = compared(between(50, 70, "GiB"), between(1.5, 2.0, "s"), available)
    assert start.verdict == verdict
    assert says(start.line(), f"Estimate: {words} ... full ... 1.5 to 2 s")


def test_frozen_weights_that_every_rank_holds_whole_are_named() -> None:
    for whole in (True, False):
        one = setup(adapters=LoraSetup(4, "all-linear"), shard=2, keeps_frozen_whole=whole)
        words = StartupEstimate(one, 80.0, None, None, {"memory": "why"}).memory_words()
        assert ("frozen weights whole" in words) == whole


def test_a_bound_is_called_one_and_what_is_not_confirmed_is_about() -> None:
    start = compared(
        between(50, 50, "GiB", unverified=True),
        between(1.5, 1.5, "s", is_bound=True, unverified=True),
    )
    assert says(
        start.line(),
        "Estimate: it fits: about 50 of 80 GiB ... full ... at least 1.5 s ... a bound",
    )


def test_what_is_not_known_is_said_with_the_reason() -> None:
    why = {
        "memory": "attention of this kind has no formula",
        "step_seconds": "no speed of a CPU is known",
    }
    start = compared(None, None, **why)
    assert start.verdict is None
    assert says(
        start.line(),
        "Estimate: ... memory ... attention of this kind ... full ... step time ... CPU",
    )
    assert start.fields()["missing"] == start.missing


def test_the_event_has_the_figures_of_the_line() -> None:
    fields = compared(between(50, 70, "GiB"), between(1.5, 2.0, "s")).fields()
    assert fields == {
        "verdict": "fits",
        "memory_gib": {"low": 50, "high": 70, "available": 80.0},
        "peak_at": "loss",
        "step_seconds": {"low": 1.5, "high": 2.0, "is_bound": False},
        "missing": None,
    }


def test_a_known_gpu_has_memory_and_step_time() -> None:
    start = startup_estimate(setup(), 79.1, H100)
    assert start.verdict == "fits"
    assert start.missing == {}
    assert start.memory is not None and start.step_seconds is not None
    # 8.03 B parameters x 16 bytes over 8 ranks are 15 GiB; a forward and a backward of 4096 tokens
    # take no minute.
    assert 15 < start.memory.total.low.value < start.memory.total.high.value < 79
    assert 0.05 < start.step_seconds.low.value < start.step_seconds.high.value < 5
    assert startup_estimate(setup(), 12.0, H100).verdict == "does not fit"


def test_nothing_that_cannot_be_estimated_ends_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = startup_estimate(setup(spec=spec_from_counts(10**9)), 80.0, None, hardware="a CPU")
    assert says(counted.missing["step_seconds"], "speed of a CPU")
    assert counted.missing["memory"]

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise UserError("no such network\nwhat to do")

    monkeypatch.setattr(module, "step_time", refuse)
    assert startup_estimate(setup(), 80.0, H100).missing == {"step_seconds": "no such network"}
    assert H100 is not None
    unknown = startup_estimate(setup(precision="fp64"), 80.0, H100)
    assert unknown.missing.keys() == {"step_seconds"}
