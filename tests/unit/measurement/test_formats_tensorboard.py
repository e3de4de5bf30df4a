"""TensorBoard event files are read as TensorBoard's own writer wrote them; damage ends the file and
is reported."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from drillyard.errors import UserError
from drillyard.measurement.formats.tensorboard import masked_crc, scalars
from drillyard.measurement.read_logs import read_logs

NOON = 1_785_585_600.0


def simple(tag: str, value: float) -> Summary.Value:
    return Summary.Value(tag=tag, simple_value=value)


def tensor(tag: str, value: float) -> Summary.Value:
    return Summary.Value(tag=tag, tensor=TensorProto(dtype=1, float_val=[value]))


def write(directory: Path, events: list[tuple[float, int, list[Summary.Value]]]) -> Path:
    writer = EventFileWriter(str(directory))
    for wall_time, step, values in events:
        writer.add_event(Event(wall_time=wall_time, step=step, summary=Summary(value=values)))
    writer.close()
    return next(path for path in directory.iterdir() if "tfevents" in path.name)


@pytest.mark.parametrize("value", [simple, tensor])
def test_scalars_of_one_step_are_one_record(value, tmp_path: Path) -> None:
    events = []
    for step in (1, 2, 3):
        events.append(
            (NOON + step, step, [value("iteration-time", 0.5 * step), value("lm loss", 2.0 / step)])
        )
        events.append(
            (NOON + step + 0.1, step, [value("learning-rate", 1e-5), value("something else", 7.0)])
        )
    write(tmp_path, events)
    log = read_logs([tmp_path])
    assert log.format == "tensorboard"
    assert log.steps.step.tolist() == [1, 2, 3]
    assert log.steps.seconds.tolist() == [0.5, 1.0, 1.5]
    np.testing.assert_allclose(log.steps.loss, [2.0, 1.0, 2 / 3], rtol=1e-6)
    np.testing.assert_allclose(log.steps.learning_rate, [1e-5] * 3, rtol=1e-6)
    assert log.steps.time_us.tolist() == [round((NOON + step) * 1e6) for step in (1, 2, 3)]
    assert log.clock.zone == "stated"


def test_a_restart_that_does_steps_again(tmp_path: Path) -> None:
    for number, steps in enumerate([(1, 2, 3), (3, 4)]):
        events = [
            (NOON + 100 * number + step, step, [simple("train/loss", step)]) for step in steps
        ]
        write(tmp_path / f"version_{number}", events)
    log = read_logs([tmp_path])
    assert log.steps.step.tolist() == [1, 2, 3, 3, 4]
    assert log.steps.attempt.tolist() == [0, 0, 0, 1, 1]
    assert log.steps.again.tolist() == [False, False, False, True, False]


def test_damage_ends_the_file_and_is_reported(tmp_path: Path) -> None:
    events = [(NOON + step, step, [simple("train/loss", step)]) for step in range(1, 10)]
    path = write(tmp_path, events)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    log = read_logs([path])
    steps = log.steps.step.tolist()
    assert 0 < len(steps) < 9
    assert steps == list(range(1, len(steps) + 1))
    assert "checksum" in log.warnings[0]


def test_a_file_cut_off_gives_the_records_before(tmp_path: Path) -> None:
    events = [(NOON + step, step, [simple("train/loss", step)]) for step in range(1, 10)]
    path = write(tmp_path, events)
    content = path.read_bytes()
    counts = set()
    for end in range(len(content) - 200, len(content)):
        path.write_bytes(content[:end])
        log = read_logs([path])
        counts.add(len(log.steps))
        assert log.steps.step.tolist() == list(range(1, len(log.steps) + 1))
        assert not log.warnings
    assert len(counts) > 1


def test_a_file_without_known_scalars_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path, [(NOON, 1, [simple("mystery", 1.0)])])
    with pytest.raises(UserError, match="no step found"):
        read_logs([path])


def test_the_checksum_is_crc32c() -> None:
    # RFC 3720, B.4: 32 bytes of zeros have the CRC32C 0x8a9136aa.
    crc = 0x8A9136AA
    assert masked_crc(bytes(32)) == ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


@given(
    st.floats(0, 4e9),
    st.integers(-5, 2**40),
    st.lists(st.tuples(st.text(max_size=9), st.floats(width=32, allow_nan=False)), max_size=4),
)
def test_events_are_decoded_as_protobuf_does(
    wall_time: float, step: int, values: list[tuple[str, float]]
) -> None:
    summary = Summary(value=[simple(tag, value) for tag, value in values])
    event = Event(wall_time=wall_time, step=step, summary=summary)
    assert scalars(event.SerializeToString()) == (wall_time, step, values)


def test_tensors_in_their_other_shapes() -> None:
    double = TensorProto(dtype=2, double_val=[2.5])
    content = TensorProto(dtype=1, tensor_content=struct.pack("<f", 1.5))
    several = TensorProto(dtype=1, float_val=[1.0, 2.0])
    values = [
        Summary.Value(tag=tag, tensor=one)
        for tag, one in (("d", double), ("c", content), ("s", several))
    ]
    assert scalars(Event(summary=Summary(value=values)).SerializeToString())[2] == [
        ("d", 2.5),
        ("c", 1.5),
    ]
