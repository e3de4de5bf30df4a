"""The present state of a run for the live screen, updated line by line from metrics.jsonl and
events.jsonl.

The lines may come from local files or from a cluster. Speed is that of the last logged steps, so
that a slowdown shows.

Cost: about 10 microseconds a line, 150 bytes a step; goodput is recomputed now and then
(`refresh_goodput`).
"""

from __future__ import annotations

import statistics
import time
from array import array
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from drillyard.goodput import Goodput, Moment, account
from drillyard.reporting.event_text import Event, EventText, describe_event
from drillyard.reporting.gpu_price import GpuPrice
from drillyard.reporting.summary import percentile_95
from drillyard.telemetry.console import HEADLINES, flatten
from drillyard.telemetry.events import event_microseconds, moment

RECENT_STEPS: Final = 100
KEPT_EVENTS: Final = 100
SILENT_SECONDS: Final = 60.0
"""A run without output for so long, and for the time of ten steps, is called silent."""
GOODPUT_SHARE: Final = 0.02
"""The largest share of a core for recomputing goodput."""

PHASES: Final = {
    "run_start": "starting",
    "round_start": "starting",
    "first_step": "running",
    "step": "running",
    "evaluation_begin": "evaluating",
    "evaluation_end": "running",
    "checkpoint_begin": "saving",
    "checkpoint_end": "running",
    "export_begin": "exporting",
    "export_end": "running",
    "signal": "stopping",
    "failure": "failed",
    "restart": "restarting",
    "waiting": "waiting",
}


@dataclass(slots=True)
class LiveRun:
    """The state of a run so far. Pass lines to `add_metrics` and `add_event` in the order they were
    written."""

    name: str
    total_steps: int | None = None
    price: GpuPrice | None = None
    phase: str = "starting"
    over: bool = False
    """The last event was an end: `phase` is then completed, interrupted or failed."""
    begin_us: int | None = None
    last_us: int | None = None
    num_gpus: int | None = None
    """Of the last start; of the last logged step, where no start says it."""
    accelerator: str | None = None
    formula: str | None = None
    tokens: int = 0
    """Of the steps that led to the present state; steps between two logged ones count like the
    later."""
    memory_gib: float | None = None
    failures: int = 0
    attempts: int = 0
    steps: array[int] = field(default_factory=lambda: array("q"))
    losses: array[float] = field(default_factory=lambda: array("d"))
    """The losses of `steps`; a repeated step replaces all from there on."""
    recent: deque[Event] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))
    """The last lines of metrics.jsonl of the current attempt."""
    events: deque[EventText] = field(default_factory=lambda: deque(maxlen=KEPT_EVENTS))
    held_out: dict[str, tuple[int, float]] = field(default_factory=dict)
    """The last headline figures of evaluations by dotted name, each with its step."""
    account: Goodput | None = None
    _moments: list[Moment] = field(default_factory=list)
    _summed_moments: int = 0
    _next_sum: float = 0.0
    _started_gpus: int | None = None
    _attempt: int = 0
    _tokens_at: array[int] = field(default_factory=lambda: array("q"))

    @property
    def step(self) -> int:
        return self.steps[-1] if self.steps else 0

    @property
    def device(self) -> str:
        return "GPU" if self.accelerator else "rank"

    @property
    def failed(self) -> bool:
        return self.over and self.phase == "failed"

    @property
    def restarts(self) -> int:
        return max(0, self.attempts - 1)

    def add_metrics(self, record: Event) -> None:
        """Take a line of metrics.jsonl."""
        step, loss = int(record["step"]), record.get("loss")
        while self.steps and self.steps[-1] >= step:
            self.steps.pop(), self.losses.pop(), self._tokens_at.pop()
        covered = step - self.steps[-1] if self.steps else record.get("window_steps", 1)
        before = self._tokens_at[-1] if self._tokens_at else 0
        self.steps.append(step)
        self.losses.append(float("nan") if loss is None else loss)
        self.tokens = before + record.get("tokens", 0) * covered
        self._tokens_at.append(self.tokens)
        self.num_gpus = self._started_gpus or record.get("num_gpus", self.num_gpus)
        self.formula = record.get("formula", self.formula)
        if record.get("memory_gib") is not None:
            self.memory_gib = record["memory_gib"]
        if record.get("round", 0) != self._attempt:
            # Another attempt may run on other hardware, and its first step is no measure of speed.
            self._attempt = record.get("round", 0)
            self.recent.clear()
        self.recent.append(record)

    def add_event(self, event: Event) -> None:
        """Take a line of events.jsonl."""
        name = event["event"]
        self._moments.append(moment(event))
        at, gpus = self._moments[-1].at, self._moments[-1].num_gpus
        if gpus is not None and gpus != self._started_gpus:
            self.num_gpus = self._started_gpus = gpus
            # The cost of what came before is that of the old number.
            self._next_sum = 0.0
        self.begin_us = at if self.begin_us is None else self.begin_us
        self.last_us = at
        self.over = name == "end"
        self.phase = (
            str(event.get("status", "ended")) if self.over else PHASES.get(name, self.phase)
        )
        self.failures += name == "failure"
        if name == "round_start":
            self.attempts += 1
        elif name == "parameters":
            self.accelerator, self.formula = event.get("accelerator"), event.get("formula")
        elif name == "order":
            self.total_steps = event.get("total_steps") or self.total_steps
        elif name == "evaluation":
            for figure, value in flatten(event.get("results", {})).items():
                if figure.rpartition(".")[2] in HEADLINES:
                    self.held_out[figure] = (int(event.get("step") or 0), value)
        found = describe_event(event)
        if found is not None and name != "checkpoint_removed":
            self.events.append(found)

    def refresh_goodput(self) -> None:
        """Recompute goodput after new events, but rarely: its cost grows with the run."""
        started = time.monotonic()
        if self._summed_moments == len(self._moments) or (
            started < self._next_sum and not self.over
        ):
            return
        self.account = account(self._moments)
        self._summed_moments = len(self._moments)
        ended = time.monotonic()
        self._next_sum = ended + (ended - started) / GOODPUT_SHARE

    @property
    def gpus_of_speed(self) -> int | None:
        """The number of GPUs of `speed`; after a restart that of the attempt before, until this one
        has logged a step."""
        return self.recent[-1].get("num_gpus", self.num_gpus) if self.recent else self.num_gpus

    @property
    def speed(self) -> list[Event]:
        """The last logged steps of this attempt, without its first."""
        return list(self.recent)[1:] if len(self.recent) < RECENT_STEPS else list(self.recent)

    def median(self, name: str) -> float | None:
        """The median of a figure over the last logged steps; None where no step has it."""
        values = [
            value for value in (record.get(name) for record in self.speed) if value is not None
        ]
        return statistics.median(values) if values else None

    def percentile_95(self) -> float | None:
        """The 95th percentile of the last steps' times."""
        times = [record["step_seconds"] for record in self.speed]
        return percentile_95(times) if len(times) > 1 else None

    def seconds_left(self, now_us: int) -> float | None:
        """Seconds to the last step at the pace of the last logged steps, with their saves and
        evaluations.

        None without a known last step, before three logged steps of this attempt, and for a silent
        run.
        """
        if (
            self.over
            or not self.total_steps
            or len(self.recent) < 3
            or self.silent_seconds(now_us) is not None
        ):
            return None
        first, last = self.recent[1], self.recent[-1]
        steps: int = last["step"] - first["step"]
        if steps <= 0:
            return None
        pace = max(0, event_microseconds(last) - event_microseconds(first)) / 1e6 / steps
        return max(0, self.total_steps - self.step) * pace

    def wall_seconds(self, now_us: int) -> float | None:
        """Seconds since the run began, until now; until its last event if it is over or silent."""
        if self.begin_us is None or self.last_us is None:
            return None
        ended = self.over or self.silent_seconds(now_us) is not None
        end = self.last_us if ended else max(now_us, self.last_us)
        return max(0, end - self.begin_us) / 1e6

    def silent_seconds(self, now_us: int) -> float | None:
        """For how long a run that is not over has had no output, if unusually long; else None."""
        if self.over or self.last_us is None or self.phase == "waiting":
            return None
        usual = 10 * (self.median("step_seconds") or 0.0)
        silence = (now_us - self.last_us) / 1e6
        return silence if silence > max(SILENT_SECONDS, usual) else None

    def dollars(self, now_us: int) -> float | None:
        """The cost so far, without waiting, each stretch with the GPUs it had; None without a
        price."""
        wall = self.wall_seconds(now_us)
        if self.price is None or not self.num_gpus or wall is None:
            return None
        waited = self.account.times["waiting"] / 1e6 if self.account else 0.0
        by_gpus = self.account.microseconds_by_gpus if self.account else {}
        before = {gpus: spent / 1e6 for gpus, spent in by_gpus.items() if gpus != self.num_gpus}
        now = max(0.0, wall - waited - sum(before.values()))
        return self.price.cost(self.num_gpus, now) + sum(
            self.price.cost(gpus, seconds) for gpus, seconds in before.items()
        )
