"""Trackers get the same numbers under the same names, resume their own runs, and never end the
training."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest

from drillyard.errors import UserError
from drillyard.telemetry import RunLog, read_events


def tensorboard_points(directory) -> list[tuple[int, str, float]]:
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    points = []
    for path in sorted(directory.iterdir()):
        for event in EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                number = (
                    value.simple_value
                    if value.HasField("simple_value")
                    else value.tensor.float_val[0]
                )
                points.append((event.step, value.tag, number))
    return points


def log_three_steps(tmp_path, config, record, **arguments):
    with RunLog(tmp_path, rank=0, config=config, console="none", **arguments) as log:
        log.parameters(1000, 1000, "6N", 6000.0, None)
        for step in (1, 2, 3):
            log.step(replace(record, step=step, loss=step / 4))
        log.evaluation(3, {"sql": {"loss": 0.5}})


def test_tensorboard_holds_every_step_and_torch_is_not_imported(tmp_path, make_config, record):
    log_three_steps(tmp_path, make_config(tensorboard=True), record)
    points = tensorboard_points(tmp_path / "tensorboard")
    assert [(step, value) for step, tag, value in points if tag == "train/loss"] == [
        (1, 0.25),
        (2, 0.5),
        (3, 0.75),
    ]
    assert (3, "eval/sql/loss", 0.5) in points
    assert {tag for _, tag, _ in points} >= {
        "train/tflops_per_gpu",
        "train/learning_rate",
        "train/memory_gib",
    }
    assert not any(tag == "train/mfu" for _, tag, _ in points)  # no peak, no MFU


def test_after_a_resume_tensorboard_shows_steps_done_again_once(
    tmp_path, make_config, record, monkeypatch
):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.summary.writer import event_file_writer

    # A process numbers its event files, which are read in the order of their names: a tenth would
    # come before a ninth.
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))
    config = make_config(tensorboard=True)
    log_three_steps(tmp_path, config, record)
    with RunLog(tmp_path, rank=0, config=config, console="none", attempt=1) as log:
        log.parameters(1000, 1000, "6N", 6000.0, None)
        log.event("resume", 1)
        log.step(replace(record, step=2, loss=8.0))
    accumulator = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    points = [(point.step, point.value) for point in accumulator.Scalars("train/loss")]
    assert points == [(1, 0.25), (2, 8.0)]


class FakeWandbRun:
    def __init__(self, arguments: dict) -> None:
        self.arguments, self.id, self.logged, self.finished = (
            arguments,
            arguments["id"] or "abc123",
            [],
            False,
        )
        self.axis = ""

    def define_metric(self, name: str, step_metric: str) -> None:
        assert name == "*"
        self.axis = step_metric

    def log(self, values: dict) -> None:
        self.logged.append(values)

    def finish(self) -> None:
        self.finished = True


@pytest.fixture
def fake_wandb(monkeypatch) -> list[FakeWandbRun]:
    runs: list[FakeWandbRun] = []
    module = ModuleType("wandb")

    def init(**arguments) -> FakeWandbRun:
        runs.append(FakeWandbRun(arguments))
        return runs[-1]

    module.init = init
    monkeypatch.setitem(sys.modules, "wandb", module)
    return runs


def test_a_second_attempt_continues_the_same_wandb_run(tmp_path, make_config, record, fake_wandb):
    config = make_config(wandb={"project": "p", "name": "mine"})
    log_three_steps(tmp_path, config, record)
    log_three_steps(tmp_path, config, record, attempt=1)
    first, second = fake_wandb
    assert (first.arguments["id"], second.arguments["id"]) == (None, "abc123")
    assert (first.arguments["project"], first.arguments["name"]) == ("p", "mine")
    assert first.arguments["config"]["data"]["sequence_length"] == 4096
    assert [values["train/loss"] for values in first.logged if "train/loss" in values] == [
        0.25,
        0.5,
        0.75,
    ]
    assert [values["step"] for values in first.logged if "train/loss" in values] == [1, 2, 3]
    assert first.axis == second.axis == "step"
    assert first.finished and second.finished


def warnings_of(run_directory) -> list[str]:
    return [event["text"] for event in read_events(run_directory) if event["event"] == "warning"]


def test_a_tracker_that_fails_is_left_out_with_one_warning(
    tmp_path, make_config, record, fake_wandb, monkeypatch
):
    def fail(self, values: dict) -> None:
        raise ConnectionError("service gone")

    monkeypatch.setattr(FakeWandbRun, "log", fail)
    log_three_steps(tmp_path, make_config(wandb={}), record)
    (warning,) = warnings_of(tmp_path)
    assert "WeightsAndBiases" in warning and "service gone" in warning


def test_mlflow_gets_numbers_by_step_and_continues_its_run(
    tmp_path, make_config, record, monkeypatch
):
    calls = []
    module = ModuleType("mlflow")
    for name in ("set_tracking_uri", "set_experiment", "log_dict", "log_metrics", "end_run"):
        setattr(
            module, name, lambda *args, _name=name, **kwargs: calls.append((_name, args, kwargs))
        )

    def start_run(**arguments) -> SimpleNamespace:
        calls.append(("start_run", (), arguments))
        return SimpleNamespace(info=SimpleNamespace(run_id="r1"))

    module.start_run = start_run
    monkeypatch.setitem(sys.modules, "mlflow", module)
    config = make_config(mlflow={"tracking_uri": "file:///x", "experiment": "e"})
    for attempt in (0, 1):
        log_three_steps(tmp_path, config, record, attempt=attempt)
    assert calls[0] == ("set_tracking_uri", ("file:///x",), {})
    assert [call[2]["run_id"] for call in calls if call[0] == "start_run"] == [None, "r1"]
    steps = [
        (kwargs["step"], args[0].get("train/loss"))
        for name, args, kwargs in calls
        if name == "log_metrics"
    ]
    assert steps[:4] == [(1, 0.25), (2, 0.5), (3, 0.75), (3, None)]
    assert sum(name == "log_dict" for name, _, _ in calls) == 1
    assert sum(name == "end_run" for name, _, _ in calls) == 2


@pytest.mark.parametrize(
    ("logging", "missing", "message"),
    [
        ({"wandb": {}}, "wandb", r"drillyard\[wandb\]"),
        ({"mlflow": {}}, "mlflow", r"drillyard\[mlflow\]"),
        ({"tensorboard": True}, "tensorboard.compat.proto", r"pip install tensorboard"),
    ],
)
def test_a_missing_package_names_what_to_install(
    tmp_path, make_config, monkeypatch, logging, missing, message
):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(UserError, match=message):
        RunLog(tmp_path, rank=0, config=make_config(**logging), console="none")


def test_a_tracker_that_cannot_start_leaves_none_running_that_had_started(
    tmp_path, make_config, fake_wandb, monkeypatch
):
    module = ModuleType("mlflow")
    module.set_experiment = fake_wandb.remove  # raises: there is no such run
    monkeypatch.setitem(sys.modules, "mlflow", module)
    for settings in ({}, {"unknown": 1}):
        with pytest.raises(UserError):
            RunLog(tmp_path, rank=0, config=make_config(wandb={}, mlflow=settings), console="none")
        assert fake_wandb[-1].finished


def test_an_unknown_key_for_mlflow_is_refused(tmp_path, make_config, monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", ModuleType("mlflow"))
    with pytest.raises(UserError, match=r"unknown keys \['uri'\]"):
        RunLog(tmp_path, rank=0, config=make_config(mlflow={"uri": "x"}), console="none")


def test_a_tracker_that_cannot_start_stops_a_first_start_but_no_restart(
    tmp_path, make_config, record, monkeypatch
):
    def refuse(**_: object) -> None:
        raise ConnectionError("no login")

    module = ModuleType("wandb")
    module.init = refuse
    monkeypatch.setitem(sys.modules, "wandb", module)
    config = make_config(wandb={})
    with pytest.raises(UserError, match=r"WeightsAndBiases .*no login"):
        log_three_steps(tmp_path, config, record)
    log_three_steps(tmp_path, config, record, attempt=1)
    (warning,) = warnings_of(tmp_path)
    assert "WeightsAndBiases" in warning and "no login" in warning


def test_a_package_that_is_gone_after_a_restart_costs_only_its_tracker(
    tmp_path, make_config, record, monkeypatch
):
    monkeypatch.setitem(sys.modules, "wandb", None)
    log_three_steps(tmp_path, make_config(wandb={}), record, attempt=1)
    (warning,) = warnings_of(tmp_path)
    assert "drillyard[wandb]" in warning
