"""Rows of the summary one by one, from figures that are made up: which of two things is shown, and
at which limit."""

from __future__ import annotations

import io
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from drillyard.estimation import estimate_text as text
from drillyard.estimation.quantity import Range, quantity
from drillyard.hardware import FactSource, Quota

SURE, DOUBTED = FactSource("book", "2026-01-01"), FactSource("rumour", None, True)


def between(
    low: float, high: float, name: str = "x", unit: str = "s", source: FactSource = SURE
) -> Range:
    return Range(
        quantity(name, low, unit, "made up", source), quantity(name, high, unit, "made up", source)
    )


def one(value: float, name: str = "x", unit: str = "s", source: FactSource = SURE) -> Any:
    return quantity(name, value, unit, "made up", source)


def of(**fields: Any) -> Any:
    return SimpleNamespace(**fields)


def memory(*parts: Range, total: Range | None = None) -> Any:
    return of(parts=parts, total=total or between(70, 80), peak_at="loss")


def rows(function: Any, *arguments: Any) -> list[tuple[str, str]]:
    return [(label, str(shown)) for label, shown in function(*arguments)]


def test_larger_parts_are_named_and_the_smaller_ones_summed() -> None:
    parts = [
        between(1, 2, "a"),
        between(0.01, 0.049, "b"),
        between(0, 0.05, "c"),
        between(-0.06, 0, "d"),
        between(-0.04, 0.04, "e"),
    ]
    shown = list(text._parts(parts))
    assert [part.rpartition(" ")[0].split()[0] for part in shown] == ["a", "c", "d", "other"]
    assert shown[-1] == "other 0.089"
    assert [part.split()[0] for part in text._parts(parts[:1])] == ["a"]


def test_an_undecided_verdict_names_the_widest_parts_and_how_much_must_be_spared() -> None:
    parts = [
        between(1, 1.5, "narrow"),
        between(1, 3, "middle"),
        between(1, 8.4, "wide"),
        between(1, 1.6, "limit"),
    ]
    assert (
        text._undecided(memory(*parts), 77.5)
        == "fits if 2.5 of the 10 GiB that are uncertain are spared: wide 7.4, middle 2, limit 0.6"
    )


@pytest.mark.parametrize(
    ("verdict", "available", "num_alternatives", "labels"),
    [
        ("fits", 90, 0, ["memory", ""]),
        ("may not fit", 75, 0, ["memory", "", ""]),
        ("may not fit", 75, 1, ["memory", "", "", "fits with"]),
        ("does not fit", 60, 0, ["memory", "", "fits with"]),
        ("does not fit", 60, 6, ["memory", "", "fits with"]),
        ("unknown", None, 0, ["memory", ""]),
    ],
)
def test_rows_of_each_verdict(
    verdict: str, available: float | None, num_alternatives: int, labels: list[str]
) -> None:
    changes = [
        of(in_words=lambda n=n: f"change-{n}", costs="nothing") for n in range(num_alternatives)
    ]
    limit = None if available is None else one(available, source=DOUBTED)
    estimate = of(
        memory=memory(between(70, 80)), available_gib=limit, verdict=verdict, alternatives=changes
    )
    found = rows(text._memory_rows, estimate)
    assert [label for label, _ in found] == labels
    assert found[0][1].startswith(verdict.upper()) and (" of " in found[0][1]) == (
        available is not None
    )
    assert available is None or f"of {available}? GiB" in found[0][1]
    if labels[-1] == "fits with":
        assert [
            line.partition(";")[0] for line in found[-1][1].splitlines() if "change" in line
        ] == [f"change-{n}" for n in range(min(num_alternatives, 4))]
    assert rows(text._memory_rows, of(**{**vars(estimate), "memory": None})) == []


@pytest.mark.parametrize(
    ("basis", "count", "shown"),
    [
        ("bound", 0, "a bound"),
        ("calibration", 1, "your run run-0"),
        ("class", 1, "1 measured run: run-0"),
        ("class", 4, "4 measured runs: run-0, run-1, run-2, run-3"),
        ("class", 5, "run-3, ..."),
        ("neighbours", 2, "2 measured runs of neighbouring classes: run-0, run-1"),
    ],
)
def test_what_a_step_time_is_drawn_from(basis: str, count: int, shown: str) -> None:
    written = text._basis(of(basis=basis, rows=[of(row=of(name=f"run-{n}")) for n in range(count)]))
    assert (
        shown in written
        and ("..." in written) == (count > 4)
        and ("neighbouring" in written) == (count == 2)
    )


@pytest.mark.parametrize(("wall", "both"), [(1010.0, False), (1011.0, True), (None, False)])
def test_the_time_without_failures_is_shown_where_it_differs(
    wall: float | None, both: bool
) -> None:
    run = of(
        steps=1000,
        tokens=2e9,
        failure_free=between(900, 1000),
        wall=None if wall is None else between(900, wall),
    )
    shown = text._run_text(run)
    assert (
        shown.startswith("1,000 steps, 2 B tokens: ")
        and (", 15 to 16.7 min without" in shown) == both
    )
    assert (" with saves and failures" in shown) == (wall is not None)


@pytest.mark.parametrize(("drain", "stored"), [(0.0, False), (4.0, True)])
def test_a_save_is_stored_later_only_where_it_takes_time(drain: float, stored: bool) -> None:
    checkpoint = of(blocking=one(2.0), drain=one(drain, source=DOUBTED))
    shown = text._saves_text(
        of(checkpoint=checkpoint, restart=of(total=one(90.0)), saves="every 5 steps")
    )
    assert ("stored 4.0 s? later" in shown or "stored 4 s? later" in shown) == stored
    assert shown.startswith("every 5 steps\n") and ("stored" in shown) == stored


def test_a_cost_has_the_run_where_its_length_is_known() -> None:
    price = of(of_gpu=one(3.0, unit="$/h"), about="spot")
    cost = of(
        of_step=between(1, 1),
        of_million_tokens=between(2, 2),
        of_run=between(500, 500),
        price=price,
    )
    run = of(gpu_hours=between(10, 10))
    (hours, known), (_, shown) = rows(text._cost_rows, of(cost=cost, run_time=run))
    assert (hours, known) == ("GPU-hours", "10")
    assert "for the run" in shown and "$3.00 per GPU-hour (spot)" in shown
    assert [label for label, _ in rows(text._cost_rows, of(cost=None, run_time=run))] == [
        "GPU-hours"
    ]
    ((label, shown),) = rows(
        text._cost_rows, of(cost=of(**{**vars(cost), "of_run": None}), run_time=None)
    )
    assert label == "cost" and "for the run" not in shown


def test_groups_of_figures_leave_out_what_is_not_known() -> None:
    price = of(of_gpu="gpu", of_node="node", of_all="all")
    cost = of(price=price, of_step="step", of_million_tokens="tokens", of_run="run")
    run = of(
        failure_free="free",
        wall="wall",
        gpu_hours="hours",
        failures=[of(rate=of(name="llama3"), quantities=["t"])],
    )
    whole = of(
        memory=of(parts=("a",), total="b"), step_time=of(quantities=["s"]), run_time=run, cost=cost
    )
    assert {title: list(quantities) for title, quantities in text.quantity_groups(whole)} == {
        "memory per GPU": ["a", "b"],
        "step time": ["s"],
        "run": ["free", "wall", "hours"],
        "failures at llama3": ["t"],
        "cost": ["gpu", "node", "all", "step", "tokens", "run"],
    }
    short = of(
        memory=None,
        step_time=None,
        run_time=of(**{**vars(run), "wall": None, "failures": []}),
        cost=of(**{**vars(cost), "of_run": None}),
    )
    assert {title: list(quantities) for title, quantities in text.quantity_groups(short)} == {
        "run": ["free", "hours"],
        "cost": ["gpu", "node", "all", "step", "tokens"],
    }
    assert not list(text.quantity_groups(of(memory=None, step_time=None, run_time=None, cost=None)))


@pytest.mark.parametrize(
    ("changes", "shown", "hidden"),
    [
        (
            {},
            [" parameters on 2 x m", "no activation", "over 8, 4 x 64 tokens per GPU: 2,048"],
            ["active", "LoRA"],
        ),
        ({"active": 30}, [", 30 active on"], []),
        ({"adapters": of(rank=16)}, ["LoRA of rank 16"], ["nf4"]),
        ({"adapters": of(rank=16), "quantized": True}, ["LoRA of rank 16 on nf4"], []),
        ({"replicate": 2}, ["over 8 x 2 copies"], ["whole"]),
        ({"gathers_adapters_alone": True}, ["over 8, frozen weights whole, 4 x 64"], []),
        ({"gradient_accumulation": 3}, ["micro-batch, 3 a step"], []),
        ({"gradient_accumulation": 1, "replicate": 1}, [], ["copies", "micro-batch"]),
    ],
)
def test_the_title_has_what_is_set(changes: Any, shown: list[str], hidden: list[str]) -> None:
    settings = {"replicate": 1, "gradient_accumulation": 1, "adapters": None, "quantized": False}
    settings |= {"active": 100, "gathers_adapters_alone": False, **changes}
    setup = of(
        spec=of(active_parameters=settings.pop("active"), total_parameters=100),
        activation_checkpointing="none",
        micro_batch_size=4,
        sequence_length=64,
        precision="bf16",
        shard=8,
        tokens_per_step=2048,
        **settings,
    )
    title = str(
        text._title(of(request=of(config=of(name="run"), target=of(title="2 x m")), setup=setup))
    )
    assert all(part in title for part in shown) and not any(part in title for part in hidden)


def test_quotas_and_what_is_missing() -> None:
    quota = Quota("M", "here", 1600, "GPUs", "", FactSource("", None), {"family": "H100"})
    assert quota.in_words == "1,600 GPUs of M, family H100 in here"
    assert replace(quota, dimensions={}, region=None).in_words == "1,600 GPUs of M"
    missing = [of(what="a", why="b", give=give) for give in ("--flag", "a file", "")]
    estimate = of(
        refusals=["no"],
        memory=None,
        available_gib=None,
        verdict="unknown",
        step_time=None,
        run_time=None,
        cost=None,
        missing=missing,
        quotas=[quota, quota],
    )
    found = rows(text._rows, estimate)
    assert [label for label, _ in found] == ["refused", "missing", "missing", "missing", "quota"]
    assert [shown for _, shown in found[1:4]] == ["a: b: give --flag", "a: b; a file", "a: b"]
    assert len(found[-1][1].splitlines()) == 2


def test_an_explained_figure_has_its_unit_doubt_and_numbered_sources() -> None:
    numbers: dict[FactSource, int] = {}
    assert text._explained(one(2.0, "first"), numbers) == ("  first", "2 s", "made up [1]")
    ends = Range(one(1.0, unit="", source=DOUBTED), one(4.0, unit="", source=SURE))
    assert text._explained(ends, numbers) == ("  x", "1 to 4?", "made up [1-2]")
    bound = Range(one(1.0), one(1.0), is_bound=True)
    assert text._explained(bound, numbers)[1] == "bound: 1 s"
    assert text._explained(quantity("bare", 1.0, "", "f"), numbers) == ("  bare", "1", "f")
    assert numbers == {SURE: 1, DOUBTED: 2}
    assert [text._source_text(source) for source in numbers] == [
        "book, 2026-01-01",
        "rumour  unverified",
    ]


@pytest.mark.parametrize(
    ("low", "high", "shown"),
    [
        (0.95, 0.95, "95.0000%"),
        (0.9, 0.99, "94.5% (known to 90.0% to 99.0%, 95%)"),
        (0.949, 0.951, "95.00% (known to 94.90% to 95.10%, 95%)"),
        (0.95, 0.9500011, "95.0001% (known to 95.0000% to 95.0001%, 95%)"),
        (0.95, 0.9500008, "95.0000%"),
    ],
)
def test_a_mean_has_as_many_digits_as_it_is_known_to(low: float, high: float, shown: str) -> None:
    assert text._known_to(of(mean=(low + high) / 2, low=low, high=high)) == shown


@pytest.mark.parametrize(
    ("outcomes", "no_failure", "shown", "others"),
    [
        (0, 1.0, "no run fails", False),
        (3, 0.0, "3 runs with 6 failures", False),
        (3, 0.00005, "3 runs with 6 failures", False),
        (3, 0.25, "the 75.0% of runs", True),
    ],
)
def test_how_many_runs_were_drawn(
    outcomes: int, no_failure: float, shown: str, others: bool
) -> None:
    drawn = of(outcomes=[of(failures=2)] * outcomes, scenario=of(no_failure_share=no_failure))
    written = text._sample(drawn).replace("75%", "75.0%").replace("75 %", "75.0%")
    assert shown in written and ("the others" in written) == others


def test_words_of_intervals_and_spares_in_a_simulation() -> None:
    goodput = of(mean=0.9, low=0.9, high=0.9, percentile_5=0.8, percentile_95=0.95)
    drawn = of(goodput=goodput, wall_seconds=of(mean=3600.0), seed=1, outcomes=[], waits=0)
    intervals = [
        of(as_good=good, simulation=drawn, interval_steps=n, expected_goodput=0.9)
        for n, good in ((10, False), (20, True), (30, False))
    ]
    spares = [
        of(as_good=good, usd=usd, simulation=drawn, spares=n, node_hours=5.0)
        for n, good, usd in ((0, False, 1.0), (1, True, None), (2, False, 3.0))
    ]
    shown = io.StringIO()
    simulated = of(
        simulation=drawn, unverified=True, rate="llama3", intervals=intervals, spares=spares
    )
    Console(file=shown, width=120).print(text.simulation_text(simulated))
    lines = [line.strip() for line in shown.getvalue().splitlines()]
    ends = [
        line.split("  ")[-1].strip()
        for line in lines
        if line.startswith(("10 steps", "20 steps", "30 steps"))
    ]
    assert ends[:2] == ["best", "as good"] and ends[2] not in ("best", "as good")
    words = [line.split("  ")[-1].strip() for line in lines if line[:2] in ("0 ", "1 ", "2 ")]
    assert words[:2] == ["cheapest", "as cheap"] and "cheap" not in words[2]
    assert "90.0000%?" in shown.getvalue() and any(
        " - " in line for line in lines if line.startswith("1 ")
    )
