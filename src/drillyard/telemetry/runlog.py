"""RunLog: everything a training run writes about itself, behind a handful of calls.

Rank 0 writes metrics.jsonl, events.jsonl, dllogger.json, the trackers (TensorBoard, W&B, MLflow) and the console line;
on every other rank all calls return at once, so the trainer calls them without asking. The logs are append-only: a
resumed run goes on in the same files.

Cost per logged step: four short lines formatted and written, under 100 microseconds, besides the trackers (see
trackers.py). Nothing here touches a device: the caller has read the loss before.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from drillyard.telemetry import console as lines
from drillyard.telemetry.dllogger import DLLOGGER_FILE, dllogger_line
from drillyard.telemetry.events import EVENTS_FILE, EventName, event_line, utc_now
from drillyard.telemetry.jsonlines import LineFile, encode
from drillyard.telemetry.metrics import METRICS_FILE, StepRecord
from drillyard.telemetry.summary import closing_lines, model_of
from drillyard.telemetry.throughput import ThroughputFormula, derive
from drillyard.telemetry.trackers import Trackers

if TYPE_CHECKING:
    from drillyard.config.run import RunConfig
    from drillyard.hardware import Accelerator

ConsoleMode = Literal["text", "json", "none"]
Span = Literal["checkpoint", "evaluation", "export"]

_SPANS: dict[Span, tuple[EventName, EventName]] = {
    "checkpoint": ("checkpoint_begin", "checkpoint_end"),
    "evaluation": ("evaluation_begin", "evaluation_end"),
    "export": ("export_begin", "export_end"),
}

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


class RunLog:
    """The log of one round of ranks. Call `parameters` before the first `step`, and `close` (or use `with`) at the end.

    `round_number` is 0 for the first start and grows with each restart. `console`: `text` prints lines for
    people with the PerfLogger's among them, `json` one object per line, `none` nothing.
    `total_steps`, where known, goes with the JSON lines so that whoever reads them can show progress.
    """

    def __init__(
        self,
        run_directory: Path,
        *,
        rank: int,
        config: RunConfig,
        console: ConsoleMode = "text",
        round_number: int = 0,
        total_steps: int | None = None,
    ) -> None:
        self._writes = rank == 0
        self._rank = rank
        self._round = round_number
        self._config = config
        self._ruler: ThroughputFormula | None = None
        self._failed_parts: set[str] = set()
        self._started = time.time()
        self.total_steps = total_steps if total_steps is not None else config.training.steps
        if not self._writes:
            return
        self._console: ConsoleMode = console
        self._events = LineFile(run_directory / EVENTS_FILE, self.warn)
        self._metrics = LineFile(run_directory / METRICS_FILE, self.warn)
        self._dllogger = LineFile(run_directory / DLLOGGER_FILE, self.warn)
        self._trackers = Trackers(run_directory, config, self.warn, first_start=round_number == 0)

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def event(self, name: EventName, step: int | None = None, **fields: Any) -> None:
        """Append an event (vocabulary in events.py). A `resume` also tells the trackers from which step they go on."""
        if not self._writes:
            return
        place = {"round": self._round, "rank": self._rank, "step": step}
        self._events.write(event_line(name, {**place, **fields}))
        if name == "resume" and step is not None:
            self._trackers.resumed(step)
        if self._console == "json" and name != "step":
            self._print(event_line(name, {**place, **fields}))
        elif self._console == "text" and (line := lines.format_event(name, step, fields)) is not None:
            self._print(line)
        if name == "checkpoint":
            # What led to a checkpoint is as durable as the checkpoint itself, on object-store mounts too.
            for file in (self._events, self._metrics, self._dllogger):
                file.sync()

    @contextmanager
    def span(self, name: Span, step: int, **fields: Any) -> Iterator[dict[str, Any]]:
        """Training waits: writes `<name>_begin` and, unless the body raises, `<name>_end` with its seconds and what the
        body has put into the dictionary."""
        begin, end = _SPANS[name]
        begun = time.perf_counter()
        self.event(begin, step, **fields)
        found: dict[str, Any] = {}
        yield found
        self.event(end, step, seconds=time.perf_counter() - begun, **fields, **found)

    def parameters(
        self,
        count: int,
        trainable: int,
        formula: str,
        flops_per_token: float,
        accelerator: Accelerator | None,
        precision: str | None = None,
    ) -> None:
        """What TFLOP/s and MFU rest on: parameter counts, FLOPs per token under the named formula, the accelerator.

        The peak is the accelerator's at `precision` (default: the config's compute precision); without one there is no
        MFU. `describe_model` makes these arguments.
        """
        precision = precision or self._config.training.precision
        peak = None if accelerator is None else accelerator.peak_flops.get(precision)
        name = None if accelerator is None else accelerator.name
        self._ruler = ThroughputFormula(formula, flops_per_token, name, precision, peak)
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
        """Log a step everywhere."""
        if not self._writes:
            return
        assert self._ruler is not None, "RunLog.parameters comes before the first step"
        time_of_day = utc_now()
        fields = asdict(record)
        if record.epoch is None:
            del fields["epoch"]
        metrics = {"time": time_of_day, "round": self._round, **fields, **derive(record, self._ruler)}
        timing = ("step", "step_seconds", "window_steps", "data_seconds", "compile_seconds")
        event = {"time": time_of_day, "event": "step", "round": self._round, "rank": self._rank}
        self._events.write(encode(event | {name: fields[name] for name in timing if fields[name] is not None}))
        line = encode(metrics)
        self._metrics.write(line)
        self._dllogger.write(
            dllogger_line(metrics, sequence_length=self._config.data.sequence_length, started=self._started)
        )
        if self._console == "text":
            self._print(lines.format_step_line(metrics))
        elif self._console == "json":
            total = "" if self.total_steps is None else f'"total_steps": {self.total_steps}, '
            self._print(f'{{"event": "step", {total}{line[1:]}')
        scalars = {f"train/{name}": metrics[name] for name in _TRACKED if metrics[name] is not None}
        self._trackers.scalars(record.step, scalars)

    def evaluation(self, step: int, results: dict[str, Any]) -> None:
        """Log the results of an evaluation: nested names to numbers, such as {"spider": {"loss": 0.51}}."""
        if not self._writes:
            return
        self.event("evaluation", step, results=results)
        self._trackers.scalars(step, {f"eval/{n.replace('.', '/')}": v for n, v in lines.flatten(results).items()})
        if self._console == "text":
            self._print(lines.format_evaluation_line(step, results))

    def checkpoint(self, step: int, path: Path, *, blocking_seconds: float, seconds: float, size_bytes: int) -> None:
        """Log that a checkpoint is complete on disk: how long training waited, how long it took in all, its size."""
        sizes = {"blocking_seconds": blocking_seconds, "seconds": seconds, "bytes": size_bytes}
        self.event("checkpoint", step, path=str(path), **sizes)

    def message(self, text: str) -> None:
        """Print a line for people (a warning, a summary); in JSON mode it is an object with `event: message`."""
        if self._writes and self._console == "text":
            self._print(text)
        elif self._writes and self._console == "json":
            self._print(event_line("message", {"round": self._round, "text": text}))

    @contextmanager
    def optional(self, what: str) -> Iterator[None]:
        """Work that no training depends on and that has no collective in it: what it raises is a warning, once."""
        try:
            yield
        except Exception as error:
            if what not in self._failed_parts:
                self._failed_parts.add(what)
                self.warn(f"{what} failed: {type(error).__name__}: {error}")

    def closing(self, summary: dict[str, Any], run_directory: Path) -> None:
        """Print how a completed run ended; the last call, after `close`."""
        if self._rank == 0 and self._console == "text":
            self._print("\n".join(closing_lines(summary, run_directory)))
        elif self._rank == 0 and self._console == "json":
            self._print(event_line("summary", {**summary, "model": str(model_of(summary, run_directory))}))

    def warn(self, text: str) -> None:
        """Record that something went wrong which does not end the run, and print it."""
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
            # Nobody reads the console any more (its pipe is closed or its disk full); the files still hold everything.
            self._console = "none"
