"""A estimate as text: the answer first, bounds called bounds, doubts marked, what is missing with
its flag."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest
from rich.console import Console, RenderableType
from tests.facts import says
from tests.unit.estimation.requests import SMALL, request_of, run_config, two_nodes

from drillyard.config.sweep_grammar import parse_axes
from drillyard.estimation.cost import PriceOptions
from drillyard.estimation.document import sweep_document
from drillyard.estimation.estimate_text import (
    explanation,
    quantity_groups,
    simulation_text,
    summary,
)
from drillyard.estimation.request import EstimateRequest
from drillyard.estimation.run_estimate import estimate_run
from drillyard.estimation.run_time import FailureOptions
from drillyard.estimation.simulation_estimate import simulate_run
from drillyard.estimation.sweep import run_sweep
from drillyard.estimation.sweep_text import MOST_ROWS, plot_of, sweep_text
from drillyard.estimation.target import accelerator_target
from drillyard.formatting import three_digits
from drillyard.hardware import catalog


def text(shown: RenderableType, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width, markup=True)
    console.print(shown)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def lines_of(request: EstimateRequest) -> dict[str, str]:
    """The summary's rows by their labels, each as one line."""
    rows: dict[str, str] = {}
    label = ""
    for line in text(summary(estimate_run(request)), 120).splitlines()[3:]:
        if line[:1].strip():
            label, _, line = line.partition("  ")
        rows[label] = f"{rows.get(label, '')} {' '.join(line.split())}".strip()
    return rows


def test_the_answer_comes_first_and_fits_a_screen() -> None:
    estimate = estimate_run(request_of(run_config(training={"activation_checkpointing": "full"})))
    lines = text(summary(estimate), 80).splitlines()
    assert lines[0].startswith("run: 70.6 B parameters on 2 x a4-highgpu-8g (16 b200)")
    assert next(line for line in lines if line.startswith("memory")).split()[1] == "FITS"
    assert len(lines) < 45 and max(map(len, lines)) <= 80


def test_every_figure_of_the_answer_is_reported_with_unit_and_conditions() -> None:
    rows = lines_of(
        request_of(
            run_config(training={"activation_checkpointing": "full"}), price=PriceOptions(8.05)
        )
    )
    assert " of 179 GiB per GPU; peak: " in rows["memory"]
    assert " s" in rows["step time"] and "measured run" in rows["step time"]
    assert "tokens/s" in rows["speed"] and "TFLOP/s" in rows["speed"]
    assert "of 2,250 TFLOP/s (b200, bf16, dense), FLOPs by 6N" in rows["MFU"]
    assert "1,000 steps, 524 M tokens" in rows["run"]
    assert (
        "a step" in rows["cost"]
        and "per million tokens" in rows["cost"]
        and "for the run" in rows["cost"]
    )
    assert says(rows["cost"], "$8.05 per GPU-hour ... user")
    assert all(name in rows["failures"] for name in ("llama3 3.8", "rsc1 6.5", "rsc2 2.34"))


def test_what_compiling_may_save_is_a_part_of_its_own() -> None:
    rows = lines_of(
        request_of(run_config(training={"activation_checkpointing": "none", "micro_batch_size": 1}))
    )
    assert "compiled blocks -" in rows["memory"]


def test_what_does_not_fit_is_reported_with_what_does() -> None:
    rows = lines_of(request_of(run_config(training={"micro_batch_size": 64})))
    assert rows["memory"].startswith("DOES NOT FIT")
    assert "training.micro_batch_size: " in rows["fits with"]


def test_a_bound_is_called_one() -> None:
    rows = lines_of(
        request_of(run_config(SMALL, training={"precision": "fp32"}), two_nodes("a3-megagpu-8g"))
    )
    assert rows["step time"].startswith("at least ") and says(rows["step time"], "a bound")
    assert "at most " in rows["speed"] and rows["MFU"].startswith("at most ")
    assert rows["cost"].startswith("at least ") and "at least " in rows["run"]


def test_what_is_missing_is_reported_with_its_flag() -> None:
    rows = lines_of(request_of(run_config(SMALL), accelerator_target("h100", 8, catalog())))
    assert (
        "give --storage-gb-per-s" in rows["missing"]
        and "give --price-per-gpu-hour" in rows["missing"]
    )
    assert "cost" not in rows and says(rows["run"], "saves and failures")


def test_doubts_are_marked_and_the_mark_explained() -> None:
    doubted = text(summary(estimate_run(request_of())))
    assert says(doubted, "? rests on")
    assert "unverified" in text(explanation(estimate_run(request_of())))


def test_spot_without_preemptions_says_what_is_left_out() -> None:
    shown = text(summary(estimate_run(request_of(target=two_nodes(consumption="spot")))), 400)
    assert says(shown, "preemptions ... spot")
    assert says(" ".join(shown.split()), "not known ... --preemptions-per-node-day")
    given = request_of(
        target=two_nodes(consumption="spot"), failures=FailureOptions(preemptions_per_node_day=0.1)
    )
    assert "preemptions" not in text(summary(estimate_run(given)), 400)


def test_the_explanation_has_every_term_with_formula_and_numbered_source() -> None:
    estimate = estimate_run(request_of())
    shown = " ".join(text(explanation(estimate), 400).split())
    for _, quantities in quantity_groups(estimate):
        for one in quantities:
            end = one.low if hasattr(one, "low") else one
            assert f"{end.name} " in shown and " ".join(end.formula.split()) in shown
            assert all(source.text in shown for source in end.sources)
    for decision in estimate.resolved.decisions:
        assert f"{decision.key}: {decision.value}" in shown and decision.reason in shown
    assert {"memory per GPU", "step time", "run", "failures at llama3", "cost", "sources"} <= set(
        line.strip() for line in text(explanation(estimate), 400).splitlines()
    )


def test_an_explanation_is_whole_on_a_narrow_terminal_too() -> None:
    narrow = text(explanation(estimate_run(request_of())), 60)
    assert "\u2026" not in narrow and max(map(len, narrow.splitlines())) <= 60


def test_between_the_ends_of_the_range_the_answer_says_what_it_hangs_on() -> None:
    config = run_config(training={"activation_checkpointing": "none", "micro_batch_size": 1})
    memory = estimate_run(request_of(config)).memory
    assert memory is not None
    width = memory.total.high.value - memory.total.low.value
    target = two_nodes()
    smaller = target.accelerator.model_copy(
        update={"memory_gib": memory.total.high.value - width / 4}
    )
    request = request_of(config, replace(target, accelerator=smaller))
    assert estimate_run(request).verdict == "may not fit"
    reported_of = lines_of(request)["memory"]
    assert says(reported_of, f"fits if {three_digits(width / 4)} of the {three_digits(width)} GiB")
    assert "compiled blocks " in reported_of.partition("spared: ")[2]
    assert "uncertain" not in lines_of(request_of(run_config(SMALL)))["memory"]


def test_what_the_trainer_refuses_stands_above_the_verdict() -> None:
    config = run_config(SMALL)
    pretrained = config.model_copy(
        update={"model": config.model.model_copy(update={"init": "pretrained"})}
    )
    rows = lines_of(replace(request_of(config), config=pretrained))
    assert next(iter(rows)) == "refused" and "model.init" in rows["refused"]
    assert "FITS" in rows["memory"]
    assert "refused" not in lines_of(request_of(config))


def test_what_a_save_and_a_restart_take_is_reported_and_can_be_given() -> None:
    reported_of = lines_of(request_of())["checkpoints"]
    assert re.search(
        r"a save stops training for [0-9.]+ ms, is stored [0-9.]+ s\? later; a restart takes ",
        reported_of,
    )
    given = FailureOptions(restart_seconds=90, storage_gb_per_s=100)
    assert (
        lines_of(request_of(failures=given))["checkpoints"].count("a restart takes 1.5 min ") == 1
    )
    waits = lines_of(request_of(run_config(checkpoint={"asynchronous": False})))["checkpoints"]
    assert "stored" not in waits and says(waits, "a save stops")


def test_text_in_brackets_is_text() -> None:
    config = run_config(SMALL).model_copy(update={"name": "[red]run[/nonsense]"})
    assert "[red]run[/nonsense]" in text(summary(estimate_run(request_of(config))))


def test_a_simulation_tells_spread_best_interval_and_spares() -> None:
    estimate = estimate_run(
        request_of(run_config(training={"steps": 20_000}), two_nodes("a3-megagpu-8g", 128))
    )
    lines = text(simulation_text(simulate_run(estimate, seed=3))).splitlines()
    assert re.search(
        r"simulated at llama3, seed 3: [0-9,]+ runs with [0-9,]+ failures", " ".join(lines)
    )
    assert sum(line.endswith("best") for line in map(str.rstrip, lines)) == 1
    assert sum(line.endswith("cheapest") for line in map(str.rstrip, lines)) == 1


def test_a_small_sweep_is_shown_whole_and_a_large_one_by_its_front() -> None:
    request = request_of(run_config(SMALL, training={"activation_checkpointing": "none"}))
    small = text(sweep_text(run_sweep(request, parse_axes(["nodes=1..3"])), "run"))
    assert small.count(" fits ") == 3 and "(o: Pareto front)" in small
    large = run_sweep(request, parse_axes([f"nodes=1..{MOST_ROWS + 1}"]))
    shown = text(sweep_text(large, "run"))
    assert shown.count(" fits ") == len(large.front) < MOST_ROWS
    assert says(shown, f"{len(large.front)} of {MOST_ROWS + 1} runs ... {MOST_ROWS + 1} fit")


def test_a_sweep_says_what_auto_became_at_each_point() -> None:
    request = request_of(run_config(training={"micro_batch_size": 1}))
    lines = text(
        sweep_text(run_sweep(request, parse_axes(["nodes=2,16"])), "run"), 110
    ).splitlines()
    assert sum(" memory-budget " in line for line in lines) == 1
    assert sum(" none " in line for line in lines) == 1
    chosen = request_of(
        run_config(training={"micro_batch_size": 1, "activation_checkpointing": "full"})
    )
    assert "recom" not in text(
        sweep_text(run_sweep(chosen, parse_axes(["nodes=2,16"])), "run"), 110
    )


def test_a_sweep_and_its_json_say_that_some_values_are_not_confirmed() -> None:
    swept = run_sweep(
        request_of(run_config(SMALL, training={"activation_checkpointing": "none"})),
        parse_axes(["nodes=1,2"]),
    )
    assert all(point.unverified for point in swept.points)
    assert "without a primary source" in text(sweep_text(swept, "run"))
    assert [point.unverified for point in sweep_document(swept, "run").points] == [True, True]


def test_a_sweep_over_classes_of_measured_runs_says_how_far_their_speeds_can_be_compared() -> None:
    request = request_of(
        run_config(training={"micro_batch_size": 1}), two_nodes("a3-megagpu-8g", 8)
    )
    across = text(
        sweep_text(
            run_sweep(request, parse_axes(["activation_checkpointing=selective,full"])), "run"
        ),
        200,
    )
    assert (
        "h100, bf16, checkpointing selective, sharded; h100, bf16, checkpointing full, sharded"
        in across
    )
    assert says(across, "30 %")
    within = text(
        sweep_text(run_sweep(request, parse_axes(["activation_checkpointing=full"])), "run"), 200
    )
    assert not says(within, "speeds rest")


def test_in_a_sweep_every_figure_of_a_bound_is_marked() -> None:
    request = request_of(
        run_config(SMALL, training={"precision": "fp32"}), two_nodes("a3-megagpu-8g")
    )
    (line,) = (
        line
        for line in text(
            sweep_text(run_sweep(request, parse_axes(["nodes=2"])), "run"), 110
        ).splitlines()
        if "fits" in line
    )
    assert line.count(">") == 3 and line.count("<") == 2 and ">$" in line


def test_what_cannot_be_is_counted_by_its_reason() -> None:
    request = request_of(run_config(SMALL, training={"global_batch_size": 128}))
    shown = text(sweep_text(run_sweep(request, parse_axes(["micro_batch_size=2,3"])), "run"), 200)
    assert says(shown, "1 cannot be: training.global_batch_size: 128")


def test_the_plot_leaves_out_what_does_not_fit_and_labels_the_rest() -> None:
    request = request_of(run_config(SMALL, training={"activation_checkpointing": "none"}))
    found = plot_of(run_sweep(request, parse_axes(["micro_batch_size=1,4,4096"])), "run")
    assert [dot.label.partition(":")[0] for dot in found.dots] == [
        "micro_batch_size 1",
        "micro_batch_size 4",
    ]
    nothing = run_sweep(request, parse_axes(["micro_batch_size=4096,8192"]))
    with pytest.raises(Exception, match="nothing to draw"):
        plot_of(nothing, "run")
    assert "does not fit" in text(sweep_text(nothing, "run"))


def test_a_calibrated_answer_names_the_run() -> None:
    from drillyard.estimation.measured_runs import published_runs

    row = replace(published_runs()["gke-b200-70b-16"], name="my-run")
    assert "from your run my-run" in lines_of(request_of(calibration=row))["step time"]
