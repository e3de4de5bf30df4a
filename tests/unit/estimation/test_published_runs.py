"""Published runs, each estimated without those of its own publisher: the ranges hold, and the page
says so."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from drillyard.estimation.measured_runs import (
    estimated_runs,
    left_out_runs,
    published_model,
    published_runs,
)
from drillyard.estimation.step_time import step_time
from drillyard.hardware import catalog

SCRIPT = Path(__file__).resolve().parents[3] / "benchmarks" / "published_runs.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("published_runs_script", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_at_least_twelve_runs_are_estimated_and_three_quarters_are_inside(script):
    outcomes = script.outcomes(estimated_runs())
    assert len(outcomes) >= 12
    assert sum(one.row.setup.precision == "bf16" for one in outcomes) >= 8
    assert sum(one.inside for one in outcomes) >= 0.75 * len(outcomes)


def test_no_range_is_wider_than_two_fifths(script):
    outcomes = [one for one in script.outcomes(published_runs()) if one.is_range]
    assert len(outcomes) > 40
    # But for those whose sequences are longer than those of the runs that they are drawn from.
    wider = {one.row.name for one in outcomes if one.width > 1.4 + 1e-9}
    assert wider == {"foundry-h100-7b-8192", "accelerate-h100-8b-8", "titan-a100-8b"}


# mosaicml/llm-foundry@061f2c7 scripts/train/benchmarking/README.md, H100 80GB BF16: model,
# sequence, micro-batch, gradient accumulation, activation checkpointing, tokens/s per GPU; all on 8
# GPUs.
LONG_SEQUENCES = [
    ("mpt-30b", 8192, 1, 21, "full", 1384),
    ("mpt-13b", 32768, 1, 3, "full", 1976),
    ("mpt-13b", 16384, 3, 3, "full", 2985),
    ("mpt-7b", 65536, 1, 2, "full", 1956),
    ("mpt-7b", 32768, 2, 2, "full", 3318),
    ("mpt-7b", 8192, 8, 2, "full", 6935),
    ("mpt-3b", 65536, 1, 2, "full", 3262),
    ("mpt-3b", 32768, 3, 6, "full", 5873),
    ("mpt-3b", 16384, 1, 6, "none", 11152),
    ("mpt-3b", 8192, 3, 6, "none", 16578),
    ("mpt-1b", 65536, 1, 2, "full", 5506),
    ("mpt-1b", 32768, 1, 4, "none", 12025),
    ("mpt-1b", 16384, 2, 4, "none", 19649),
    ("mpt-1b", 8192, 3, 4, "none", 29157),
]


def test_long_sequences_are_in_a_wider_range_which_says_so():
    known = published_runs()["foundry-h100-7b-8192"]
    inside = 0
    for model, length, size, times, checkpointing, tokens_per_second in LONG_SEQUENCES:
        setup = replace(
            known.setup,
            spec=published_model(model, length),
            sequence_length=length,
            micro_batch_size=size,
            gradient_accumulation=times,
            activation_checkpointing=checkpointing,
        )
        message = step_time(setup, known.machine, known.accelerator, without_source="llm-foundry")
        assert message.seconds is not None
        measured = length * size * times / tokens_per_second
        inside += message.seconds.low.value <= measured <= message.seconds.high.value
        assert any("attention is" in note for note in message.notes)
    assert inside >= 13


def test_a_step_that_waits_for_the_network_has_a_range_like_any_other_and_says_so():
    known = published_runs()["foundry-h100-7b-2048"]
    waits = replace(known.setup, micro_batch_size=1, sequence_length=512, shard=256)
    message = step_time(waits, catalog().machine("a3-highgpu-8g"), known.accelerator)
    assert message.seconds is not None and message.exposed is not None
    assert message.exposed.low.value > 0.5 * message.seconds.low.value
    assert message.seconds.high.value / message.seconds.low.value >= 1.25
    assert any("network limits" in note for note in message.notes)
    short = step_time(known.setup, known.machine, known.accelerator)
    assert not any("network limits" in note or "attention is" in note for note in short.notes)


def test_no_estimated_run_is_drawn_from_its_own_publisher_and_all_are_of_its_class(script):
    for one in script.outcomes(estimated_runs()):
        assert one.estimated.basis == "class"
        assert one.row.publisher not in {used.row.publisher for used in one.estimated.rows}
        assert {used.row.run_class for used in one.estimated.rows} == {one.row.run_class}


def test_the_choice_of_estimated_runs_follows_its_rule():
    runs = published_runs()
    chosen = [runs[name] for name in estimated_runs()]
    assert len(set(estimated_runs())) == len(chosen)
    for row in chosen:
        alike = [one for one in runs.values() if one.run_class == row.run_class]
        assert row.setup.precision == "bf16"
        assert row.setup.adapters is None
        assert any(one.publisher != row.publisher for one in alike)
    assert all(one["run"] and one["why"] for one in left_out_runs())


def test_estimated_runs_vary():
    chosen = [published_runs()[name] for name in estimated_runs()]
    assert len({row.publisher for row in chosen}) >= 4
    assert len({row.run_class for row in chosen}) >= 4
    assert len({row.setup.spec.total_parameters for row in chosen}) >= 6
    assert {row.setup.compiled for row in chosen} == {True, False}


def test_the_page_is_what_the_script_makes(script):
    assert script.DOCUMENT.read_text(encoding="utf-8") == script.document(), (
        "run `python benchmarks/published_runs.py` and look at what changed"
    )


def test_the_page_names_its_misses(script):
    text = script.document()
    missed = [one.row.name for one in script.outcomes(estimated_runs()) if not one.inside_unwidened]
    for name in missed:
        assert f"| {name} |" in text
    assert text.count("**no**") + text.count("only widened") >= len(missed)
    assert f"**{len(estimated_runs()) - len(missed)} of {len(estimated_runs())} are inside" in text
