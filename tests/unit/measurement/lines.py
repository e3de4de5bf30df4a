"""Lines and logs that several tests of reading share."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from drillyard.measurement.parsed_log import ParsedLog
from drillyard.measurement.read_logs import read_logs

SECOND = 1_000_000
NOON = 1_785_585_600 * SECOND
"""2026-08-01T12:00:00Z."""


def write(path: Path, text: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def perf(step: int, seconds: float = 1.0, loss: float = 2.0) -> str:
    return (
        f"Step: {step} | Time: {seconds:.2f}s | TFLOPs/s/GPU: 9.5 | Tokens/s/GPU: 100 | Loss:"
        f" {loss:.4f}"
    )


def at(second: float) -> str:
    """A stamp so many seconds after noon."""
    whole, fraction = divmod(round(second * 1000), 1000)
    return f"2026-08-01T12:{whole // 60:02}:{whole % 60:02}.{fraction:03}Z"


def as_rows(log: ParsedLog) -> list[tuple[Any, ...]]:
    """Rows that compare equal, NaN included."""
    steps = log.steps
    return [
        tuple(None if value != value else value.item() for value in row)
        for row in zip(
            steps.step,
            steps.attempt,
            steps.seconds,
            steps.loss,
            steps.time_us,
            steps.line,
            strict=True,
        )
    ]


def read_bytes(content: bytes) -> ParsedLog:
    with tempfile.NamedTemporaryFile(suffix=".log") as file:
        file.write(content)
        file.flush()
        return read_logs([file.name])


SAMPLES = Path(__file__).parent / "samples"
WHOLE = {
    path.name: path.read_bytes() for path in sorted(SAMPLES.glob("*.*")) if path.suffix != ".md"
}
