"""RunLog: everything a training run writes about itself, behind a handful of calls.

Rank 0 writes metrics.jsonl, events.jsonl, dllogger.json, the trackers (TensorBoard, W&B, MLflow)
and the console line; on other ranks every call returns at once. The logs are append-only: a resumed
run continues the same files.

Cost per logged step: four short lines formatted and written, under 100 microseconds, plus the
trackers (trackers.py). Nothing here touches a device.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from drillyard.telemetry import console as lines
from drillyard.telemetry.events import EVENTS_FILE, EventName, event_line, utc_now
from drillyard.telemetry.jsonlines import LineFile, encode
from drillyard.telemetry.metrics import METRICS_FILE, StepRecord, ThroughputFormula
from drillyard.telemetry.trackers import Trackers

if TYPE_CHECKING:
    from drillyard.config.run import RunConfig
    from drillyard.hardware import Accelerator

ConsoleMode = Literal["text", "json", "none"]
Span = Literal["checkpoint", "evaluation", "export"]

_TRACKED = (
    "loss",
    "learning_rate",
    "grad_norm",
    "step_seconds",
    "data_seconds",
    "tokens_per_second_per_gpu",
    "tflops_per_gpu",
    "mfu",
    "memory_gib",
    "skipped_steps",
)


DLLOGGER_FILE = "dllogger.json"
"""The logged steps in the format of NVIDIA's DLLogger: `DLLL ` and one JSON object per line."""


class RunLog:
    """The log of one attempt. Call `parameters` before the first `step`, and `close` (or use
    `with`) at the end.

    `attempt` counts from 0. `console`: `text` prints lines for people, the PerfLogger's among them,
    `json` one object per line, `none` nothing. `total_steps`, where known, is in the JSON lines to
    show progress. `before_write`: called on rank 0 before each event and step.
    """

    def __init__(
        self,
        run_directory: Path,
        *,
        rank: int,
        config: RunConfig,
        console: ConsoleMode = "text",
        attempt: int = 0,
        total_steps: int | None = None,
        before_write: Callable[[], None] = lambda: None,
    ) -> None:
        self._writes = rank == 0
        self._before_write = before_write
        self._rank = rank
        self._attempt = attempt
        self._config = config
        self._formula: ThroughputFormula | None = None
        self._failed_parts: set[str] = set()
        self._started = time.time()
        self.total_steps = total_steps if total_steps is not None else config.training.steps
        if not self._writes:
            return
        self._console: ConsoleMode = console
        self._events = LineFile(run_directory / EVENTS_FILE, self.warn)
        self._metrics = LineFile(run_directory / METRICS_FILE, self.warn)
        self._dllogger = LineFile(run_directory / DLLOGGER_FILE, self.warn)
        self._trackers = Trackers(run_directory, config, self.warn, first_start=attempt == 0)

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def event(self, name: EventName, step: int | None = None, **fields: Any) -> None:
        """Append an event (vocabulary in events.py). A `resume` also rewinds the trackers to its
        step."""
        if not self._writes:
            return
        self._before_write()
        place = {"round": self._attempt, "rank": self._rank, "step": step}
        self._events.write(event_line(name, {**place, **fields}))
        if name == "resume" and step is not None:
            self._trackers.resumed(step)
        if self._console == "json" and name != "step":
            self._print(event_line(name, {**place, **fields}))
        elif (
            self._console == "text" and (line := lines.format_event(name, step, fields)) is not None
        ):
            self._print(line)
        if name == "checkpoint":
            # The logs up to a checkpoint must be as durable as the checkpoint, on object-store
            # mounts too.
            for file in (self._events, self._metrics, self._dllogger):
                file.sync()

    @contextmanager
    def span(self, name: Span, step: int, **fields: Any) -> Iterator[dict[str, Any]]:
        """Write `<name>_begin` and, unless the body raises, `<name>_end` with seconds and the
        yielded dict."""
        begun = time.perf_counter()
        self.event(cast(EventName, f"{name}_begin"), step, **fields)
        found: dict[str, Any] = {}
        yield found
        self.event(
            cast(EventName, f"{name}_end"),
            step,
            seconds=time.perf_counter() - begun,
            **fields,
            **found,
        )

    def parameters(
        self,
        count: int,
        trainable: int,
        formula: str,
        flops_per_token: float,
        accelerator: Accelerator | None,
        precision: str | None = None,
    ) -> None:
        """Set the basis of TFLOP/s and MFU: parameters, FLOPs per token under the named formula,
        the accelerator.

        The peak is the accelerator's at `precision` (default: the config's); without a peak there
        is no MFU. `describe_model` returns these arguments.
        """
        precision = precision or self._config.training.precision
        peak = None if accelerator is None else accelerator.peak_flops.get(precision)
        name = None if accelerator is None else accelerator.name
        self._formula = ThroughputFormula(formula, flops_per_token, peak)
        self.event(
            "parameters",
            count=count,
            trainable=trainable,
            formula=formula,
            flops_per_token=flops_per_token,
            accelerator=name,
            precision=precision,
            peak_flops=peak,
        )
        if self._writes and self._console == "text":
            self._print(lines.format_parameters_line(count, formula, flops_per_token))

    def step(self, record: StepRecord) -> None:
        if not self._writes:
            return
        self._before_write()
        assert self._formula is not None, "call RunLog.parameters before the first step"
        time_of_day = utc_now()
        fields = asdict(record)
        if record.epoch is None:
            del fields["epoch"]
        metrics = {
            "time": time_of_day,
            "round": self._attempt,
            **fields,
            **self._formula.rates(record),
        }
        timing = ("step", "step_seconds", "window_steps", "data_seconds", "compile_seconds")
        event = {"time": time_of_day, "event": "step", "round": self._attempt, "rank": self._rank}
        self._events.write(
            encode(event | {name: fields[name] for name in timing if fields[name] is not None})
        )
        line = encode(metrics)
        self._metrics.write(line)
        self._dllogger.write(
            _dllogger_line(metrics, self._config.data.sequence_length, self._started)
        )
        if self._console == "text":
            self._print(lines.format_step_line(metrics))
        elif self._console == "json":
            total = "" if self.total_steps is None else f'"total_steps": {self.total_steps}, '
            self._print(f'{{"event": "step", {total}{line[1:]}')
        scalars = {f"train/{name}": metrics[name] for name in _TRACKED if metrics[name] is not None}
        self._trackers.scalars(record.step, scalars)

    def evaluation(self, step: int, results: dict[str, Any]) -> None:
        """Log the results of an evaluation: nested names to numbers, such as {"spider": {"loss":
        0.51}}."""
        if not self._writes:
            return
        self.event("evaluation", step, results=results)
        self._trackers.scalars(
            step, {f"eval/{n.replace('.', '/')}": v for n, v in lines.flatten(results).items()}
        )
        if self._console == "text":
            self._print(lines.format_evaluation_line(step, results))

    def checkpoint(
        self, step: int, path: Path, *, blocking_seconds: float, seconds: float, size_bytes: int
    ) -> None:
        """Log a complete checkpoint: seconds that training waited, seconds in all, size."""
        sizes = {"blocking_seconds": blocking_seconds, "seconds": seconds, "bytes": size_bytes}
        self.event("checkpoint", step, path=str(path), **sizes)

    def message(self, text: str) -> None:
        """Print a line for people (a warning, a summary); in JSON mode it is an object with `event:
        message`."""
        if self._writes and self._console == "text":
            self._print(text)
        elif self._writes and self._console == "json":
            self._print(event_line("message", {"round": self._attempt, "text": text}))

    @contextmanager
    def optional(self, what: str, errors: type[Exception] = Exception) -> Iterator[None]:
        """Turn an exception (one of `errors`) of optional work (no collectives) into a warning,
        once per `what`."""
        try:
            yield
        except errors as error:
            if what not in self._failed_parts:
                self._failed_parts.add(what)
                self.warn(f"{what} failed: {type(error).__name__}: {error}")

    def closing(self, text: Sequence[str], summary: dict[str, Any]) -> None:
        """Print a completed run's closing lines, or its summary as JSON; the last call, after
        `close`."""
        if self._rank == 0 and self._console == "text":
            self._print("\n".join(text))
        elif self._rank == 0 and self._console == "json":
            self._print(event_line("summary", summary))

    def warn(self, text: str) -> None:
        """Record and print a problem that does not end the run."""
        self.event("warning", text=text)

    def close(self) -> None:
        """Flush the trackers and close the files."""
        if not self._writes:
            return
        self._trackers.close()
        for file in (self._metrics, self._dllogger, self._events):
            file.close()
        self._writes = False

    def _print(self, line: str) -> None:
        try:
            # One write for line and newline: the checkpoint thread prints too.
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()
        except OSError:
            # The pipe is closed or the disk full. The files still hold everything.
            self._console = "none"


def _dllogger_line(record: dict[str, Any], sequence_length: int, started: float) -> str:
    """A line of metrics.jsonl as a LOG line of DLLogger's JSON backend; `started` is when the
    attempt began.

    The names in `data` are NeMo's, which readers in the field look for: `consumed_samples` counts
    sequences, `train_step_timing in s` is the mean over the window. Known readers fail on PARAMETER
    and METADATA lines, so there are none.
    """
    now = time.time()
    data: dict[str, Any] = {
        "reduced_train_loss": record["loss"],
        "lr": record["learning_rate"],
        "global_step": record["step"],
        "consumed_samples": record["step"] * (record["tokens"] // sequence_length),
        "train_step_timing in s": record["step_seconds"],
    }
    if record["grad_norm"] is not None:
        data["grad_norm"] = record["grad_norm"]
    if record.get("epoch") is not None:
        data["epoch"] = int(record["epoch"])
    entry = {
        "timestamp": f"{now:.6f}",
        "datetime": datetime.fromtimestamp(now).isoformat(" ", "microseconds"),
        "elapsedtime": f"{now - started:.6f}",
        "type": "LOG",
        "step": record["step"],
        "data": data,
    }
    return "DLLL " + encode(entry)
