"""Later starts and clocks that are set back, as whole logs: the figures are those of the run, not
of its stamps."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from tests.unit.measurement.made import NEW_YEAR, SECOND, run_log, stamps

from drillyard import telemetry
from drillyard.config.run import RunConfig
from drillyard.errors import UserError
from drillyard.hardware import find_accelerator
from drillyard.measurement.parsed_log import LogEvent
from drillyard.measurement.read_logs import read_logs
from drillyard.measurement.run_result import measure
from drillyard.measurement.user_facts import UserFacts
from drillyard.reporting.summary import write_summary
from drillyard.telemetry import StepRecord, append_event


def test_the_step_time_of_a_run_directory_rests_on_the_steps_that_its_summary_takes(tmp_path):
    directory = tmp_path / "trial"
    directory.mkdir()
    config = RunConfig.model_validate(
        {
            "name": "trial",
            "model": {"id": "some/model"},
            "data": {"source": "rows.jsonl", "sequence_length": 4096},
            "training": {"steps": 30, "optimizer": {"learning_rate": 1e-4}},
            "logging": {"tensorboard": False},
        }
    )
    with telemetry.RunLog(directory, rank=0, config=config, console="none") as log:
        log.event("round_start")
        log.parameters(70_000, 70_000, "6N", 420_000.0, find_accelerator("b200"))
        # Falling for long: detection by figures alone would leave out more than the log does.
        for step in range(1, 31):
            seconds = 9.0 if step in (1, 20) else 1.0 + 1.0 / step
            compiling = 8.0 if step == 20 else None
            log.step(
                StepRecord(step, 1.0, 1e-4, None, seconds, 4096, 4096, 1, compile_seconds=compiling)
            )
    # Killed, and started by hand at the step after the last: nothing in metrics.jsonl tells that.
    append_event(directory, "run_start", round=0)
    with telemetry.RunLog(directory, rank=0, config=config, console="none") as log:
        log.event("round_start")
        log.parameters(70_000, 70_000, "6N", 420_000.0, find_accelerator("b200"))
        log.event("resume", 30)
        for step in range(31, 41):
            log.step(StepRecord(step, 1.0, 1e-4, None, 9.0 if step == 31 else 1.01, 4096, 4096, 1))
    append_event(directory, "end", status="completed")
    summary, got = write_summary(directory), measure(read_logs([directory])).as_json()
    assert got["step_seconds"]["left_out"] == summary["step_seconds"]["left_out"] == 3
    assert got["step_seconds"]["p50"] == summary["step_seconds"]["median"]


def test_waiting_is_not_billed():
    first, second = stamps([1.0] * 5), stamps([1.0] * 5, NEW_YEAR + 3605 * SECOND)
    columns = {"seconds": [1.0] * 10, "time_us": first + second, "attempt": [0] * 5 + [1] * 5}
    log = run_log(events=[LogEvent("waiting", first[-1], 0, 15)], **columns)
    got = measure(log, UserFacts(num_gpus=3600, price_per_gpu_hour=1.0)).as_json()
    assert got["seconds_by_category"]["waiting"] == pytest.approx(3600.0)
    assert got["cost_so_far"] == pytest.approx(got["wall_seconds"] - 3600.0)


def test_a_precision_that_no_accelerator_knows_is_an_error_and_not_ignored():
    log = run_log(seconds=[1.0] * 4)
    assert measure(log, UserFacts(precision="BFloat16")).speed.precision == "bf16"
    with pytest.raises(UserError, match=r"--precision fp3: not known; .*bf16, "):
        measure(log, UserFacts(precision="fp3"))


@pytest.mark.parametrize("back", [20, 3600])
def test_a_clock_that_is_set_back_adds_no_time_to_a_log(tmp_path, back):
    def line(step: int, seconds: int) -> str:
        stamp = datetime(2027, 1, 1, 12, tzinfo=UTC) + timedelta(seconds=seconds)
        return (
            f" [{stamp:%Y-%m-%d %H:%M:%S.%f}] iteration {step}/ 40 | consumed samples: {step * 8} |"
            " elapsed time per iteration (ms): 10000.0 | global batch size: 8 | lm loss:"
            " 2.0E+00 |\n"
        )

    log = tmp_path / "run.log"
    log.write_text("".join(line(step, 10 * step - back * (step >= 20)) for step in range(1, 41)))
    got = measure(read_logs([log])).as_json()
    # 18 steps before the clock was set back and 20 after it; the time of the step in between is
    # hidden.
    assert got["wall_seconds"] == 380.0
    assert got["clock_steps_back"] == 1
    assert got["seconds_by_category"]["startup"] == 0.0
    assert sum(got["microseconds_by_category"].values()) == 380 * SECOND
