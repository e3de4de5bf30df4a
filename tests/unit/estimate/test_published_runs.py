"""Published runs, each predicted without those of its own publisher: the ranges hold, and the page says so."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from drillyard.estimate.measured import left_out_runs, predicted_runs, published_runs

SCRIPT = Path(__file__).resolve().parents[3] / "benchmarks" / "published_runs.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("published_runs_script", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_at_least_twelve_runs_are_predicted_and_three_quarters_are_inside(script):
    outcomes = script.outcomes(predicted_runs())
    assert len(outcomes) >= 12
    assert sum(one.row.setup.precision == "bf16" for one in outcomes) >= 8
    assert sum(one.inside for one in outcomes) >= 0.75 * len(outcomes)


def test_no_range_is_wider_than_two_fifths(script):
    outcomes = [one for one in script.outcomes(published_runs()) if one.is_range]
    assert len(outcomes) > 40
    assert max(one.width for one in outcomes) <= 1.4 + 1e-9


def test_no_predicted_run_is_drawn_from_its_own_publisher_and_all_are_of_its_class(script):
    for one in script.outcomes(predicted_runs()):
        assert one.predicted.basis == "class"
        assert one.row.publisher not in {used.row.publisher for used in one.predicted.rows}
        assert {used.row.run_class for used in one.predicted.rows} == {one.row.run_class}


def test_the_choice_of_predicted_runs_follows_its_rule():
    runs = published_runs()
    chosen = [runs[name] for name in predicted_runs()]
    assert len(set(predicted_runs())) == len(chosen)
    for row in chosen:
        alike = [one for one in runs.values() if one.run_class == row.run_class]
        assert row.setup.precision == "bf16"
        assert row.setup.adapters is None
        assert any(one.publisher != row.publisher for one in alike)
    assert all(one["run"] and one["why"] for one in left_out_runs())


def test_predicted_runs_vary():
    chosen = [published_runs()[name] for name in predicted_runs()]
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
    missed = [one.row.name for one in script.outcomes(predicted_runs()) if not one.inside]
    for name in missed:
        assert f"| {name} |" in text
    assert text.count("**no**") >= len(missed)
    assert f"**{len(predicted_runs()) - len(missed)} of {len(predicted_runs())} are inside" in text
