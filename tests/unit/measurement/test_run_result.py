"""What a run achieved: the worked example, what is missing by flag, contradictions, costs, the
document."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from tests.facts import says
from tests.unit.measurement.made import SECOND, run_log, stamps
from tests.unit.measurement.published import EXAMPLE, published_log

from drillyard.errors import UserError
from drillyard.measurement.comparison import compare_runs
from drillyard.measurement.comparison_text import render_comparison as compare_screen
from drillyard.measurement.metrics_document import MetricsDocument, json_schema
from drillyard.measurement.parsed_log import NONFINITE, SKIPPED, LogEvent
from drillyard.measurement.read_logs import read_logs
from drillyard.measurement.result_text import render_result
from drillyard.measurement.run_result import measure
from drillyard.measurement.user_facts import UserFacts, moment_us


@pytest.mark.parametrize(
    "around", ["", "# Tutorial\n\n```\nkubectl logs -l app=torch-job -f\n```\n| 16 | 8192 |\n"]
)
def test_the_worked_example(tmp_path, around):
    path = tmp_path / "job.log"
    path.write_text(around + published_log() + around)
    got = measure(read_logs([path]), replace(EXAMPLE, start_step=4)).as_json()
    assert got["step_seconds"]["p50"] == pytest.approx(14.540, abs=0.0005)
    assert got["tokens_per_second_per_gpu"] == pytest.approx(2253.8, abs=0.5)
    assert got["tflops_per_gpu"] == pytest.approx(954.0, abs=0.3)
    assert got["mfu"] == pytest.approx(0.4240, abs=0.0002)
    assert (got["formula"], got["peak_tflops"], got["precision"]) == ("6N", 2250, "bf16")
    assert got["cost_per_step"] == pytest.approx(0.520, abs=0.001)
    assert got["cost_per_million_tokens"] == pytest.approx(0.992, abs=0.002)
    assert got["missing"] == [] and got["warnings"] == []
    assert got["goodput"] == pytest.approx(0.92, abs=0.005)

    detected = measure(read_logs([path]), EXAMPLE).as_json()
    assert detected["step_seconds"]["left_out"] == 3
    for name in (
        "tokens_per_second_per_gpu",
        "tflops_per_gpu",
        "mfu",
        "cost_per_step",
        "cost_per_million_tokens",
    ):
        assert detected[name] == pytest.approx(got[name], rel=0.005)


def flags_for(result: dict[str, Any], field: str) -> set[str]:
    return {flag for item in result["missing"] if item["field"] == field for flag in item["flags"]}


def test_what_a_log_lacks_is_null_and_asked_for_by_flag():
    got = measure(run_log(seconds=[10.0] * 10, loss=[1.0] * 10)).as_json()
    for field, flags in {
        "tokens_per_second_per_gpu": {
            "--batch-size-per-gpu",
            "--global-batch-size",
            "--sequence-length",
        },
        "tflops_per_gpu": {"--params", "--config"},
        "mfu": {"--accelerator", "--params", "--config"},
        "cost_per_step": {"--price-per-gpu-hour", "--price-per-node-hour"},
        "cost_per_million_tokens": {"--price-per-gpu-hour", "--price-per-node-hour"},
        "goodput": set(),
    }.items():
        assert got[field] is None
        assert flags_for(got, field) == flags
        assert [item for item in got["missing"] if item["field"] == field and item["reason"]]


@pytest.mark.parametrize(
    ("asked", "field", "flag"),
    [
        (
            {"global_batch_size": 128, "sequence_length": 4096},
            "tokens_per_second_per_gpu",
            "--num-gpus",
        ),
        ({"batch_size_per_gpu": 8}, "tokens_per_second_per_gpu", "--sequence-length"),
        ({"price_per_gpu_hour": 8.05}, "cost_per_step", "--num-gpus"),
        ({"price_per_node_hour": 64.4, "num_gpus": 16}, "cost_per_step", "--gpus-per-node"),
        ({"accelerator": "b200", "precision": "tf32"}, "mfu", "--precision"),
        ({"formula": "palm"}, "tflops_per_gpu", "--config"),
    ],
)
def test_a_flag_that_is_not_enough_names_the_next_one(asked, field, flag):
    got = measure(run_log(seconds=[10.0] * 10), UserFacts(**asked)).as_json()
    assert got[field] is None
    assert flag in flags_for(got, field)


def test_every_flag_that_is_listed_as_missing_makes_its_figure_known():
    log = run_log(seconds=[14.54] * 10)
    known = measure(log, EXAMPLE).as_json()
    assert known["missing"] == [
        {"field": "goodput", "flags": [], "reason": known["missing"][0]["reason"]},
    ]
    assert known["goodput"] is None and "time stamps" in known["missing"][0]["reason"]


def test_a_batch_of_all_gpus_is_divided_among_them():
    per_gpu = measure(run_log(seconds=[10.0] * 10), EXAMPLE).speed
    of_all = measure(
        run_log(seconds=[10.0] * 10),
        replace(EXAMPLE, batch_size_per_gpu=None, global_batch_size=128),
    ).speed
    assert of_all.tokens_per_second_per_gpu == per_gpu.tokens_per_second_per_gpu == 8 * 4096 / 10
    with pytest.raises(UserError, match="is not --batch-size-per-gpu"):
        measure(run_log(seconds=[10.0] * 10), replace(EXAMPLE, global_batch_size=64))


def test_flags_go_before_the_log_and_differences_are_reported():
    facts = {"sequence_length": 8192, "num_gpus": 16, "places": {"sequence_length": "run.log:3"}}
    result = measure(run_log(seconds=[10.0] * 10, facts=facts), EXAMPLE)
    assert result.speed.sequence_length == 4096
    assert says(result.warnings, "--sequence-length 4096 is used ... 8192 (run.log:3)")
    assert len(result.warnings) == 1


LINE = (
    "Megatron: iteration {}/ 99 | elapsed time per iteration (ms): 5000.0 | global batch size: 128"
    " | lm loss: 2.0 |"
)


@pytest.mark.parametrize(
    "flags",
    [
        {"global_batch_size": 64, "sequence_length": 4096, "num_gpus": 16},
        {"batch_size_per_gpu": 4, "sequence_length": 4096, "num_gpus": 16},
        {"global_batch_size": 256},
    ],
)
def test_a_batch_flag_that_the_lines_contradict_is_reported(tmp_path, flags):
    path = tmp_path / "run.log"
    path.write_text("".join(LINE.format(step) + "\n" for step in range(1, 11)))
    result = measure(read_logs([path]), UserFacts(**flags))
    message = [warning for warning in result.warnings if "128" in warning]
    assert len(message) == 1 and "run.log:1" in message[0] and "batch-size" in message[0]
    right = (
        {"global_batch_size": 128} if "global_batch_size" in flags else {"batch_size_per_gpu": 8}
    )
    assert not any(
        "batch" in warning
        for warning in measure(read_logs([path]), UserFacts(**flags | right)).warnings
    )


@pytest.mark.parametrize(
    ("columns", "facts"),
    [
        ({"tokens": [524_288.0] * 10}, {}),
        ({"samples": [128.0] * 10}, {}),
        ({}, {"global_batch_size": 128}),
    ],
    ids=["tokens on lines", "batch on lines", "batch in a header"],
)
@pytest.mark.parametrize("given", [{"global_batch_size": 64}, {"batch_size_per_gpu": 4}])
def test_a_batch_is_compared_in_whatever_unit_the_log_has(columns, facts, given):
    log = run_log(seconds=[10.0] * 10, facts=facts, **columns)
    asked = UserFacts(**given, sequence_length=4096, num_gpus=16)
    assert len([one for one in measure(log, asked).warnings if "-batch-size" in one]) == 1
    twice = {name: 2 * value for name, value in given.items()}
    assert not any("-batch-size" in one for one in measure(log, replace(asked, **twice)).warnings)


@pytest.mark.parametrize(
    ("flag", "given", "same", "facts"),
    [
        ("--precision", {"precision": "fp8"}, {"precision": "bfloat16"}, {"precision": "bf16"}),
        (
            "--accelerator",
            {"accelerator": "b200"},
            {"accelerator": "h100"},
            {"accelerator": "NVIDIA H100 80GB HBM3"},
        ),
        (
            "--params",
            {"params": 8_030_000_000},
            {"params": 70_600_000_000},
            {"parameters": 70.55e9},
        ),
    ],
)
def test_a_flag_that_contradicts_the_log_on_model_or_hardware_is_reported(flag, given, same, facts):
    log = run_log(seconds=[10.0] * 10, facts=facts)
    assert (
        len([one for one in measure(log, UserFacts(**given)).warnings if one.startswith(flag)]) == 1
    )
    assert not any(one.startswith(flag) for one in measure(log, UserFacts(**same)).warnings)


def test_what_the_log_says_of_its_run_is_enough():
    facts = {"num_gpus": 16, "parameters": 70.55e9, "accelerator": "NVIDIA B200"}
    got = measure(run_log(seconds=[14.54] * 10, tokens=[524_288.0] * 10, facts=facts)).speed
    assert got.mfu == pytest.approx(0.4240, abs=0.0002)
    assert (got.accelerator, got.precision_from) == ("b200", "default")


def test_an_unknown_accelerator_has_no_mfu():
    facts = {"num_gpus": 16, "parameters": 70.55e9, "accelerator": "Fancy GPU"}
    got = measure(run_log(seconds=[14.54] * 10, tokens=[524_288.0] * 10, facts=facts)).as_json()
    assert (got["mfu"], got["peak_tflops"]) == (None, None)
    assert got["tflops_per_gpu"] == pytest.approx(954.0, abs=0.3)
    assert "'Fancy GPU'" in next(
        item["reason"] for item in got["missing"] if item["field"] == "mfu"
    )
    with pytest.raises(UserError, match="not known"):
        measure(run_log(seconds=[14.54] * 10), replace(EXAMPLE, accelerator="fancy"))


def test_adapters_count_frozen_weights_with_four():
    facts = {"parameters": 101e6, "trainable_parameters": 1e6, "num_gpus": 1}
    got = measure(run_log(seconds=[1.0] * 10, tokens=[1000.0] * 10, facts=facts)).speed
    assert got.flops_per_token == 4 * 100e6 + 6 * 1e6
    assert got.formula == "4N frozen + 6N trained"


@pytest.mark.parametrize(
    ("formula", "tflops"),
    [
        ("6N", 954.7),
        ("megatron", 976.8),
        ("causal", 991.0),
        ("torchtitan", 1013.1),
        ("palm", 1027.3),
        ("hfu-full", 1369.8),
    ],
)
def test_named_formulas_of_a_model_by_its_config(tmp_path, formula, tflops):
    sizes = {
        "hidden_size": 8192,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
    }
    config = {"model_type": "llama", **sizes, "intermediate_size": 28672, "vocab_size": 128256}
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    asked = replace(EXAMPLE, params=None, config=tmp_path / "config.json", formula=formula)
    got = measure(run_log(seconds=[14.53] * 10), asked).speed
    assert got.tflops_per_gpu == pytest.approx(tflops, abs=0.06)
    assert got.formula == formula


def test_printed_tflops_are_used_under_their_own_label():
    log = run_log(seconds=[28.294] * 10, printed_tflops_per_gpu=[1520.276] * 10, format="maxtext")
    got = measure(log, UserFacts(accelerator="b200")).speed
    assert (got.tflops_per_gpu, got.formula) == (1520.276, "as printed")
    assert got.mfu == pytest.approx(0.6757, abs=0.0001)


def test_more_than_the_hardware_can_do_is_doubted():
    result = measure(run_log(seconds=[1.0] * 10), EXAMPLE)
    assert any(says(warning, "units") for warning in result.warnings)
    assert result.speed.mfu == pytest.approx(6.165, abs=0.005), "not clipped"
    # The best matmul rate published for B200 in bf16 is 77.6 % of its peak.
    assert not measure(run_log(seconds=[8.0] * 10), EXAMPLE).warnings
    (warning,) = measure(run_log(seconds=[7.9] * 10), EXAMPLE).warnings
    assert says(warning, "MFU 78.0% ... 77.6% of peak")


def test_a_rate_that_its_own_step_time_contradicts_is_a_warning():
    seconds = [14.54] * 10
    printed = [2254.0] * 10
    assert not measure(
        run_log(seconds=seconds, printed_tokens_per_second_per_gpu=printed), EXAMPLE
    ).warnings
    printed[6] = 2300.0
    (warning,) = measure(
        run_log(seconds=seconds, printed_tokens_per_second_per_gpu=printed), EXAMPLE
    ).warnings
    assert warning.startswith("1 line prints tokens/s/GPU") and "run.log:17 2300" in warning
    # Without knowing the tokens: all lines must show the same work.
    (warning,) = measure(
        run_log(seconds=seconds, printed_tflops_per_gpu=[*[954.0] * 9, 975.0])
    ).warnings
    assert "run.log:20 975" in warning
    # '0.06s' is good to 8 %: 1 % off proves nothing.
    coarse = {"seconds": [0.06] * 10, "seconds_precision": [0.005] * 10}
    tokens = [8 * 4096 / 0.0612] * 10
    found = measure(run_log(**coarse, printed_tokens_per_second_per_gpu=tokens), EXAMPLE).warnings
    assert not any("contradicts" in warning for warning in found)
    assert any("+-8.3%" in warning for warning in found)


def test_a_price_per_node_is_divided_by_its_gpus():
    asked = replace(EXAMPLE, price_per_gpu_hour=None, price_per_node_hour=64.4)
    result = measure(run_log(seconds=[14.54] * 10, time_us=stamps([14.54] * 10)), asked)
    assert result.cost.per_step == pytest.approx(0.5202, abs=0.0001)
    assert any("a node has 8 GPUs" in warning for warning in result.warnings)
    assert measure(
        run_log(seconds=[14.54] * 10), replace(asked, gpus_per_node=4)
    ).cost.per_step == pytest.approx(1.0404, abs=1e-4)
    assert result.cost.so_far == pytest.approx(9 * 14.54 / 3600 * 8.05 * 16)


def test_losses_are_those_of_the_steps_that_led_to_the_model():
    log = run_log(
        step=[1, 2, 3, 2, 3, 4],
        attempt=[0, 0, 0, 1, 1, 1],
        loss=[3.0, 2.0, 0.5, 1.9, float("nan"), 1.7],
        flags=[0, 0, 0, 0, NONFINITE | SKIPPED, 0],
        seconds=[1.0] * 6,
    )
    got = measure(log).as_json()
    assert got["loss"] == {
        "first": 3.0,
        "last": 1.7,
        "lowest": 1.7,
        "lowest_step": 4,
        "curve": [[1, 3.0], [2, 1.9], [4, 1.7]],
    }
    assert got["skipped"] == got["nonfinite"] == [{"step": 3, "place": "run.log:15", "steps": 1}]


def test_long_curves_are_thinned_and_keep_their_ends():
    curve = measure(run_log(seconds=[1.0] * 5000, loss=np.linspace(9, 1, 5000))).as_json()["loss"][
        "curve"
    ]
    assert len(curve) == 200
    assert (curve[0], curve[-1]) == ([1, 9.0], [5000, 1.0])


def test_waits_count_once_whichever_ranks_say_so():
    time_us = stamps([1.0] * 10)
    events = [
        LogEvent("checkpoint_begin", time_us[4], 0, 15, step=5, rank=0),
        LogEvent("checkpoint_begin", time_us[4] + SECOND, 0, 15, step=5, rank=1),
        LogEvent("checkpoint_end", time_us[4] + 2 * SECOND, 0, 15, step=5, rank=1),
        LogEvent("checkpoint_end", time_us[4] + 3 * SECOND, 0, 15, step=5, rank=0),
        LogEvent("checkpoint_end", time_us[9], 0, 20, step=10, seconds=5.0),
        LogEvent("checkpoint", time_us[9], 0, 20, step=5, seconds=42.0),
        LogEvent("evaluation_end", time_us[9], 0, 20),
    ]
    got = measure(run_log(events=events, time_us=time_us)).as_json()
    assert got["checkpoints"] == {
        "count": 2,
        "median_seconds": 4.0,
        "longest_seconds": 5.0,
        "total_seconds": 8.0,
        "written": 1,
        "median_written_seconds": 42.0,
    }
    assert got["evaluations"] == {
        "count": 1,
        "median_seconds": None,
        "longest_seconds": None,
        "total_seconds": None,
    }


def test_what_evaluations_found_is_the_last_and_for_losses_the_lowest():
    events = [
        LogEvent(
            "evaluation", None, 0, 12, step=1, values={"rows": {"loss": 2.0, "accuracy": 0.1}}
        ),
        LogEvent(
            "evaluation", None, 0, 14, step=2, values={"rows": {"loss": 1.5, "accuracy": 0.3}}
        ),
        LogEvent(
            "evaluation",
            None,
            0,
            16,
            step=3,
            values={"rows": {"loss": 1.7, "accuracy": float("nan")}},
        ),
    ]
    result = measure(run_log(events=events, seconds=[1.0] * 3))
    assert result.as_json()["held_out"] == {
        "rows.loss": {"last": 1.7, "last_step": 3, "lowest": 1.5, "lowest_step": 2},
        "rows.accuracy": {"last": 0.3, "last_step": 2, "lowest": None, "lowest_step": None},
    }


def test_the_document_is_strict_json_and_follows_its_schema():
    losses = [1.0, float("nan"), float("inf"), 0.5]
    document = measure(run_log(seconds=[1.0] * 4, loss=losses, time_us=stamps([1.0] * 4))).as_json()
    again = json.loads(json.dumps(document, allow_nan=False))
    assert MetricsDocument.model_validate(again).model_dump(mode="json") == again
    schema = json_schema()
    assert set(schema["required"]) == set(document) == set(schema["properties"])
    assert (document["version"], schema["properties"]["version"]["const"]) == (1, 1)


def test_times_of_day_are_read_with_and_without_a_zone():
    from drillyard.loglines.stamps import time_zone

    assert moment_us("--job-start", "1970-01-01T01:00:00.000001+01:00", None) == 1
    assert moment_us("--job-start", "1970-01-01T01:00:00", time_zone("Europe/Zurich")) == 0
    assert moment_us("--job-start", None, None) is None
    with pytest.raises(UserError, match="write it like 2026"):
        moment_us("--job-start", "noon", None)


wild = st.sampled_from([0.0, -1.0, 1e-300, 1e300, float("nan"), float("inf"), 14.5, 0.06, 3.0])


@pytest.mark.slow
@given(data=st.data())
@settings(max_examples=60)
def test_whatever_a_log_holds_the_result_is_strict_and_its_goodput_sums(data):
    length = data.draw(st.integers(1, 12))
    floats = (
        "seconds",
        "loss",
        "grad_norm",
        "tokens",
        "samples",
        "elapsed_seconds",
        "printed_tokens_per_second_per_gpu",
    )
    columns: dict[str, Any] = {
        name: data.draw(st.lists(wild, min_size=length, max_size=length))
        for name in (*floats, "printed_tflops_per_gpu")
        if data.draw(st.booleans())
    }
    steps = st.lists(st.integers(0, 40), min_size=length, max_size=length, unique=True)
    columns["step"] = sorted(data.draw(steps))
    columns["window_steps"] = data.draw(
        st.lists(st.integers(0, 3), min_size=length, max_size=length)
    )
    if data.draw(st.booleans()):
        columns["time_us"] = data.draw(
            st.lists(st.integers(0, 10**14), min_size=length, max_size=length)
        )
    columns["attempt"] = sorted(
        data.draw(st.lists(st.integers(0, 2), min_size=length, max_size=length))
    )
    kinds = st.sampled_from(
        [
            "checkpoint_begin",
            "checkpoint_end",
            "evaluation_end",
            "failure",
            "waiting",
            "end",
            "resume",
        ]
    )
    events = data.draw(
        st.lists(
            st.builds(
                LogEvent,
                kind=kinds,
                time_us=st.none() | st.integers(0, 10**14),
                file=st.integers(0, 1),
                line=st.integers(1, 30),
                attempt=st.integers(0, 3),
                step=st.none() | st.integers(0, 40),
                seconds=st.none() | wild,
            ),
            max_size=8,
        )
    )
    facts = (
        {"global_batch_size": 4096, "sequence_length": 1}
        if data.draw(st.booleans())
        else {"parameters": 7e9}
    )
    asked = data.draw(
        st.sampled_from([EXAMPLE, UserFacts(), UserFacts(accelerator="h100", num_gpus=8)])
    )
    result = measure(run_log(events=events, facts=facts, **columns), asked)
    got = result.as_json()
    json.dumps([got, compare_runs([result, result]).as_json()], allow_nan=False)
    console = Console(file=io.StringIO())
    console.print(render_result(result))
    console.print(compare_screen(compare_runs([result, result])))
    if got["goodput"] is not None:
        assert sum(got["microseconds_by_category"].values()) == round(got["wall_seconds"] * 1e6)
        assert min(got["microseconds_by_category"].values()) >= 0
        assert 0 <= got["goodput"] <= 1


def test_nothing_logged_yet_is_a_result_without_figures():
    from drillyard.measurement.merge_sources import merge_sources

    got = measure(merge_sources([], None)).as_json()
    assert (got["step_seconds"]["p50"], got["goodput"], got["loss"]["curve"]) == (None, None, [])


def test_a_range_without_steps_has_no_rates_either():
    log = run_log(seconds=[1.0] * 10, printed_tokens_per_second_per_gpu=[100.0] * 10)
    got = measure(log, UserFacts(start_step=11)).as_json()
    assert got["step_seconds"]["p50"] is None and got["tokens_per_second_per_gpu"] is None
    assert "step_seconds" in [missing["field"] for missing in got["missing"]]


def test_every_figure_that_is_null_is_listed_as_missing():
    instant = measure(run_log(seconds=[1.0], time_us=stamps([1.0]))).as_json()
    assert instant["goodput"] is None and "goodput" in [
        missing["field"] for missing in instant["missing"]
    ]
    # The time of the whole run alone, as the HF Trainer prints it at the end.
    whole = measure(
        run_log(facts={"train_runtime_seconds": 40.0}, format="hf_trainer_state", loss=[1.0] * 4)
    ).as_json()
    assert whole["step_seconds"]["mean"] == 10.0
    fields = [missing["field"] for missing in whole["missing"]]
    nulls = [name for name in ("p50", "p95", "p99") if whole["step_seconds"][name] is None]
    assert nulls and {f"step_seconds.{name}" for name in nulls} <= {*fields}
