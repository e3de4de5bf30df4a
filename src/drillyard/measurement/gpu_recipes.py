"""The three lines of gpu-recipes' `process_training_results.py`, from the same flags and files, so
that it can be replaced where a pipeline reads them.

    Average step time: 25.39738855
    TFLOPS/Accelerator: 692.98463368
    MFU: 0.70069225

The arithmetic is the tool's, in its order, so that the bytes are equal. Where the tool raises an
exception (METADATA lines, steps that are lists, lines without a timing) the line is passed over and
counted. The tables are the tool's own: its fp8 peak of an H100 is 1978 TFLOP/s where NVIDIA's data
sheet has 1979, and its FLOPs count attention over the whole sequence, so its MFU is not that of
`drillyard metrics` under 6N. Source of tables, defaults and output:
AI-Hypercomputer/gpu-recipes@2e1fd5e, src/utils/training_metrics (2026-08-12).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from drillyard.errors import UserError
from drillyard.loglines.sources import find_files, open_log
from drillyard.modelspec.flops import implausible_mfu

DEFAULT_START_STEP: Final = 10
DEFAULT_END_STEP: Final = 30
TIMING: Final = "train_step_timing in s"

PEAK_TFLOPS: Final[dict[tuple[str, str], float]] = {
    ("h100", "bf16"): 989,
    ("h100", "fp8"): 1978,
    ("h200", "bf16"): 989,
    ("h200", "fp8"): 1978,
    ("b200", "bf16"): 2250,
    ("b200", "fp8"): 4500,
    ("a100", "bf16"): 312,
    ("v5e", "bf16"): 197,
    ("v5p", "bf16"): 459,
}

FLOPS_PER_SAMPLE: Final[dict[str, tuple[float, int | None]]] = {
    "gpt3-5b": (6.69e13, 2048),
    "gpt3-175b": (2.2e15, 2048),
    "llama2-7b": (1.89e14, 4096),
    "llama2-70b": (1.82e15, 4096),
    "llama3-70b": (3.94e15, 8192),
    "llama3.1-8b": (4.74e14, 8192),
    "llama3.1-70b": (3.9129e15, 8192),
    "llama3.1-405b": (2.16533e16, 8192),
    "mixtral-7b": (3.4e14, None),
    "mixtral-8x7b": (3.4e14, None),
}
"""FLOPs of a training step per sample, and the sequence length for which that holds (None: the tool
does not say and no formula gives the value)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuRecipesRequest:
    """The tool's flags. `batch_size` is of all accelerators; `max_flops` and the peak are in
    TFLOP/s."""

    file: str | None
    batch_size: int | None
    num_accelerators: int | None
    model_type: str | None = None
    model_flops: float | None = None
    accelerator_type: str | None = None
    max_flops: float | None = None
    precision: str = "bf16"
    start_step: int | None = None
    end_step: int | None = None
    sequence_length: int | None = None


def gpu_recipes_lines(request: GpuRecipesRequest) -> tuple[str, list[str]]:
    """Return the lines that the tool prints, and warnings about them.

    Raises UserError for flags that are missing or not in the tables, and for a file without such
    steps.
    """
    batch_size, num_accelerators = request.batch_size, request.num_accelerators
    required = {
        "--file": request.file,
        "--batch_size": batch_size,
        "--num_accelerators": num_accelerators,
    }
    if lacking := [flag for flag, value in required.items() if value is None]:
        raise UserError(f"--format gpu-recipes needs {', '.join(lacking)}.")
    assert request.file is not None and batch_size is not None and num_accelerators is not None
    flops, peak = _flops_per_sample(request), _peak_tflops(request)
    start = DEFAULT_START_STEP if request.start_step is None else request.start_step
    end = DEFAULT_END_STEP if request.end_step is None else request.end_step
    files = find_files([request.file])
    if len(files) != 1:
        raise UserError(
            f"{request.file}: holds {len(files)} files; --format gpu-recipes reads one DLLogger"
            " file."
        )
    with open_log(files[0]) as stream:
        seconds, passed_over = timings(stream, start, end)
    if not seconds:
        raise UserError(
            f"{request.file}: no DLLogger line of the steps {start} to {end} has a step time;"
            " choose --start_step and --end_step."
        )
    if batch_size < 1 or num_accelerators < 1:
        raise UserError(
            f"--batch_size {batch_size}, --num_accelerators {num_accelerators}: give numbers"
            " above 0."
        )
    total: float = 0
    for value in seconds:
        # Since Python 3.12 `sum` compensates floats, and the last digit would depend on the
        # interpreter.
        total += value
    mean = total / len(seconds)
    if mean == 0:
        raise UserError(
            "the step times in the range average to 0 s; they cannot be turned into TFLOP/s."
        )
    tflops = flops * batch_size / mean / num_accelerators / 1e12
    mfu = f"{tflops / peak:.8f}"
    lines = f"Average step time: {mean:.8f}\nTFLOPS/Accelerator: {tflops:.8f}\nMFU: {mfu}\n"
    return lines, list(_warnings(request, float(mfu), passed_over))


def timings(
    lines: Iterable[str | bytes], start_step: int, end_step: int
) -> tuple[list[float], int]:
    """The seconds of the DLLogger `lines` with `start_step` <= step <= `end_step`, in order, and
    how many lines were passed over. What comes before `DLLL` in a line (a launcher's prefix) is
    ignored."""
    chosen: list[float] = []
    passed_over = 0
    for line in lines:
        record = _record(line)
        if record is None or record.get("step") == "PARAMETER":
            passed_over += record is None
            continue
        data = record.get("data")
        step, seconds = (
            _number(record.get("step")),
            _number(data.get(TIMING) if isinstance(data, dict) else None),
        )
        if step is None or seconds is None:
            passed_over += 1
        elif start_step <= step <= end_step:
            chosen.append(seconds)
    return chosen, passed_over


def _record(line: str | bytes) -> dict[str, Any] | None:
    text = line.decode("utf-8", "replace") if isinstance(line, bytes) else line
    _, mark, body = text.partition("DLLL")
    try:
        record = json.loads(body) if mark else None
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def _number(value: Any) -> float | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _flops_per_sample(request: GpuRecipesRequest) -> float:
    """`--model_flops` where given (and not 0), else the table's value for `--model_type`."""
    if request.model_flops:
        return request.model_flops
    if request.model_type is None:
        raise UserError(
            "--format gpu-recipes needs --model_type or --model_flops (FLOPs of a step per sample)."
        )
    if request.model_type not in FLOPS_PER_SAMPLE:
        raise UserError(
            f"--model_type {request.model_type} is not in gpu-recipes' table"
            f" ({', '.join(FLOPS_PER_SAMPLE)}); give --model_flops."
        )
    return FLOPS_PER_SAMPLE[request.model_type][0]


def _peak_tflops(request: GpuRecipesRequest) -> float:
    """`--max_flops` in TFLOP/s where given (and not 0), else the table's value for accelerator and
    precision."""
    if request.max_flops:
        return request.max_flops
    if request.accelerator_type is None:
        raise UserError(
            "--format gpu-recipes needs --accelerator_type or --max_flops (peak in TFLOP/s)."
        )
    peak = PEAK_TFLOPS.get((request.accelerator_type, request.precision))
    if peak is None:
        known = ", ".join(f"{name} {how}" for name, how in PEAK_TFLOPS)
        raise UserError(
            f"--accelerator_type {request.accelerator_type} at {request.precision} is not in"
            f" gpu-recipes' table ({known}); give --max_flops."
        )
    return peak


def _warnings(request: GpuRecipesRequest, mfu: float, passed_over: int) -> Iterator[str]:
    if passed_over:
        yield f"{passed_over} lines without a step and a step time were passed over"
    if (warning := implausible_mfu(mfu, request.precision)) is not None:
        yield f"MFU {warning}"
    length = (
        None
        if request.model_flops
        else FLOPS_PER_SAMPLE.get(request.model_type or "", (0.0, None))[1]
    )
    if (
        request.sequence_length is not None
        and length is not None
        and request.sequence_length != length
    ):
        yield (
            f"FLOPs per sample of {request.model_type} are those of sequences of {length} tokens,"
            f" not of {request.sequence_length}; give --model_flops"
        )
