"""JSON of others that is nested 100,000 deep: Python's parser raises RecursionError, which no
reader may pass on."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest

from drillyard.config.model_files import local_model_config
from drillyard.data import DATA_RECORD
from drillyard.data.data_changes import read_record as read_data_record
from drillyard.data.file_readers import json_lines_batch
from drillyard.data.token_cache import DamagedCache, open_cache
from drillyard.errors import UserError
from drillyard.launch.agent.state_file import last_state, read_json_object, summary_completed
from drillyard.loglines.sources import LogFile
from drillyard.measurement import gpu_recipes
from drillyard.measurement.formats.hf_trainer_state import HfTrainerState
from drillyard.measurement.source_reader import TextSourceReader
from drillyard.modelspec.config_json import read_config
from drillyard.telemetry.jsonlines import decode

DEEP = "[" * 100_000


def data_row(directory: Path) -> None:
    """The error is that of its row, which costs the row alone."""
    ((_, found),) = json_lines_batch("rows.jsonl", 1, 0, DEEP.encode()).rows()
    assert isinstance(found, UserError) and "rows.jsonl" in str(found)


def model_config(directory: Path) -> None:
    (directory / "config.json").write_text(DEEP)
    with pytest.raises(UserError, match=r"config\.json"):
        read_config(directory)
    assert local_model_config(str(directory)) == {}


def data_cache(directory: Path) -> None:
    (directory / "manifest.json").write_text(DEEP)
    with pytest.raises(DamagedCache):
        open_cache(directory, "all")


def launch_directory(directory: Path) -> None:
    for name in ("state.json", "summary.json", "record.json"):
        (directory / name).write_text(DEEP)
    assert last_state(directory) == {}
    assert read_json_object(directory / "record.json") == {}
    assert not summary_completed(directory)


def record_of_the_data(directory: Path) -> None:
    (directory / DATA_RECORD).write_text(DEEP)
    assert read_data_record(directory) is None


def record_of_an_export(directory: Path) -> None:
    from drillyard import export_directory

    (directory / export_directory.RECORD).write_text(DEEP)
    assert export_directory.read_record(directory).files == {}


def summary_of_a_run(directory: Path) -> None:
    from drillyard.reporting.summary import required_failure

    (directory / "summary.json").write_text(DEEP)
    assert required_failure(directory) is None


def lines_of_a_run(directory: Path) -> None:
    assert decode(DEEP) is None


def lines_of_logs(directory: Path) -> None:
    reading = TextSourceReader(LogFile("deep.log"), 0, None)
    for line in (
        '{"step": 1, "step_seconds": ' + DEEP + "}",
        '{"event": "evaluation", "results": ' + DEEP + "}",
        'DLLL {"type": "LOG", "step": 1, "data": ' + DEEP + "}",
        'DLLL {"step": "PARAMETER", "data": ' + DEEP + "}",
    ):
        reading.feed(line.encode() + b"\n")
    assert all(not found.records for found in reading.content().found)


def trainer_state(directory: Path) -> None:
    whole = DEEP + DEEP.replace("[", "]")
    for text in (
        '{"log_history": [{"step": 1, "a": ' + DEEP,
        '{"log_history": [{"step": 1, "a": {"b": 1}, "c": ' + whole + "}]}",
        '{"log_history": [], "a": ' + whole + "}",
    ):
        HfTrainerState().read("trainer_state.json", 0, io.BytesIO(text.encode()))


def gpu_recipes_log(directory: Path) -> None:
    assert gpu_recipes.timings(["DLLL " + DEEP], 0, 9) == ([], 1)


@pytest.mark.parametrize(
    "read",
    [
        data_row,
        model_config,
        data_cache,
        launch_directory,
        record_of_the_data,
        record_of_an_export,
        summary_of_a_run,
        lines_of_a_run,
        lines_of_logs,
        trainer_state,
        gpu_recipes_log,
    ],
)
def test_deeply_nested_json_is_refused_like_any_other_damage(
    read: Callable[[Path], None], tmp_path: Path
) -> None:
    read(tmp_path)
