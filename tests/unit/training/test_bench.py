"""What `drillyard bench` computes around the steps: parts of a clock, idle time, and the bound of
each part."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from tests.unit.estimation.requests import SMALL, run_config

from drillyard.cli import bench as cli
from drillyard.config.run import TrainingConfig
from drillyard.config.run_checks import check_run, schedule_problems
from drillyard.errors import UserError
from drillyard.estimation.setup import Setup
from drillyard.estimation.step_roofline import PARTS, part_work
from drillyard.estimation.step_work import count_work, optimizer_bytes
from drillyard.modelspec import model_spec
from drillyard.training import bench, part_clock
from drillyard.training.part_clock import PartClock


def setup_of() -> Setup:
    return Setup(
        spec=model_spec({"model_type": "llama", **SMALL}),
        precision="bf16",
        sequence_length=1024,
        micro_batch_size=2,
        gradient_accumulation=1,
        activation_checkpointing="full",
        shard=1,
        replicate=1,
        gpus_per_node=1,
        kernel="varlen",
        compiled=True,
        loss_chunk_tokens=512,
    )


def test_the_parts_of_a_clock_add_up_to_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 1.0, 3.0, 7.0, 15.0, 31.0])
    monkeypatch.setattr(part_clock.time, "perf_counter", lambda: next(times))
    clock = PartClock(torch.device("cpu"))
    clock.switch("data")
    clock.switch("forward")
    with clock.interrupted_by("gather and reduce"):
        pass
    clock.switch("loss")
    taken = clock.take()
    assert taken == dict.fromkeys(PARTS, 0.0) | {
        "data": 1.0,
        "forward": 2.0 + 8.0,
        "gather and reduce": 4.0,
        "loss": 16.0,
    }


def test_a_device_idles_where_no_kernel_of_any_stream_runs() -> None:
    assert bench.idle_microseconds([(5.0, 7.0), (0.0, 2.0), (1.0, 4.0), (9.0, 10.0)]) == 1 + 2
    assert bench.idle_microseconds([]) == 0


@pytest.mark.parametrize("accumulation", [1, 3])
def test_the_parts_have_all_work_of_a_step(accumulation: int) -> None:
    setup = replace(setup_of(), gradient_accumulation=accumulation)
    work, parts = count_work(setup), part_work(setup)
    assert sum(part.flops for part in parts.values()) == pytest.approx(work.flops)
    products = sum(parts[name].moved_bytes for name in ("forward", "loss", "backward"))
    assert products == pytest.approx(work.elementwise_bytes)
    assert parts["optimizer"].moved_bytes == optimizer_bytes(setup, work.trainable // setup.shard)
    assert parts["forward"].seconds(1e12, 1e9) == pytest.approx(
        parts["forward"].flops / 1e12 + parts["forward"].moved_bytes / 1e9
    )


@pytest.mark.parametrize("samples", [40, 4000])
def test_megatrons_order_reaches_as_far_as_the_measured_steps(samples: int) -> None:
    given = run_config(
        data={"megatron": {"samples": samples}},
        training={"steps": 10, "micro_batch_size": 2, "global_batch_size": 4},
    )
    config = bench.with_length(given, 28, 1)
    assert not list(check_run(config, num_ranks=1))
    megatron = config.data.megatron
    assert megatron is not None and megatron.samples == max(samples, 28 * 4)


class FullDisk:
    """A profiler that cannot write more than a part, as torch's on a full disk."""

    def export_chrome_trace(self, path: str) -> None:
        Path(f"{path}.tmp").write_text("{")


def test_a_trace_that_cannot_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    assert not bench.write_trace(cast("Any", FullDisk()), tmp_path / "step.json")
    assert not [*tmp_path.iterdir()]


class Profiler:
    def export_chrome_trace(self, path: str) -> None:
        Path(path).write_text("{}")


def test_a_trace_replaces_no_file_that_was_made_meanwhile(tmp_path: Path) -> None:
    trace, other = tmp_path / "step.json", tmp_path / "step.json.tmp"
    other.write_text("mine")
    assert bench.write_trace(cast("Any", Profiler()), trace)
    assert trace.read_text() == "{}"
    trace.write_text("mine")
    assert not bench.write_trace(cast("Any", Profiler()), trace)
    assert trace.read_text() == other.read_text() == "mine"
    assert {*tmp_path.iterdir()} == {trace, other}


def test_a_trace_is_refused_before_measuring_where_no_file_can_be_made(tmp_path: Path) -> None:
    for refused in (Path("/proc/step.json"), tmp_path / "none" / "step.json", tmp_path):
        with pytest.raises(UserError, match="--trace: "):
            cli.require_new_file(refused)
    cli.require_new_file(tmp_path / "step.json")
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("steps", [None, 3, 800])
@pytest.mark.parametrize(
    "schedule",
    [
        {"name": "cosine", "warmup_steps": 50},
        {"name": "constant", "warmup_steps": 2000},
        {"name": "warmup-stable-decay", "warmup_steps": 2000},
        {"name": "warmup-stable-decay", "warmup_steps": 7, "decay_steps": 900},
    ],
)
def test_a_few_steps_of_any_schedule_are_measured(
    schedule: dict[str, Any], steps: int | None
) -> None:
    length = {"steps": steps} if steps else {"epochs": 1.0}
    optimizer = {"learning_rate": 1e-3}
    training = TrainingConfig.model_validate(
        {**length, "optimizer": optimizer, "schedule": schedule}
    )
    total = bench._schedule_steps(training, 14)
    assert total >= max(14, steps or 0)
    assert not list(schedule_problems(training.schedule, total))
