"""TensorBoard event files: scalars, read without tensorflow, tensorboard or torch.

A file is a row of TFRecords: length (uint64), its masked CRC32C, the data, its masked CRC32C; all
little-endian. The data is an `Event` message (wall_time = field 1, double; step = 2; summary = 5),
a summary has values (field 1) with a tag (1) and a `simple_value` (2, float) or a `tensor` (8) that
holds one number. Everything else is skipped by its length. Sources:
tensorflow/core/lib/io/record_writer.h, tensorflow/core/util/event.proto, summary.proto,
tensor.proto.

The tags of the frameworks' writers are known by name; values of one step become one record, whose
time is that of its loss. A step that comes again begins a new attempt. A record that is cut off is
left out; one whose checksum is wrong ends the file, as nothing after it can be trusted, and is
reported.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from drillyard.loglines.blocks import Readable
from drillyard.loglines.prefixes import NOWHERE
from drillyard.measurement.formats.log_format import DocumentFormat, ParsedDocument
from drillyard.measurement.lanes import Lanes, nonfinite_flags
from drillyard.measurement.parsed_log import LATEST_SECONDS, times_us

TAGS: Final[dict[str, str]] = {
    # Drillyard
    "train/loss": "loss",
    "train/learning_rate": "learning_rate",
    "train/grad_norm": "grad_norm",
    "train/step_seconds": "seconds",
    "train/tokens_per_second_per_gpu": "printed_tokens_per_second_per_gpu",
    "train/tflops_per_gpu": "printed_tflops_per_gpu",
    "train/mfu": "printed_mfu",
    "train/memory_gib": "memory_gib",
    # Megatron-LM
    "lm loss": "loss",
    "iteration-time": "seconds",
    "learning-rate": "learning_rate",
    "grad-norm": "grad_norm",
    "batch-size": "samples",
    "throughput": "printed_tflops_per_gpu",
    # NeMo
    "reduced_train_loss": "loss",
    "train_step_timing in s": "seconds",
    "lr": "learning_rate",
    "grad_norm": "grad_norm",
    "consumed_samples": "_samples_so_far",
    "TFLOPS_per_GPU": "printed_tflops_per_gpu",
    # torchtitan
    "loss_metrics/global_avg_loss": "loss",
    "time_metrics/end_to_end(s)": "seconds",
    "throughput(tps)": "printed_tokens_per_second_per_gpu",
    "tflops": "printed_tflops_per_gpu",
    "memory/max_reserved(GiB)": "memory_gib",
    # torchtune
    "tokens_per_second_per_gpu": "printed_tokens_per_second_per_gpu",
    "peak_memory_alloc": "memory_gib",
    # GPT-NeoX
    "train/lm_loss": "loss",
    # MaxText
    "learning/loss": "loss",
    "learning/grad_norm": "grad_norm",
    "learning/current_learning_rate": "learning_rate",
    "perf/step_time_seconds": "seconds",
    "perf/per_device_tflops_per_sec": "printed_tflops_per_gpu",
    "perf/per_device_tokens_per_sec": "printed_tokens_per_second_per_gpu",
    # Lightning and others
    "train_loss": "loss",
    "loss": "loss",
}
"""Tag -> column. `iteration-time` of Megatron-LM is in seconds."""
MOVING: Final = frozenset({"train_step_timing in s"})
_SCALE: Final = {"mfu(%)": ("printed_mfu", 0.01)}
_BATCH: Final = 4096
_LARGEST: Final = 1 << 30


def _table() -> list[int]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = (byte >> 1) ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    return table


_CRC: Final = _table()


def masked_crc(data: bytes) -> int:
    """CRC32C (Castagnoli) of `data`, rotated and offset as TFRecord files store it."""
    table, crc = _CRC, 0xFFFFFFFF
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def records(stream: Readable) -> Iterator[bytes]:
    """The data of whole records. Raises ValueError where a checksum is wrong."""
    number = 0
    while len(header := _exactly(stream, 12)) == 12:
        number += 1
        length, check = struct.unpack("<QI", header)
        if masked_crc(header[:8]) != check or length > _LARGEST:
            raise ValueError(f"record {number}: the checksum of its length is wrong")
        data = _exactly(stream, length + 4)
        if len(data) < length + 4:
            return
        if masked_crc(data[:-4]) != struct.unpack("<I", data[-4:])[0]:
            raise ValueError(f"record {number}: its checksum is wrong")
        yield data[:-4]


def _exactly(stream: Readable, count: int) -> bytes:
    data = stream.read(count)
    while 0 < len(data) < count and (more := stream.read(count - len(data))):
        data += more
    return data


def _fields(message: bytes) -> Iterator[tuple[int, int, Any]]:
    """Number, wire type and value of each field; raises IndexError or struct.error for what is no
    message."""
    position = 0
    while position < len(message):
        key, position = _varint(message, position)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value: Any
            value, position = _varint(message, position)
        elif wire == 2 or wire in _FIXED_BYTES:
            length, position = (
                _varint(message, position) if wire == 2 else (_FIXED_BYTES[wire], position)
            )
            value = message[position : position + length]
            position += length
        else:
            return
        yield number, wire, value


def _varint(message: bytes, position: int) -> tuple[int, int]:
    result = shift = 0
    while True:
        byte = message[position]
        position += 1
        result |= (byte & 0x7F) << shift
        if byte < 0x80:
            return result, position
        shift += 7


def scalars(event: bytes) -> tuple[float, int, list[tuple[str, float]]]:
    """Wall time (seconds since 1970), step and the scalars of an event."""
    wall_time, step = 0.0, 0
    found: list[tuple[str, float]] = []
    for number, wire, value in _fields(event):
        if number == 1 and wire == 1:
            wall_time = struct.unpack("<d", value)[0]
        elif number == 2 and wire == 0:
            step = value - (1 << 64) if value >> 63 else value
        elif number == 5 and wire == 2:
            for inner, inner_wire, content in _fields(value):
                if inner == 1 and inner_wire == 2 and (scalar := _scalar(content)) is not None:
                    found.append(scalar)
    return wall_time, step, found


def _scalar(value: bytes) -> tuple[str, float] | None:
    tag, number = "", None
    for field_number, wire, content in _fields(value):
        if field_number == 1 and wire == 2:
            tag = content.decode("utf-8", "replace")
        elif field_number == 2 and wire == 5:
            number = struct.unpack("<f", content)[0]
        elif field_number == 8 and wire == 2:
            number = _tensor(content)
    return None if number is None else (tag, number)


_FIXED_BYTES: Final = {1: 8, 5: 4}
"""Of wire types with a fixed length (protobuf encoding: I64, I32)."""
_TENSOR_TYPES: Final = {1: ("<f", 4), 2: ("<d", 8), 3: ("<i", 4), 9: ("<q", 8)}


def _tensor(tensor: bytes) -> float | None:
    """The number in a tensor of one element; None for others."""
    dtype, content = 0, None
    for number, wire, value in _fields(tensor):
        if number == 1 and wire == 0:
            dtype = value
        elif (
            (number in (4, 5, 6) and wire == 2)
            or (number == 5 and wire == 5)
            or (number == 6 and wire == 1)
        ):
            content = value
        elif number in (7, 10) and wire == 2:
            return float(_varint(value, 0)[0])
    code, size = _TENSOR_TYPES.get(dtype, ("", -1))
    return (
        float(struct.unpack(code, content)[0])
        if content is not None and len(content) == size
        else None
    )


class TensorBoardEvents(DocumentFormat):
    name = "tensorboard"
    title = "TensorBoard event file"
    preference = 100

    @staticmethod
    def matches(head: bytes) -> bool:
        """Whether a file is an event file: its first record names the format's version."""
        checked = len(head) >= 12 and masked_crc(head[:8]) == struct.unpack("<I", head[8:12])[0]
        return checked and b"brain.Event" in head[:64]

    def read(self, name: str, file: int, stream: Readable) -> ParsedDocument:
        self._parsed = parsed = ParsedDocument(lanes=Lanes(file))
        self._rows: dict[int, dict[str, float]] = {}
        """Values by step that are not in a lane yet."""
        self._last: dict[str, int] = {}
        self._attempt, self._moving = 0, False
        try:
            for data in records(stream):
                parsed.records += 1
                parsed.bytes += len(data) + 16
                wall_time, step, found = scalars(data)
                if 0 < wall_time < LATEST_SECONDS:
                    parsed.last_time_us = round(wall_time * 1e6)
                    parsed.first_time_us = parsed.first_time_us or parsed.last_time_us
                for tag, value in found:
                    self._add(wall_time, step, tag, value)
        except (ValueError, IndexError, struct.error) as error:
            parsed.error = str(error)
        self._flush()
        return parsed

    def _add(self, wall_time: float, step: int, tag: str, value: float) -> None:
        column, scale = _SCALE.get(tag) or (TAGS.get(tag), 1.0)
        if column is None:
            return
        if step <= self._last.get(tag, -1):
            self._flush()
            self._attempt += 1
            self._last.clear()
        self._last[tag] = step
        self._moving |= tag in MOVING
        row = self._rows.get(step)
        if row is None:
            if len(self._rows) >= 2 * _BATCH:
                self._flush(_BATCH)
            row = self._rows[step] = {
                "step": step,
                "line": self._parsed.records,
                "_time": wall_time,
            }
        row[column] = value * scale
        if column == "loss":
            row["_time"] = wall_time

    def _flush(self, count: int | None = None) -> None:
        """Append the `count` oldest rows to the lane; rows that have neither loss nor time are no
        steps."""
        chosen = [self._rows.pop(step) for step in sorted(self._rows)[:count]]
        rows = [row for row in chosen if "loss" in row or "seconds" in row]
        if not rows:
            return
        names = sorted({name for row in rows for name in row} - {"_time"})
        columns: dict[str, Any] = {
            name: np.array([row.get(name, np.nan) for row in rows]) for name in names
        }
        columns["time_us"] = times_us(np.array([row["_time"] for row in rows]))
        columns["flags"] = nonfinite_flags(
            len(rows), columns, {"loss": [row.get("loss") for row in rows]}
        )
        columns["_attempt"] = np.full(len(rows), self._attempt)
        if self._moving:
            columns["window_steps"] = np.zeros(len(rows))
        self._parsed.lanes.lane(NOWHERE).extend(len(rows), columns)
