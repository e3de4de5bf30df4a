"""Weights & Biases and MLflow through their real clients, offline: what they keep of two attempts
of a run.

W&B writes an offline run as a log in LevelDB's format (blocks of 32 KiB; chunks with a checksum, a
length and a type), whose records are W&B's own protocol buffers; `wandb sync` uploads them. MLflow
writes files.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from drillyard.config.run import RunConfig
from drillyard.telemetry import RunLog, StepRecord

RECORD = StepRecord(
    step=1,
    loss=1.0,
    learning_rate=1e-5,
    grad_norm=1.25,
    step_seconds=0.5,
    tokens=512,
    valid_tokens=500,
    num_gpus=2,
)
BLOCK, FILE_HEADER, CHUNK_HEADER = 32768, 7, 7
WHOLE, LAST = 1, 4


def config_with(**logging: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": "trial",
            "model": {"id": "some/model"},
            "data": {"source": "rows.jsonl", "sequence_length": 4096},
            "training": {"steps": 100, "optimizer": {"learning_rate": 1e-4}},
            "logging": {"tensorboard": False, **logging},
        }
    )


@pytest.fixture(autouse=True)
def clients_of_no_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No settings and no home directory of the user who runs the tests, and time to start on a busy
    machine."""
    for name in [name for name in os.environ if name.startswith(("WANDB_", "MLFLOW_"))]:
        monkeypatch.delenv(name)
    for name in ("WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB__SERVICE_WAIT", "300")


def two_attempts(directory: Path, config: RunConfig) -> None:
    """Steps 1 to 3 with loss step/4; then, resumed from step 1, steps 2 and 3 with the loss one
    higher."""
    for attempt, steps in ((0, (1, 2, 3)), (1, (2, 3))):
        with RunLog(directory, rank=0, config=config, console="none", attempt=attempt) as log:
            log.parameters(1000, 1000, "6N", 6000.0, None)
            if attempt:
                log.event("resume", 1)
            for step in steps:
                log.step(replace(RECORD, step=step, loss=step / 4 + attempt))
            log.evaluation(3, {"sql": {"loss": 0.5}})
        ended = int(time.time())
        while (
            int(time.time()) == ended
        ):  # wandb names its files by the second, and a restart takes longer than one
            time.sleep(0.01)


def wandb_records(path: Path) -> Iterator[Any]:
    from wandb.proto import wandb_internal_pb2

    content = path.read_bytes()
    at, record = FILE_HEADER, b""
    while at < len(content):
        room = BLOCK - at % BLOCK
        if room < CHUNK_HEADER:
            at += room
            continue
        length, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        record += content[at + CHUNK_HEADER : at + CHUNK_HEADER + length]
        at += CHUNK_HEADER + length
        if kind in (WHOLE, LAST):
            yield wandb_internal_pb2.Record.FromString(record)
            record = b""


def test_wandb_keeps_both_attempts_in_one_run_with_a_step_axis_of_ours(tmp_path: Path) -> None:
    two_attempts(tmp_path, config_with(wandb={"mode": "offline", "project": "p"}))
    records = [
        record
        for path in sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"))
        for record in wandb_records(path)
    ]
    runs = [record.run for record in records if record.WhichOneof("record_type") == "run"]
    kept = json.loads((tmp_path / "trackers.json").read_text())["wandb"]
    assert {(run.run_id, run.project, run.display_name) for run in runs} == {(kept, "p", "trial")}
    settings = {item.key: json.loads(item.value_json) for item in runs[0].config.update}
    assert settings["data"]["sequence_length"] == 4096
    rows = [
        {
            item.key or "/".join(item.nested_key): json.loads(item.value_json)
            for item in record.history.item
        }
        for record in records
        if record.WhichOneof("record_type") == "history"
    ]
    losses = [(row["step"], row["train/loss"]) for row in rows if "train/loss" in row]
    assert losses == [(1, 0.25), (2, 0.5), (3, 0.75), (2, 1.5), (3, 1.75)]
    assert [(row["step"], row["eval/sql/loss"]) for row in rows if "eval/sql/loss" in row] == [
        (3, 0.5)
    ] * 2
    axes = [record.metric for record in records if record.WhichOneof("record_type") == "metric"]
    assert "step" in {metric.step_metric for metric in axes}
    assert [
        record.exit.exit_code for record in records if record.WhichOneof("record_type") == "exit"
    ] == [0, 0]


def test_mlflow_keeps_both_attempts_in_one_finished_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Newer clients want a database or a server and keep files only when asked to.
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = (tmp_path / "store").as_uri()
    two_attempts(tmp_path, config_with(mlflow={"tracking_uri": uri, "experiment": "e"}))

    from mlflow.entities import RunStatus
    from mlflow.tracking import MlflowClient

    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("e")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_id == json.loads((tmp_path / "trackers.json").read_text())["mlflow"]
    assert (run.info.run_name, run.info.status) == (
        "trial",
        RunStatus.to_string(RunStatus.FINISHED),
    )
    history = [
        (point.step, point.value)
        for point in client.get_metric_history(run.info.run_id, "train/loss")
    ]
    # Points go out side by side: their order is not kept, their steps are.
    assert sorted(history) == [(1, 0.25), (2, 0.5), (2, 1.5), (3, 0.75), (3, 1.75)]
    assert run.data.metrics["eval/sql/loss"] == 0.5
    (saved,) = (tmp_path / "store").rglob("artifacts/run.json")
    assert json.loads(saved.read_text())["data"]["sequence_length"] == 4096
