"""Runs in several files: directories, compression, copies, other formats of the same run; and logs
that still grow."""

from __future__ import annotations

import gzip
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from rich.console import Console
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter
from tests.facts import each_says, says
from tests.unit.measurement.lines import NOON, SECOND, WHOLE, as_rows, at, perf, write

from drillyard.errors import UserError
from drillyard.measurement import read_logs as reading_of_files
from drillyard.measurement.parsed_log import NO_TIME, ParsedLog
from drillyard.measurement.read_logs import Tail, read_logs
from drillyard.measurement.result_text import render_result
from drillyard.measurement.run_result import measure


@pytest.mark.parametrize("compress", [gzip.compress, zstandard.compress])
def test_compressed_logs(compress: Any, tmp_path: Path) -> None:
    text = "".join(perf(step) + "\n" for step in range(1, 2001)).encode()
    log = read_logs(
        [write(tmp_path / "run.log.compressed", compress(text[:9000]) + compress(text[9000:]))]
    )
    assert log.steps.step.tolist() == list(range(1, 2001))


def test_a_compressed_log_that_is_cut_off_gives_what_came_before(tmp_path: Path) -> None:
    packed = gzip.compress(
        np.random.default_rng(0).bytes(1).hex().encode()
        + b"\n"
        + "".join(perf(step, step % 97) + "\n" for step in range(1, 20_001)).encode()
    )
    log = read_logs([write(tmp_path / "run.log.gz", packed[: len(packed) // 2])])
    assert 100 < len(log.steps) < 20_000
    name, lines = log.sources[0].name, log.sources[0].lines
    assert each_says(log.warnings, [f"{name}: ... gzip ... line {lines}"])
    with pytest.raises(UserError, match=r"begun\.gz: .*gzip.*nothing"):
        read_logs([write(tmp_path / "begun.gz", packed[:12])])


def test_the_same_run_in_two_formats_is_read_once_from_the_richer(tmp_path: Path) -> None:
    write(tmp_path / "dllogger.json", WHOLE["dllogger.json"])
    write(
        tmp_path / "log.out",
        "Training epoch 0, iteration 46/99 | global_step: 46 | reduced_train_loss: 7.9\n"
        "Training epoch 0, iteration 47/99 | global_step: 47 | reduced_train_loss: 7.8\n",
    )
    log = read_logs([tmp_path])
    assert log.format == "dllogger"
    assert log.steps.step.tolist() == [46, 47]
    assert [(Path(source.name).name, source.used) for source in log.sources] == [
        ("dllogger.json", True),
        ("log.out", False),
    ]
    assert "DLLogger" in log.sources[1].note


def test_a_copy_of_a_log_is_named_and_left_out(tmp_path: Path) -> None:
    text = "".join(f"{at(step)} {perf(step)}\n" for step in range(1, 9))
    write(tmp_path / "a.log", text)
    write(tmp_path / "b.log", text)
    log = read_logs([tmp_path])
    assert log.steps.step.tolist() == list(range(1, 9))
    assert log.sources[1].note == f"repeats {tmp_path}/a.log"


def test_checkpoints_of_the_hf_trainer_hold_the_same_history(tmp_path: Path) -> None:
    for upto in (10, 20):
        history = [{"step": step, "loss": 1 / step} for step in range(1, upto + 1)]
        state = {"global_step": upto, "log_history": history}
        write(tmp_path / f"checkpoint-{upto}/trainer_state.json", json.dumps(state))
        write(tmp_path / f"checkpoint-{upto}/model.safetensors", b"\0" * 100)
    log = read_logs([tmp_path])
    assert log.steps.step.tolist() == list(range(1, 21))
    assert [source.used for source in log.sources] == [False, True]


def test_a_drillyard_run_directory(tmp_path: Path) -> None:
    write(
        tmp_path / "metrics.jsonl",
        "".join(
            json.dumps(
                {
                    "time": at(step),
                    "round": 0,
                    "step": step,
                    "loss": 1.0,
                    "step_seconds": 0.5,
                    "tokens": 64,
                    "num_gpus": 2,
                }
            )
            + "\n"
            for step in (1, 2)
        ),
    )
    events = [
        {"time": at(0), "event": "run_start", "world_size": 2},
        {
            "time": at(0.5),
            "event": "parameters",
            "count": 1000,
            "formula": "6N",
            "flops_per_token": 6000.0,
            "precision": "bf16",
        },
        {"time": at(1), "event": "step", "round": 0, "step": 1, "step_seconds": 0.5},
        {"time": at(2), "event": "loss_spike", "round": 0, "step": 2, "loss": 9.0},
        {
            "time": at(2.5),
            "event": "evaluation",
            "round": 0,
            "step": 2,
            "results": {"held": {"loss": 0.5}},
        },
        {"time": at(3), "event": "end", "status": "completed"},
    ]
    write(tmp_path / "events.jsonl", "".join(json.dumps(event) + "\n" for event in events))
    write(tmp_path / "run.yaml", "model: {id: tiny/model}\ndata: {sequence_length: 128}\n")
    write(tmp_path / "logs/rank-0.log", perf(1) + "\n")
    log = read_logs([tmp_path])
    assert log.format == "drillyard"
    assert log.run_directory == tmp_path
    assert log.steps.step.tolist() == [1, 2]
    assert [event.kind for event in log.events] == ["run_start", "evaluation", "end"]
    assert (log.facts.parameters, log.facts.num_gpus, log.facts.sequence_length) == (1000, 2, 128)
    assert (log.facts.model, log.facts.precision) == ("tiny/model", "bf16")
    assert log.attempts[0].first_time_us == NOON
    assert log.attempts[0].last_time_us == NOON + 3 * SECOND
    assert [source.name for source in log.sources if not source.used] == [str(tmp_path / "logs")]


def test_events_alone_are_steps_too(tmp_path: Path) -> None:
    event = {
        "time": at(1),
        "event": "step",
        "round": 0,
        "step": 1,
        "step_seconds": 0.5,
        "window_steps": 1,
    }
    spike = {"time": at(2), "event": "loss_spike", "round": 0, "step": 2, "loss": 9.0}
    log = read_logs(
        [
            write(
                tmp_path / "events.jsonl", "".join(json.dumps(one) + "\n" for one in (event, spike))
            )
        ]
    )
    assert (log.steps.step.tolist(), log.steps.seconds.tolist()) == ([1], [0.5])


def test_following_a_log(tmp_path: Path) -> None:
    path = tmp_path / "run.log"
    tail = Tail([path])
    assert tail.poll() is None
    write(path, perf(1) + "\n" + perf(2)[:20])
    log = tail.poll()
    assert log is not None
    assert log.steps.step.tolist() == [1]
    with path.open("a") as file:
        file.write(perf(2)[20:] + "\n")
    log = tail.poll()
    assert log is not None
    assert log.steps.step.tolist() == [1, 2]
    assert tail.poll() is None
    write(path, perf(7) + "\n")
    log = tail.poll()
    assert log is not None
    assert log.steps.step.tolist() == [7]
    path.rename(tmp_path / "run.log.1")
    write(path, perf(8) + "\n")
    log = tail.poll()
    assert log is not None
    assert log.steps.step.tolist() == [8]
    tail.close()


def test_following_equals_reading_at_once(tmp_path: Path) -> None:
    path = tmp_path / "run.log"
    content = WHOLE["megatron.log"]
    tail = Tail([path])
    log = None
    for end in range(0, len(content) + 100, 100):
        write(path, content[:end])
        log = tail.poll() or log
    assert log is not None
    assert as_rows(log) == as_rows(read_logs([path]))
    assert log.facts.num_gpus == 8
    assert NO_TIME not in log.steps.time_us


def shown(log: ParsedLog) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(render_result(measure(log)))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_the_screen_names_what_was_not_used_and_counts_what_was_passed_over(tmp_path: Path) -> None:
    text = "".join(f"{at(step)} {perf(step)}\n" for step in range(1, 9))
    write(tmp_path / "a.log", "loading\n\n" + text + "Step: 9 | Ti")
    write(tmp_path / "b.log", text)
    write(tmp_path / "c.log", b"\0\1\2\3")
    seen = shown(read_logs([tmp_path]))
    assert says(seen, "Read        10 lines, 2 of")
    assert says(seen, f"{tmp_path}/a.log: ... last line")
    assert f"not {tmp_path}/b.log: repeats {tmp_path}/a.log" in seen
    assert says(seen, f"not {tmp_path}/c.log: binary")


def test_what_cannot_be_followed_is_refused_and_what_is_not_there_named(tmp_path: Path) -> None:
    packed = write(tmp_path / "run.log.gz", gzip.compress(b"Step: 1"))
    with pytest.raises(UserError, match="is compressed"):
        Tail([packed])
    assert Tail([tmp_path / "later.log"]).absent() == [str(tmp_path / "later.log")]


def test_documents_and_event_files_are_followed_too(tmp_path: Path) -> None:
    history = [{"step": step, "loss": 1.0 / step} for step in range(1, 9)]
    state = write(
        tmp_path / "trainer_state.json", json.dumps({"log_history": history[:3], "max_steps": 8})
    )
    tail = Tail([state])
    assert tail.poll().steps.step.tolist() == [1, 2, 3]
    assert tail.poll() is None
    write(state, json.dumps({"log_history": history, "max_steps": 8}))
    assert tail.poll().steps.step.tolist() == list(range(1, 9))

    writer = EventFileWriter(str(tmp_path / "events"))
    [events] = (tmp_path / "events").iterdir()
    later = Tail([events])
    for step in (1, 2):
        loss = Summary.Value(tag="train/loss", simple_value=0.5)
        writer.add_event(
            Event(wall_time=NOON / SECOND + step, step=step, summary=Summary(value=[loss]))
        )
        writer.flush()
        assert later.poll().steps.step.tolist() == list(range(1, step + 1))
    writer.close()


def test_logs_that_are_empty_at_first_are_followed_with_their_directory(tmp_path: Path) -> None:
    [first, second] = [write(tmp_path / f"rank{rank}.log", "") for rank in (0, 1)]
    tail = Tail([tmp_path])
    assert tail.poll() is None and not tail.ended
    write(second, f"{perf(1)}\n")
    assert tail.poll().steps.step.tolist() == [1]
    write(first, f"{perf(1)}\n{perf(2)}\n")
    assert tail.poll().steps.step.tolist() == [1, 2] and not tail.ended


@pytest.mark.parametrize("name", ["{}/stdout.log", "rank-{}.log"])
def test_a_date_in_a_name_is_no_rank(name: str, tmp_path: Path) -> None:
    for number, date in enumerate((20260801120000, 20260801130000)):
        lines = [f"{at(10 * number + step)} {perf(8 * number + step)}\n" for step in range(1, 9)]
        write(tmp_path / name.format(date), "".join(lines))
    log = read_logs([tmp_path])
    assert log.steps.step.tolist() == list(range(1, 17)) and log.ranks == ()


def test_files_that_come_into_a_directory_are_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading_of_files, "_SECONDS_BETWEEN_LOOKS", 0.0)
    log = write(tmp_path / "run.log", f"{at(1)} {perf(1)}\n{at(2)} {perf(2)}\n")
    tail = Tail([tmp_path])
    assert tail.poll().steps.step.tolist() == [1, 2]
    # Rotated: what the old file held is found under its new name. What is packed, or no log, is
    # passed over.
    log.rename(tmp_path / "run.log.1")
    write(log, f"{at(3)} {perf(3)}\n")
    with gzip.open(tmp_path / "run.log.2.gz", "wt") as packed:
        packed.write(f"{at(9)} {perf(9)}\n")
    write(tmp_path / "model.safetensors", b"weights")
    (tmp_path / "later").mkdir()
    write(tmp_path / "later" / "attempt-2.log", f"{at(4)} {perf(4)}\n")
    assert tail.poll().steps.step.tolist() == [1, 2, 3, 4]
    assert tail.poll() is None
    write(tmp_path / "later" / "attempt-2.log", f"{at(4)} {perf(4)}\n{at(5)} {perf(5)}\n")
    assert tail.poll().steps.step.tolist() == [1, 2, 3, 4, 5]


def test_a_directory_that_goes_away_keeps_what_was_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading_of_files, "_SECONDS_BETWEEN_LOOKS", 0.0)
    directory = tmp_path / "logs"
    directory.mkdir()
    log = write(directory / "run.log", f"{perf(1)}\n")
    tail = Tail([directory])
    assert tail.poll().steps.step.tolist() == [1]
    with log.open("a") as file:
        file.write(f"{perf(2)}\n")
    log.unlink()
    directory.rmdir()
    assert tail.poll().steps.step.tolist() == [1, 2] and tail.poll() is None


def test_what_holds_no_log_is_not_followed(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", b"weights")
    with pytest.raises(UserError, match="none of its 1 files"):
        Tail([tmp_path])
    with pytest.raises(UserError, match="nothing to follow"):
        Tail([])


def test_a_document_is_followed_that_is_there_in_part_at_first(tmp_path: Path) -> None:
    state = tmp_path / "trainer_state.json"
    whole = json.dumps(
        {
            "log_history": [{"step": step, "loss": 1.0 / step} for step in range(1, 9)],
            "max_steps": 8,
        }
    )
    tail = Tail([state])
    for content, steps in (
        ("", None),
        (whole[:3], 0),
        (whole[:8], 0),
        (whole, 8),
        # Written again, in two goes, as it is all the time.
        (whole[:3], 8),
        (whole[:-2] + " }", 8),
    ):
        write(state, content)
        log = tail.poll()
        assert (None if log is None else len(log.steps)) == steps
    # And now a text log of that name.
    write(state, perf(7) + "\n")
    assert tail.poll().steps.step.tolist() == [7]
    os.replace(write(tmp_path / "draft", whole), state)
    tail.poll()
    assert len(tail.poll().steps) == 8


def test_a_text_without_a_step_is_no_document_later_on(tmp_path: Path) -> None:
    """Its first bytes have been seen, all of them."""
    path = write(tmp_path / "run.log", "{\n" * 40_000)
    tail = Tail([path])
    tail.poll()
    assert tail._sources[0]._is_text


def test_standard_input_is_followed_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    with open(reading) as stdin, open(writing, "wb", buffering=0) as writer:
        monkeypatch.setattr(sys, "stdin", stdin)
        tail = Tail(["-"])
        assert tail.poll() is None
        writer.write(f"{perf(1)}\n{perf(2)}\n{perf(3)}".encode())
        assert tail.poll().steps.step.tolist() == [1, 2]
        assert tail.poll() is None and not tail.ended
        writer.write(f"\n{perf(4)}".encode())
        writer.close()
        log = tail.poll()
        assert log.steps.step.tolist() == [1, 2, 3] and log.sources[0].unfinished_lines == 1
        assert tail.ended and tail.poll() is None


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "empty"),
        (b"hello\n", "no step found"),
        (gzip.compress(b"hello", mtime=0), "is compressed"),
    ],
)
def test_standard_input_without_steps_is_an_error(
    content, words, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, writing = os.pipe()
    with open(reading) as stdin, open(writing, "wb", buffering=0) as writer:
        monkeypatch.setattr(sys, "stdin", stdin)
        writer.write(content)
        writer.close()
        with pytest.raises(UserError, match=words):
            Tail(["-"]).poll()


def test_a_second_run_from_the_beginning_is_doubted_and_a_restart_is_not(tmp_path: Path) -> None:
    first = "".join(f"{at(step)} {perf(step)}\n" for step in range(1, 9))
    write(tmp_path / "a.log", first)
    other = write(
        tmp_path / "b.log", "".join(f"{at(30 + step)} {perf(step, 2.0)}\n" for step in range(1, 9))
    )
    assert each_says(
        [text for text in read_logs([tmp_path]).warnings if "--compare" in text],
        [f"{other} ... step 1 again ... restart ... --compare"],
    )
    write(other, "".join(f"{at(30 + step)} {perf(step, 2.0)}\n" for step in range(5, 12)))
    log = read_logs([tmp_path])
    assert len(log.attempts) == 2
    assert not [text for text in log.warnings if "--compare" in text]


def test_hidden_files_of_a_directory_are_no_logs(tmp_path: Path) -> None:
    write(tmp_path / "run.log", perf(1) + "\n" + perf(2) + "\n")
    write(tmp_path / ".holder.json", '{"pid": 1}')
    assert [source.name for source in read_logs([tmp_path]).sources] == [str(tmp_path / "run.log")]
