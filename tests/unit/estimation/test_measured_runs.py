"""Measured runs: published figures converted exactly, and a run of one's own read from its
directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.facts import says

from drillyard.errors import UserError
from drillyard.estimation.measured_runs import (
    LEAST_LINES,
    WARM_UP_LINES,
    published_model,
    published_runs,
    read_measured_run,
)
from drillyard.estimation.step_time import step_time

MPT_PARAMETERS = {
    ("mpt-1b", 2048): 1_315_950_592,
    ("mpt-3b", 1024): 2_649_216_000,
    ("mpt-3b", 2048): 2_651_837_440,
    ("mpt-7b", 2048): 6_658_859_008,
    ("mpt-7b", 4096): 6_667_247_616,
    ("mpt-7b", 8192): 6_684_024_832,
    ("mpt-13b", 2048): 12_853_954_560,
    ("mpt-13b", 4096): 12_864_440_320,
    ("mpt-30b", 2048): 29_975_214_080,
    ("mpt-70b", 2048): 64_862_437_376,
}
"""NumParams in the tables of llm-foundry's benchmarks."""


@pytest.mark.parametrize(("model", "sequence"), list(MPT_PARAMETERS))
def test_the_shapes_of_mpt_models_give_the_published_counts(model, sequence):
    assert published_model(model, sequence).total_parameters == MPT_PARAMETERS[model, sequence]


@pytest.mark.parametrize(
    ("model", "billions"),
    [
        ("llama-3.1-8b", 8.030261248),
        ("llama-3.1-70b", 70.553706496),
        ("llama-2-7b", 6.738415616),
        ("llama-2-13b", 13.015864320),
        ("llama-2-70b", 68.976648192),
        ("llama-3-14.8b", 14.84),
        ("qwen2.5-7b", 7.615616512),
    ],
)
def test_the_shapes_of_other_models_give_their_published_counts(model, billions):
    assert published_model(model, 4096).total_parameters == pytest.approx(billions * 1e9, rel=5e-4)


def test_figures_are_converted_by_exact_arithmetic():
    runs = published_runs()
    assert runs["gke-b200-70b-16"].tokens_per_second_per_gpu.value == 8 * 4096 / 14.54
    assert runs["gke-b200-70b-16"].seconds == pytest.approx(14.54)
    assert runs["kempner-h200-8b-4"].tokens_per_second_per_gpu.value == 38983 / 4
    assert runs["foundry-h100-70b-2048"].seconds == pytest.approx(8 * 4 * 2048 / 1039)
    spec = published_model("llama-2-7b", 4096)
    palm = 6 * spec.total_parameters + 12 * 32 * 4096 * 4096
    assert runs["fms-h100-7b"].tokens_per_second_per_gpu.value == pytest.approx(
        0.45 * 989e12 / palm
    )


def test_every_run_names_its_source_and_fits_its_gpus():
    for name, row in published_runs().items():
        assert row.name == name
        assert row.tokens_per_second_per_gpu.source and row.tokens_per_second_per_gpu.date
        assert row.setup.shard * row.setup.replicate == row.setup.world_size >= 1
        assert row.machine is None or row.machine.accelerator == row.accelerator.name


def test_doubts_about_a_figure_stay_with_it():
    assert published_runs()["accelerate-h100-8b-8"].tokens_per_second_per_gpu.unverified
    assert not published_runs()["titan-h100-8b-8"].tokens_per_second_per_gpu.unverified


def test_a_stated_network_is_that_of_the_node():
    machine = published_runs()["fms-h100-70b-eager"].machine
    assert machine is not None and machine.nic_gb_per_s_per_accelerator().value == 800 / 8 / 8
    assert published_runs()["foundry-h100-70b-2048"].machine is None


# A run of one's own


LLAMA = {
    "architecture": "llama",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
}
RUN = {
    "name": "mine",
    "model": {"init": "random", "config": LLAMA},
    "data": {"source": "builtin:python-stdlib", "sequence_length": 2048, "tokenizer": "tokenizer"},
    "training": {
        "steps": 100,
        "micro_batch_size": 4,
        "gradient_accumulation": 2,
        "activation_checkpointing": "full",
        "optimizer": {"name": "adamw", "learning_rate": 1.0e-4},
    },
}


def run_directory(
    path: Path,
    seconds: list[float],
    *,
    accelerator: str | None = "h100",
    num_gpus: int = 8,
    compile_seconds: dict[int, float] | None = None,
) -> Path:
    """A run directory with one logged step per entry of `seconds`."""
    path.mkdir()
    (path / "run.yaml").write_text(yaml.safe_dump(RUN), encoding="utf-8")
    event: dict[str, Any] = {
        "time": "2026-01-01T00:00:00.000000Z",
        "event": "parameters",
        "count": 1,
    }
    (path / "events.jsonl").write_text(
        json.dumps({**event, "accelerator": accelerator}) + "\n", encoding="utf-8"
    )
    compiled = compile_seconds or {}
    lines = [
        {
            "step": number,
            "step_seconds": value,
            "num_gpus": num_gpus,
            "compile_seconds": compiled.get(number),
        }
        for number, value in enumerate(seconds, start=1)
    ]
    (path / "metrics.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8"
    )
    return path


def test_a_run_is_the_median_of_its_logged_steps_after_warm_up(tmp_path):
    row = read_measured_run(
        run_directory(tmp_path / "mine", [30.0] * WARM_UP_LINES + [2.0, 2.1, 9.0] * 5)
    )
    assert row.seconds == pytest.approx(2.1)
    assert (row.name, row.publisher, row.accelerator.name) == ("mine", "your own run", "h100")
    assert row.setup.tokens_per_step_per_gpu == 4 * 2 * 2048
    assert (row.setup.shard, row.setup.activation_checkpointing, row.setup.kernel) == (
        8,
        "full",
        "varlen",
    )
    assert says(row.tokens_per_second_per_gpu.source, "15 logged steps")


def test_steps_that_compiled_do_not_count(tmp_path):
    seconds = [1.0] * (WARM_UP_LINES + 2 * LEAST_LINES)
    compiled = {
        number: 20.0 for number in range(WARM_UP_LINES + 1, WARM_UP_LINES + LEAST_LINES + 1)
    }
    for number in compiled:
        seconds[number - 1] = 21.0
    assert read_measured_run(
        run_directory(tmp_path / "mine", seconds, compile_seconds=compiled)
    ).seconds == pytest.approx(1.0)


def test_a_step_that_was_done_again_counts_once(tmp_path):
    directory = run_directory(tmp_path / "mine", [1.0] * 20)
    again = {"step": 20, "step_seconds": 50.0, "num_gpus": 8}
    with (directory / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write((json.dumps(again) + "\n") * 9)
    assert read_measured_run(directory).seconds == pytest.approx(1.0)


def test_only_the_steps_on_the_last_number_of_gpus_count(tmp_path):
    directory = run_directory(tmp_path / "mine", [1.0] * 30)
    lines = [
        {"step": step, "step_seconds": 2.0, "num_gpus": 4} for step in range(31, 31 + LEAST_LINES)
    ]
    with (directory / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    row = read_measured_run(directory)
    assert (row.setup.shard, row.seconds) == (4, pytest.approx(2.0))


def test_calibration_estimates_the_run_it_was_calibrated_by(tmp_path):
    row = read_measured_run(run_directory(tmp_path / "mine", [0.31] * 40))
    message = step_time(row.setup, row.machine, row.accelerator, calibration=row)
    assert message.basis == "calibration" and message.seconds is not None
    assert message.seconds.low.value < 0.31 < message.seconds.high.value


def test_the_machine_is_that_of_the_cluster_config(tmp_path):
    directory = run_directory(tmp_path / "mine", [1.0] * 40, accelerator="b200", num_gpus=16)
    assert read_measured_run(directory).machine is None
    where = {"project": "p", "zone": "us-central1-b"}
    cluster = {
        "name": "c",
        "platform": "slurm",
        "location": where,
        "machine": "a4-highgpu-8g",
        "nodes": 2,
    }
    cluster["consumption"] = "spot"
    (directory / "cluster.yaml").write_text(yaml.safe_dump(cluster), encoding="utf-8")
    machine = read_measured_run(directory).machine
    assert machine is not None and machine.name == "a4-highgpu-8g"


def test_what_auto_became_in_the_run_is_what_was_measured(tmp_path):
    directory = run_directory(tmp_path / "mine", [1.0] * 40)
    assert read_measured_run(directory).setup.kernel == "varlen"
    settings = {
        "model.attention": "sdpa",
        "training.compile": False,
        "training.activation_checkpointing": "none",
    }
    events = {"time": "2026-01-01T00:00:01.000000Z", "event": "resolved", "settings": settings}
    with (directory / "events.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(events) + "\n")
    setup = read_measured_run(directory).setup
    assert (setup.kernel, setup.compiled, setup.activation_checkpointing) == ("sdpa", False, "none")


def test_too_few_steps_are_refused(tmp_path):
    directory = run_directory(tmp_path / "mine", [1.0] * (WARM_UP_LINES + LEAST_LINES - 1))
    with pytest.raises(UserError, match=r"9 logged steps.* 5 .*10"):
        read_measured_run(directory)


def test_a_directory_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"no run\.yaml"):
        read_measured_run(tmp_path)


@pytest.mark.parametrize("accelerator", [None, "some-gpu", "cpu"])
def test_a_run_on_nothing_that_is_known_is_refused(tmp_path, accelerator):
    with pytest.raises(UserError, match="accelerator"):
        read_measured_run(run_directory(tmp_path / "mine", [1.0] * 40, accelerator=accelerator))


def test_torn_and_odd_lines_are_passed_over(tmp_path):
    directory = run_directory(tmp_path / "mine", [1.0] * 40)
    with (directory / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write(
            '{"step": 41, "step_seconds": null, "num_gpus": 8}\n{"step": 42, "step_seconds":'
            " true}\n"
        )
        file.write('{"step": 43, "step_seconds": 2.0}\n{"step": 44, "st')
    assert read_measured_run(directory).seconds == pytest.approx(1.0)
