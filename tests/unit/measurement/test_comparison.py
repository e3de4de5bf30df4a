"""Comparison: what is faster and by how much, whose loss is lower by which measure, and what cannot
be compared."""

from __future__ import annotations

import io
import math

import numpy as np
import pytest
from rich.console import Console
from tests.facts import says
from tests.unit.measurement.made import NEW_YEAR, SECOND, run_log, stamps

from drillyard.errors import UserError
from drillyard.measurement.comparison import compare_runs
from drillyard.measurement.comparison_text import render_comparison
from drillyard.measurement.run_result import RunResult, measure
from drillyard.measurement.user_facts import UserFacts

ASKED = UserFacts(num_gpus=8, global_batch_size=64, sequence_length=4096, price_per_gpu_hour=3.0)


def run(
    name: str,
    *,
    seed: int,
    step_seconds=10.0,
    noise=0.02,
    steps=200,
    loss_offset=0.0,
    asked=ASKED,
    **facts,
) -> RunResult:
    """A run whose loss falls as 5 / step^0.3, both with noise that neighbouring steps share."""
    draw = np.random.default_rng(seed)
    seconds = step_seconds * (1 + noise * draw.standard_normal(steps))
    number = np.arange(1, steps + 1)
    loss = 5 / number**0.3 + loss_offset + 0.02 * draw.standard_normal(steps)
    log = run_log(
        step=number, seconds=seconds, loss=loss, time_us=stamps(seconds.tolist()), facts=facts
    )
    log.clock.first_time_us = NEW_YEAR
    log.sources[0].name = name
    return measure(log, asked)


def printed(comparison) -> str:
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(render_comparison(comparison))
    return console.export_text()


def test_a_faster_run_is_found_with_its_interval():
    comparison = compare_runs([run("a.log", seed=1), run("b.log", seed=2, step_seconds=9.5)])
    (against,) = comparison.against
    faster = against.faster
    assert against.of == "tokens_per_second_per_gpu"
    assert faster.low < 10 / 9.5 - 1 < faster.high
    assert faster.certain and 0.003 < faster.high - faster.low < 0.03
    assert "b.log: 5." in printed(comparison) and "more tokens/s/GPU than a.log" in printed(
        comparison
    )


def test_equal_runs_are_distinguished_as_rarely_as_the_interval_promises():
    wrong = 0
    for seed in range(0, 200, 2):
        (against,) = compare_runs([run("a", seed=seed), run("b", seed=seed + 1)]).against
        wrong += against.faster.certain
    assert 0 < wrong <= 13  # 5 of 100 are expected; more than 13 happens once in a thousand


def test_a_difference_within_the_printed_precision_is_none():
    coarse = {"seconds_precision": [0.005] * 40, "step": list(range(40))}
    runs = [measure(run_log(seconds=[seconds] * 40, **coarse)) for seconds in (0.06, 0.061)]
    (against,) = compare_runs(runs).against
    assert against.of == "step_seconds"
    assert not against.faster.certain
    assert "as fast as" in printed(compare_runs(runs))


def test_few_steps_have_no_interval():
    (against,) = compare_runs([run("a", seed=1, steps=5), run("b", seed=2, steps=200)]).against
    assert (against.faster.low, against.faster.certain) == (None, None)
    assert "too few" in printed(compare_runs([run("a", seed=1, steps=5), run("b", seed=2)]))


@pytest.mark.parametrize(("steps", "blocks"), [(9, 4), (11, 5), (13, 6)])
def test_five_blocks_of_two_steps_have_an_interval(steps, blocks):
    # The first step is left out.
    (against,) = compare_runs(
        [run("a", seed=1, steps=steps), run("b", seed=2, steps=steps)]
    ).against
    assert against.faster.blocks == blocks
    assert (against.faster.low is not None) == (blocks >= 5)


@pytest.mark.parametrize(("steps", "blocks"), [(20, 4), (24, 5), (26, 6)])
def test_five_differences_of_the_loss_have_an_interval(steps, blocks):
    (against,) = compare_runs(
        [run("a", seed=1, steps=steps), run("b", seed=2, steps=steps)]
    ).against
    assert against.loss["step"].blocks == blocks
    assert (against.loss["step"].low is not None) == (blocks >= 5)


def test_a_lower_loss_is_found_by_every_measure_of_progress():
    comparison = compare_runs([run("a", seed=1), run("b", seed=2, loss_offset=-0.1)])
    (against,) = comparison.against
    for axis in ("step", "tokens", "seconds", "dollars"):
        assert against.loss[axis].low < -0.1 < against.loss[axis].high < 0
    assert comparison.unknown_axes == {}


def test_the_measures_of_progress_disagree_where_one_run_is_faster():
    # The same loss by step, twice as fast: by time and dollars it is ahead.
    comparison = compare_runs([run("a", seed=1), run("b", seed=2, step_seconds=5.0)])
    (against,) = comparison.against
    assert abs(against.loss["step"].value) < 0.03
    ahead = 5 / 200**0.3 - 5 / 100**0.3
    assert against.loss["seconds"].value == pytest.approx(ahead, abs=0.05)
    assert against.loss["dollars"].value == pytest.approx(ahead, abs=0.05)


def test_losses_stand_side_by_side_at_what_all_have_reached():
    comparison = compare_runs([run("a", seed=1, steps=100), run("b", seed=2, steps=300)])
    by_step = [point for point in comparison.points if point.axis == "step"]
    assert [point.at for point in by_step] == [25, 50, 75, 100]
    for point in by_step:
        assert point.losses == pytest.approx([5 / point.at**0.3] * 2, abs=0.06)
    tokens = [point.at for point in comparison.points if point.axis == "tokens"]
    assert tokens[-1] == 100 * 64 * 4096


def test_what_is_not_known_is_named():
    unpriced = UserFacts(num_gpus=8)
    comparison = compare_runs([run("a", seed=1, asked=unpriced), run("b", seed=2)])
    assert comparison.unknown_axes == {"tokens": "not known for a", "dollars": "not known for a"}


def test_a_restart_costs_time_in_the_comparison_by_time():
    steady = run_log(seconds=[1.0] * 100, loss=np.linspace(2, 1, 100), time_us=stamps([1.0] * 100))
    stopped = stamps([1.0] * 50) + stamps([1.0] * 50, NEW_YEAR + 500 * SECOND)
    broken = run_log(seconds=[1.0] * 100, loss=np.linspace(2, 1, 100), time_us=stopped)
    (against,) = compare_runs([measure(steady), measure(broken)]).against
    assert against.loss["step"].value == 0
    assert against.loss["seconds"].value > 0.3


@pytest.mark.parametrize(
    ("ours", "theirs", "word"),
    [
        (
            {"model": "Llama-3.1-8B"},
            {"model": "Llama-3.1-70B"},
            "model: Llama-3.1-8B (a), Llama-3.1-70B (b)",
        ),
        (
            {"sequence_length": 4096},
            {"sequence_length": 8192},
            "sequence length: 4096 (a), 8192 (b)",
        ),
        ({"precision": "bf16"}, {"precision": "fp8"}, "precision: bf16 (a), fp8 (b)"),
        ({"tokenizer": "llama"}, {"tokenizer": "gpt2"}, "tokenizer: llama (a), gpt2 (b)"),
    ],
)
def test_runs_that_mean_different_things_are_called_not_comparable(ours, theirs, word):
    asked = UserFacts(num_gpus=8)
    comparison = compare_runs(
        [run("a", seed=1, asked=asked, **ours), run("b", seed=2, asked=asked, **theirs)]
    )
    assert not comparison.comparable
    assert comparison.differ == (word,)
    assert printed(comparison).startswith("Not comparable")


def test_other_words_for_the_same_thing_do_not_make_runs_differ():
    ours = {"model": "meta-llama/Llama-3.1-70B", "precision": "bf16", "parameters": 70_553_706_496}
    theirs = {"model": "/models/llama-3.1-70b/", "precision": "bfloat16", "parameters": 70.55e9}
    assert compare_runs([run("a", seed=1, **ours), run("b", seed=2, **theirs)]).comparable


def test_what_nobody_states_is_said_and_stands_against_nothing():
    comparison = compare_runs([run("a", seed=1, model="x"), run("b", seed=2, model="x")])
    assert comparison.comparable
    assert comparison.not_stated == ("precision", "tokenizer")


def test_runs_have_names_that_tell_them_apart():
    paths = ("/x/one/run.log", "/x/two/run.log")
    assert compare_runs([run(path, seed=1) for path in paths]).names == (
        "one/run.log",
        "two/run.log",
    )
    assert compare_runs([run("run.log", seed=1)] * 2).names == ("1: run.log", "2: run.log")


def test_the_document_has_all_runs_and_strict_numbers():
    document = compare_runs([run("a", seed=1), run("b", seed=2)]).as_json()
    assert [one["name"] for one in document["runs"]] == ["a", "b"]
    assert math.isfinite(document["against_the_first"][0]["faster"]["value"])
    assert set(document["losses"][0]["loss"]) == {"a", "b"}


def test_a_run_that_has_no_loss_yet_where_the_other_ends_has_no_difference_there():
    # One step of the first run takes longer than all of the second.
    slow, fast = (
        run("slow", seed=1, step_seconds=1000.0, steps=10),
        run("fast", seed=2, step_seconds=0.1),
    )
    comparison = compare_runs([slow, fast])
    (against,) = comparison.against
    assert set(against.loss) == {"step", "tokens"}
    by_time = [point for point in comparison.points if point.axis == "seconds"]
    assert all(point.losses[0] is None and point.losses[1] is not None for point in by_time)
    assert says(printed(comparison), "tokens/s/GPU of slow")


def test_one_run_cannot_be_compared():
    with pytest.raises(UserError, match="two runs"):
        compare_runs([run("a", seed=1)])


def test_runs_without_losses_or_times_are_compared_as_far_as_they_go():
    nothing = measure(run_log(loss=[float("nan")] * 3))
    comparison = compare_runs([nothing, run("b", seed=1)])
    assert comparison.against[0].faster is None
    assert says(comparison.unknown_axes["step"], "no finite loss")
    printed(comparison)
